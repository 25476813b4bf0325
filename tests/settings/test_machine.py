"""Settings that fit one machine and not another."""

import pytest

from mxtrain.errors import ConfigError
from mxtrain.settings import machine
from mxtrain.settings.machine import Machine, check_machine
from mxtrain.settings.read import read_settings


def check(flags: str, processes: int = 1, has_gpus: bool = False) -> None:
    check_machine(read_settings(["--model.hf_assets_path=", *flags.split()]), Machine(processes, has_gpus))


COMPILED = "--compile.enable --model.converters=mxnorm"
COMPILED_TP = "--parallelism.tensor_parallel_degree=2 --compile.enable"
PINNED = "--checkpoint.enable --checkpoint.async_mode=async"


@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        (f"{COMPILED_TP} --compile.components=model --activation_checkpoint.mode=none", 2),
        (f"{COMPILED_TP} --activation_checkpoint.mode=none --parallelism.disable_loss_parallel", 2),
        (f"{COMPILED} --compile.backend=aot_eager", 1),
        (f"{COMPILED} --mxnorm.recipe=unquantized", 1),
        (f"{COMPILED} --model.converters=fused_norm", 1),
        (PINNED, 1),
    ],
)
def test_what_a_cpu_can(flags, processes):
    check(flags, processes)


@pytest.mark.parametrize(
    ("flags", "processes", "facts"),
    [
        (f"{COMPILED_TP} --activation_checkpoint.mode=full", 2,
         ["compile.enable = True", "tensor_parallel_degree = 2", "activation_checkpoint.mode = 'none'"]),
        (f"{COMPILED_TP} --activation_checkpoint.mode=none", 2,
         ["compile.components = ['model', 'loss']", "tensor_parallel_degree = 2", "['model']", "disable_loss_para"]),
        (COMPILED, 1, ["compile.backend = 'inductor'", "compile.enable = false", "'aot_eager'"]),
        (f"{COMPILED} --mxnorm.recipe=unquantized --mxnorm.recipes layers.0 mxfp8", 1, ["compile.backend = 'induc"]),
        (f"{PINNED}_with_pinned_mem", 1, ["checkpoint.async_mode = 'async_with_pinned_mem'", "GPU", "'async'"]),
        ("--profiling.enable_profiling", 1, ["profiling.enable_profiling = True", "GPU"]),
        ("--training.enable_cpu_offload", 1, ["training.enable_cpu_offload = True", "GPU"]),
        ("--training.gc_debug", 1, ["training.gc_debug = True", "GPU"]),
    ],
)  # fmt: skip
def test_what_needs_a_gpu(monkeypatch, flags, processes, facts):
    monkeypatch.setattr(machine, "COMPILES_SPLIT_LAYERS", False)
    check(flags, processes, has_gpus=True)
    with pytest.raises(ConfigError) as raised:
        check(flags, processes)
    message = str(raised.value)
    assert message.startswith(facts[0]) and all(fact in message for fact in facts)


def test_pytorch_2_14_compiles_split_layers(monkeypatch):
    monkeypatch.setattr(machine, "COMPILES_SPLIT_LAYERS", True)
    check(f"{COMPILED_TP} --activation_checkpoint.mode=full", 2)
