"""Layouts of processes that cannot work, whatever the model is."""

import pytest

from mxtrain.errors import ConfigError
from mxtrain.settings.machine import Machine, check_machine, global_batch_size
from mxtrain.settings.read import read_settings

CP, TP, PP = (f"--parallelism.{kind}_parallel_degree" for kind in ("context", "tensor", "pipeline"))
EP, ETP = "--parallelism.expert_parallel_degree", "--parallelism.expert_tensor_parallel_degree"
FUSED, MXNORM = "--model.converters=fused_norm", "--model.converters=mxnorm"
CHUNK = "--parallelism.pipeline_parallel_microbatch_size"
VALIDATED = "--validation.enable --validation.local_batch_size"

GOOD = [
    (f"{CP}=2 {MXNORM} --training.seq_len=128", 2),
    (f"{CP}=2 {FUSED} --training.seq_len=8", 2),
    (f"{CP}=4 {MXNORM} --training.seq_len=768", 8),
    (f"{CP}=2 {TP}=2 {FUSED} --training.seq_len=24", 4),
    (f"{TP}=4 {FUSED} --training.seq_len=24", 4),
    (f"{TP}=4 {MXNORM} --training.seq_len=8", 4),
    (f"{MXNORM} --training.seq_len=34", 2),
    (f"{EP}=4 {TP}=2 {FUSED}", 4),
    (f"{EP}=2 {ETP}=2 {TP}=2 {FUSED}", 4),
    (f"{EP}=2 {MXNORM} --mxnorm.dispatch=quantized", 2),
    (f"{TP}=2 {MXNORM} --mxnorm.gather=quantized --training.seq_len=192", 2),
    (f"{TP}=2 {MXNORM} --training.seq_len=96", 2),
    (f"{MXNORM} --mxnorm.gather=quantized --training.seq_len=34", 1),
    ("--training.local_batch_size=3 --parallelism.pipeline_parallel_microbatch_size=2", 1),
    (f"{PP}=4 --parallelism.pipeline_parallel_schedule=LoopedBFS", 4),
    (f"{PP}=4 {VALIDATED}=16", 4),
    ("--parallelism.data_parallel_replicate_degree=8", 64),
    ("--training.local_batch_size=2 --training.global_batch_size=256", 64),
]
# Flags that fit, the number of processes, the flag that does not, and facts of the message
SHARDS = "parallelism.data_parallel_shard_degree = "
AUTO = ["'mxnorm'", "'mx_linear'", "'auto'"]
GATHER, GATHERED = f"{TP}=2 {MXNORM} --mxnorm.gather=quantized", "mxnorm.gather = 'quantized'"
VALIDATE = "--training.seq_len=128 --validation.enable --validation.seq_len"
BAD = [
    ("", 2, "--parallelism.data_parallel_shard_degree=3", [f"{SHARDS}3", "2 process"]),
    ("", 6, f"{CP}=4", [f"{CP[2:]} = 4 does not fit 6 process", "context 4"]),
    ("", 4, f"{PP}=3", [f"{PP[2:]} = 3 does not fit 4 process", "pipeline 3"]),
    (f"{PP}=2", 64, f"{TP}=128", [f"{TP[2:]} = 128 does not fit 64 process", "tensor 128, pipeline 2"]),
    ("", 64, "--parallelism.data_parallel_replicate_degree=3", ["parallelism.data_parallel_replicate_degree = 3 "]),
    (f"{CP}=2 {MXNORM}", 2, "--training.seq_len=192", ["training.seq_len = 192", "128", "context_parallel_degree = 2"]),
    (f"{CP}=2 {TP}=2 {MXNORM}", 4, "--training.seq_len=64", ["training.seq_len = 64", "128", "blocks of 32"]),
    (f"{CP}=2 {TP}=3 {MXNORM} --training.seq_len=384", 6, "--training.seq_len=128", ["training.seq_len = 128", "384"]),
    ("--training.local_batch_size=4", 2, "--training.global_batch_size=12",
     ["training.global_batch_size = 12", "training.local_batch_size = 4", "set training.local_batch_size to 3"]),
    (MXNORM, 1, "--training.seq_len=33", ["training.seq_len = 33", "even"]),
    (f"{CP}=2 {FUSED}", 2, "--training.seq_len=6", ["training.seq_len = 6", "multiple of 4"]),
    (f"{CP}=2 {TP}=2 {FUSED}", 4, "--training.seq_len=12", ["training.seq_len = 12", "multiple of 8"]),
    (f"{TP}=4 {MXNORM}", 4, "--training.seq_len=12", ["training.seq_len = 12", "multiple of 8"]),
    (f"{CP}=2 {MXNORM} {VALIDATE}=128", 2, "--validation.seq_len=126", ["validation.seq_len = 126", "multiple of 4"]),
    (GATHER, 2, "--training.seq_len=96", [GATHERED, "training.seq_len = 96", "64", "'auto'"]),
    (f"{GATHER} {VALIDATE}=64", 2, "--validation.seq_len=32", [GATHERED, "validation.seq_len = 32", "64"]),
    (f"{TP}=2 --model.converters=mx_linear", 2, "--mxnorm.gather=quantized", [GATHERED, *AUTO]),
    (f"{EP}=2 --model.converters=mx_linear", 2, "--mxnorm.dispatch=quantized", ["mxnorm.dispatch = 'quant", *AUTO]),
    ("", 4, f"{EP}=3", ["parallelism.expert_parallel_degree = 3", "expert_tensor_parallel_degree = 1", "4"]),
    (MXNORM, 1, "--parallelism.enable_async_tensor_parallel", ["parallelism.enable_async_", "'mxnorm'", "false"]),
    (f"{PP}=4", 4, f"{VALIDATED}=4", ["validation.local_batch_size = 4", "training.local_batch_size = 8", "makes 8"]),
    (f"{PP}=4 {CHUNK}=2", 4, f"{VALIDATED}=6", ["validation.local_batch_size = 6", f"{CHUNK[2:]} = 2", "makes 4"]),
]  # fmt: skip


def check_on(flags: str, processes: int) -> None:
    check_machine(read_settings(["--model.hf_assets_path=", *flags.split()]), Machine(processes, has_gpus=False))


@pytest.mark.parametrize("flags, processes", GOOD)
def test_layouts_that_fit(flags, processes):
    check_on(flags, processes)


@pytest.mark.parametrize("fine, processes, flag, facts", BAD)
def test_one_line_says_what_is_wrong(fine, processes, flag, facts):
    check_on(fine, processes)
    with pytest.raises(ConfigError) as raised:
        check_on(f"{fine} {flag}", processes)
    message = str(raised.value)
    assert "\n" not in message and message.startswith(facts[0]) and all(fact in message for fact in facts)


@pytest.mark.parametrize("degree, expected", [(f"{CP}=2", 8), (f"{PP}=4", 4), ("", 16)])
def test_sequences_per_step_count_processes_that_read_different_text(degree, expected):
    settings = read_settings(["--training.local_batch_size=2", *degree.split()])
    assert global_batch_size(settings, 8) == expected
