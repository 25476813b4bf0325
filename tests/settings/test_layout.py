"""Layouts of processes that cannot work, whatever the model is."""

import pytest

from mxtrain.errors import ConfigError
from mxtrain.settings.layout import RELATIONS, global_batch_size
from mxtrain.settings.machine import Machine
from mxtrain.settings.read import read_settings
from mxtrain.settings.relations import check

CP, TP, PP = (f"--parallelism.{kind}_parallel_degree" for kind in ("context", "tensor", "pipeline"))
EP, ETP = "--parallelism.expert_parallel_degree", "--parallelism.expert_tensor_parallel_degree"
FUSED, MXNORM = "--model.converters=fused_rmsnorm", "--model.converters=mxnorm"
ASYNC = "--parallelism.enable_async_tensor_parallel"

GOOD = [
    (f"{CP}=2 {MXNORM} --training.seq_len=128", 2),
    (f"{CP}=2 {FUSED} --training.seq_len=8", 2),
    (f"{CP}=4 {MXNORM} --training.seq_len=768", 8),
    (f"{CP}=2 {TP}=2 {FUSED} --training.seq_len=24", 4),
    (f"{TP}=4 {FUSED} --training.seq_len=24", 4),
    (f"{MXNORM} --training.seq_len=34", 2),
    (f"{EP}=4 {TP}=2 {FUSED}", 4),
    (f"{EP}=2 {ETP}=2 {TP}=2 {FUSED}", 4),
    (f"{ASYNC} {TP}=2 {FUSED} --compile.enable --compile.components=model --activation_checkpoint.mode=none", 2),
    (f"{TP}=2 {MXNORM} --mxnorm.gather=quantized --training.seq_len=192", 2),
    (f"{TP}=2 {MXNORM} --training.seq_len=96", 2),
    (f"{MXNORM} --mxnorm.gather=quantized --training.seq_len=34", 1),
    ("--training.local_batch_size=3 --parallelism.pipeline_parallel_microbatch_size=2", 1),
]
BAD = [
    ("", 2, "--parallelism.data_parallel_shard_degree=3", "= 3 does not fit 2 process"),
    ("", 6, f"{CP}=4", "data_parallel_shard_degree = -1 does not fit 6 process"),
    (
        f"{CP}=2 {MXNORM}",
        2,
        "--training.seq_len=192",
        "training.seq_len = 192 is not a multiple of 128, which parallelism.context_parallel_degree = 2 and "
        "tensor_parallel_degree = 1 need with blocks of 32 tokens$",
    ),
    (MXNORM, 1, "--training.seq_len=33", "training.seq_len = 33 is odd, and TorchTitan's models take even numbers"),
    (f"{CP}=2 {FUSED}", 2, "--training.seq_len=6", "training.seq_len = 6 is not a multiple of 4"),
    (f"{CP}=2 {TP}=2 {FUSED}", 4, "--training.seq_len=12", "training.seq_len = 12 is not a multiple of 8"),
    (f"{TP}=4 {FUSED}", 4, "--training.seq_len=12", "training.seq_len = 12 is not a multiple of 8"),
    (
        f"{CP}=2 {MXNORM} --training.seq_len=128 --validation.enable --validation.seq_len=128",
        2,
        "--validation.seq_len=126",
        "validation.seq_len = 126 is not a multiple of 4",
    ),
    (
        f"{TP}=2 {MXNORM} --mxnorm.gather=quantized",
        2,
        "--training.seq_len=96",
        "mxnorm.gather = 'quantized' needs whole blocks of 32 tokens on each of 2 processes, .*, and training.seq_len "
        "= 96 is not a multiple of 64; allowed is 'auto'$",
    ),
    (
        f"{TP}=2 {MXNORM} --mxnorm.gather=quantized --training.seq_len=128 --validation.enable --validation.seq_len=64",
        2,
        "--validation.seq_len=32",
        "and validation.seq_len = 32 is not a multiple of 64",
    ),
    (
        f"{TP}=2 --model.converters=mx_linear",
        2,
        "--mxnorm.gather=quantized",
        "mxnorm.gather = 'quantized' needs converter 'mxnorm', not 'mx_linear', whose norms send no codes",
    ),
    ("", 4, f"{EP}=3", "expert_parallel_degree = 3 times expert_tensor_parallel_degree = 1 does not divide 4"),
    (f"{TP}=2 {FUSED}", 2, f"{ETP}=4", "expert_tensor_parallel_degree = 4 is neither 1 nor tensor_parallel_degree = 2"),
    (MXNORM, 1, ASYNC, "enable_async_tensor_parallel = True finds no products to overlap with converter 'mxnorm'"),
    (FUSED, 1, ASYNC, "enable_async_tensor_parallel = True needs compile.enable = true"),
    (
        "--training.local_batch_size=4",
        2,
        "--training.global_batch_size=12",
        "training.global_batch_size = 12 is not a multiple of training.local_batch_size = 4 times 2 data-parallel "
        "process.es.; to keep it, set training.local_batch_size to 3",
    ),
]


def check_on(flags: str, processes: int) -> None:
    check(RELATIONS, read_settings(flags.split()), Machine(processes, has_gpus=False))


@pytest.mark.parametrize("flags, processes", GOOD)
def test_layouts_that_fit(flags, processes):
    check_on(flags, processes)


@pytest.mark.parametrize("fine, processes, flag, message", BAD)
def test_one_line_says_what_is_wrong(fine, processes, flag, message):
    check_on(fine, processes)
    with pytest.raises(ConfigError, match=message) as raised:
        check_on(f"{fine} {flag}", processes)
    assert "\n" not in str(raised.value)


def test_blocks_of_tokens_without_other_refusals():
    """Of settings that converters are refused for today."""
    relations = [relation for relation in RELATIONS if relation.setting.startswith("training.")]

    def check_these(flags):
        check(relations, read_settings(flags.split()), Machine(8, has_gpus=False))

    check_these(f"{TP}=4 {MXNORM} --training.seq_len=8")
    with pytest.raises(ConfigError, match="training.seq_len = 12 is not a multiple of 8"):
        check_these(f"{TP}=4 {MXNORM} --training.seq_len=12")
    check_these(f"{TP}=2 {CP}=2 {MXNORM} --training.seq_len=128")
    with pytest.raises(ConfigError, match="training.seq_len = 64 is not a multiple of 128"):
        check_these(f"{TP}=2 {CP}=2 {MXNORM} --training.seq_len=64")
    with pytest.raises(ConfigError, match="training.seq_len = 128 is not a multiple of 384"):
        check_these(f"{TP}=3 {CP}=2 {MXNORM} --training.seq_len=128")


def test_unbalanced_context_parallelism_is_refused():
    """A TOML file has no None, so it could not be resumed."""
    with pytest.raises(ConfigError, match="parallelism.context_parallel_load_balancer = .*'headtail'"):
        read_settings(["--parallelism.context_parallel_load_balancer=None"])


@pytest.mark.parametrize("degree, expected", [(f"{CP}=2", 8), (f"{PP}=4", 4), ("", 16)])
def test_sequences_per_step_count_processes_that_read_different_text(degree, expected):
    settings = read_settings(["--training.local_batch_size=2", *degree.split()])
    assert global_batch_size(settings, 8) == expected
