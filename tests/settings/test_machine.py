"""Settings that fit one machine and not another."""

import pytest

from mxtrain.errors import ConfigError
from mxtrain.settings.machine import Machine, check_machine
from mxtrain.settings.read import read_settings


def check(flags: str, processes: int = 1, has_gpus: bool = False) -> None:
    check_machine(read_settings(["--model.hf_assets_path=", *flags.split()]), Machine(processes, has_gpus))


COMPILED_TP = "--parallelism.tensor_parallel_degree=2 --compile.enable"


@pytest.mark.parametrize(
    "flags, processes",
    [
        ("", 1),
        ("", 64),
        ("--parallelism.data_parallel_shard_degree=64", 64),
        ("--parallelism.data_parallel_replicate_degree=8", 64),
        ("--parallelism.tensor_parallel_degree=2 --model.converters=fused_rmsnorm", 64),
        ("--parallelism.tensor_parallel_degree=2 --model.converters=mxnorm", 64),
        (f"{COMPILED_TP} --compile.components=model --activation_checkpoint.mode=none", 2),
        (f"{COMPILED_TP} --activation_checkpoint.mode=none --parallelism.disable_loss_parallel", 2),
        ("--parallelism.context_parallel_degree=4", 64),
        ("--parallelism.expert_parallel_degree=8", 64),
        ("--training.local_batch_size=2 --training.global_batch_size=256", 64),
        ("--training.dataset=files --training.dataset_path=/no/such --data.prepared=files-0123", 1),
    ],
)
def test_layouts_that_fit(flags, processes):
    check(flags, processes)


@pytest.mark.parametrize(
    "flags, processes",
    [
        ("--parallelism.data_parallel_shard_degree=32", 64),
        ("--parallelism.data_parallel_replicate_degree=3", 64),
        ("--parallelism.context_parallel_degree=5", 64),
        ("--parallelism.tensor_parallel_degree=128", 64),
    ],
)
def test_layouts_that_do_not_fit(flags, processes):
    with pytest.raises(ConfigError, match="parallelism.data_parallel_shard_degree = -?[0-9]+ does not fit 64 process"):
        check(flags, processes)


@pytest.mark.parametrize(
    ("mode", "refused"),
    [
        ("full", "compile.enable = True with .*tensor_parallel_degree = 2 .* on a CPU; set"),
        ("none", "compile.components = .*'loss'.* with .*_degree = 2: .* wrong loss on a CPU; set compile.components"),
    ],
)
def test_compiled_tensor_parallelism_on_a_cpu(mode, refused):
    flags = f"{COMPILED_TP} --activation_checkpoint.mode={mode}"
    check(flags, processes=2, has_gpus=True)
    with pytest.raises(ConfigError, match=refused):
        check(flags, processes=2)


def test_a_missing_text_is_refused_with_the_folder_and_the_ways_on(tmp_path, monkeypatch):
    """A run may resume from another folder than that in which it began."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check("--training.dataset=files --training.dataset_path=text/*.txt")
    message = (
        f"training.dataset_path = 'text/*.txt' matches no file in the current folder, {tmp_path}; training.dataset"
    )
    assert str(caught.value).startswith(message) and "in data.prepared the name of a prepared text" in str(caught.value)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").touch()
    check("--training.dataset=files --training.dataset_path=text/*.txt")


def test_profiling_needs_a_gpu():
    check("--profiling.enable_profiling", has_gpus=True)
    with pytest.raises(ConfigError, match="profiling.enable_profiling = True needs a GPU"):
        check("--profiling.enable_profiling")


def test_torchtitans_own_quantization_needs_a_gpu():
    float8 = "--model.converters=quantize.linear.float8"
    for flags in (float8, "--model.converters=quantize.linear.mx"):
        check(flags, has_gpus=True)
        with pytest.raises(ConfigError, match="model.converters = .* has 'quantize.linear.*', which needs a GPU; this"):
            check(flags)
    check(f"{float8} --quantize.linear.float8.emulate")


def test_pinned_memory_needs_a_gpu():
    pinned = "--checkpoint.enable --checkpoint.async_mode=async_with_pinned_mem"
    check(pinned, has_gpus=True)
    check(pinned.replace("_with_pinned_mem", ""))
    with pytest.raises(ConfigError, match="checkpoint.async_mode = 'async_with_pinned_mem' needs a GPU"):
        check(pinned)


def test_inductor_does_not_compile_mx_casts_on_a_cpu():
    compiled = "--compile.enable --model.converters=mxnorm"
    for allowed in ("--compile.backend=aot_eager", "--mxnorm.recipe=unquantized", "--model.converters=fused_norm"):
        check(f"{compiled} {allowed}")
    check(compiled, has_gpus=True)
    for refused in ("", "--mxnorm.recipe=unquantized --mxnorm.recipes layers.0 mxfp8"):
        with pytest.raises(
            ConfigError, match="compile.backend = 'inductor' does not compile casts to MX formats on a CPU"
        ):
            check(f"{compiled} {refused}")
