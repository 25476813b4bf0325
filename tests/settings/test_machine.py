"""Layouts of processes that cannot work, whatever the model is, and settings that fit one machine and not another."""

import pytest
import torch
from packaging.version import Version

from mxtrain.errors import ConfigError
from mxtrain.settings.machine import Machine, check_machine, global_batch_size
from mxtrain.settings.read import read_settings

CP, TP, PP = (f"--parallelism.{kind}_parallel_degree" for kind in ("context", "tensor", "pipeline"))
EP = "--parallelism.expert_parallel_degree"
FUSED, MXNORM, LINEAR = (f"--model.converters={name}" for name in ("fused_norm", "mxnorm", "mx_linear"))
CHUNK = "--parallelism.pipeline_parallel_microbatch_size"
VALIDATED = "--validation.enable --validation.local_batch_size"
SHARDS = "parallelism.data_parallel_shard_degree = "
GATHER, GATHERED = f"{TP}=2 {MXNORM} --mxnorm.gather=quantized", "mxnorm.gather = 'quantized'"
VALIDATE = "--training.seq_len=128 --validation.enable --validation.seq_len"
COMPILED = f"--compile.enable {MXNORM}"

GOOD = [
    (f"{CP}=2 {FUSED} --training.seq_len=8", 2),
    (f"{CP}=4 {MXNORM} --training.seq_len=768", 8),
    (f"{CP}=2 {TP}=2 {FUSED} --training.seq_len=24", 4),
    (f"{TP}=4 {MXNORM} --training.seq_len=8", 4),
    (f"{MXNORM} --training.seq_len=34", 2),
    (f"{EP}=4 {TP}=2 {FUSED}", 4),
    (f"{EP}=2 {MXNORM} --mxnorm.dispatch=quantized", 2),
    (f"{MXNORM} --mxnorm.gather=quantized --training.seq_len=34", 1),
    (f"--training.local_batch_size=3 {CHUNK}=2", 1),
    (f"{PP}=4 {VALIDATED}=16", 4),
    ("--training.local_batch_size=2 --training.global_batch_size=256", 64),
    # On a CPU
    (f"{COMPILED} --compile.backend=aot_eager", 1),
    (f"{COMPILED} --mxnorm.recipe=unquantized", 1),
]
# Flags that fit, the number of processes, the flag that does not, and facts of the message
BAD = [
    ("", 2, "--parallelism.data_parallel_shard_degree=3", [f"{SHARDS}3", "2 process"]),
    (f"{PP}=2", 64, f"{TP}=128", [f"{TP[2:]} = 128 does not fit 64 process", "tensor 128, pipeline 2"]),
    (f"{CP}=2 {TP}=3 {MXNORM} --training.seq_len=384", 6, "--training.seq_len=128",
     ["training.seq_len = 128", "384", "context_parallel_degree = 2", "blocks of 32"]),
    ("--training.local_batch_size=4", 2, "--training.global_batch_size=12",
     ["training.global_batch_size = 12", "training.local_batch_size = 4"]),
    (MXNORM, 1, "--training.seq_len=33", ["training.seq_len = 33", "even"]),
    (f"{TP}=4 {MXNORM}", 4, "--training.seq_len=12", ["training.seq_len = 12", "multiple of 8"]),
    (f"{CP}=2 {MXNORM} {VALIDATE}=128", 2, "--validation.seq_len=126", ["validation.seq_len = 126", "multiple of 4"]),
    (GATHER, 2, "--training.seq_len=96", [GATHERED, "training.seq_len = 96", "64", "'auto'"]),
    (f"{GATHER} {VALIDATE}=64", 2, "--validation.seq_len=32", [GATHERED, "validation.seq_len = 32", "64"]),
    (f"{TP}=2 {LINEAR}", 2, "--mxnorm.gather=quantized", [GATHERED, "'mxnorm'", "'mx_linear'", "'auto'"]),
    (f"{EP}=2 {LINEAR}", 2, "--mxnorm.dispatch=quantized", ["mxnorm.dispatch = 'quantized'", "'mx_linear'", "'auto'"]),
    ("", 4, f"{EP}=3", ["parallelism.expert_parallel_degree = 3", "expert_tensor_parallel_degree = 1", "4"]),
    (MXNORM, 1, "--parallelism.enable_async_tensor_parallel", ["parallelism.enable_async_", "'mxnorm'", "false"]),
    (f"{PP}=4 {CHUNK}=2", 4, f"{VALIDATED}=6", ["validation.local_batch_size = 6", f"{CHUNK[2:]} = 2", "makes 4"]),
]  # fmt: skip
NEED_A_GPU = [
    (COMPILED, 1, ["compile.backend = 'inductor'", "compile.enable = false", "'aot_eager'"]),
    (f"{COMPILED} --mxnorm.recipe=unquantized --mxnorm.recipes layers.0 mxfp8", 1, ["compile.backend = 'inductor'"]),
    ("--checkpoint.enable --checkpoint.async_mode=async_with_pinned_mem", 1, ["checkpoint.async_mode = ", "'async'"]),
    ("--training.gc_debug", 1, ["training.gc_debug = True", "GPU"]),
]  # fmt: skip
if Version(torch.__version__) < Version("2.14"):
    WRONG_LOSS = (
        f"{TP}=2 --compile.enable",
        2,
        ["compile.components = ['model', 'loss']", "compiles wrongly", "['model']"],
    )
    NEED_A_GPU.append(WRONG_LOSS)


def check(flags: str, processes: int, has_gpus: bool = False) -> None:
    check_machine(read_settings(["--model.hf_assets_path=", *flags.split()]), Machine(processes, has_gpus))


def refuse(flags: str, processes: int, facts: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        check(flags, processes)
    message = str(raised.value)
    assert "\n" not in message and message.startswith(facts[0]) and all(fact in message for fact in facts), message


def test_layouts_that_fit_and_layouts_that_do_not():
    for flags, processes in GOOD:
        check(flags, processes)
    for fine, processes, flag, facts in BAD:
        check(fine, processes)
        refuse(f"{fine} {flag}", processes, facts)


def test_what_needs_a_gpu():
    for flags, processes, facts in NEED_A_GPU:
        check(flags, processes, has_gpus=True)
        refuse(flags, processes, facts)


@pytest.mark.parametrize("degree, expected", [(f"{CP}=2", 8), (f"{PP}=4", 4), ("", 16)])
def test_sequences_per_step_count_processes_that_read_different_text(degree, expected):
    settings = read_settings(["--training.local_batch_size=2", *degree.split()])
    assert global_batch_size(settings, 8) == expected
