"""Checks that need the machine: its processes and devices."""

from importlib.metadata import version
from typing import NamedTuple

from mxtrain.settings.fields import Problems, Settings, raise_first
from mxtrain.settings.layout import layout_problems, pipeline_problems
from mxtrain.settings.mxnorm_section import quantizing_among

COMPILES_SPLIT_LAYERS = tuple(map(int, version("torch").split(".")[:2])) >= (2, 14)
"""Whether PyTorch compiles all layers and losses of tensor parallelism on a CPU"""

NEED_A_GPU = "profiling.enable_profiling profiling.enable_memory_snapshot training.enable_cpu_offload training.gc_debug"


class Machine(NamedTuple):
    """What a job runs on."""

    processes: int
    has_gpus: bool


def check_machine(settings: Settings, machine: Machine) -> None:
    """Raise ConfigError for a layout that does not fit, and for settings that a CPU does not have."""
    raise_first(layout_problems(settings, machine.processes), settings)
    raise_first(pipeline_problems(settings), settings)
    if not machine.has_gpus:
        raise_first(_problems_of_a_cpu(settings), settings)


def _problems_of_a_cpu(settings: Settings) -> Problems:
    s = settings.values
    for name in NEED_A_GPU.split():
        if settings[name]:
            yield name, "needs a GPU; this machine has none"
    if s.checkpoint.async_mode == "async_with_pinned_mem":
        yield "checkpoint.async_mode", "needs a GPU, whose copies go through pinned memory; on a CPU use 'async'"
    if not s.compile.enable:
        return
    uses_inductor = s.compile.backend == "inductor"
    casts = quantizing_among(s.model.converters) and (s.mxnorm.recipe != "unquantized" or s.mxnorm.recipes)
    # On a CPU, Inductor of PyTorch 2.13 fails to split loops that it has fused from several casts. Without this fusion
    # (config.cpp.max_horizontal_fusion_size = 1), it takes minutes for casts to NVFP4.
    if "model" in s.compile.components and uses_inductor and casts:
        yield (
            "compile.backend",
            "does not compile casts to MX formats on a CPU: set compile.enable = false or compile.backend = "
            "'aot_eager'",
        )
    tensor = s.parallelism.tensor_parallel_degree
    if tensor == 1 or COMPILES_SPLIT_LAYERS:
        return
    degree = f"with parallelism.tensor_parallel_degree = {tensor}"
    # On a CPU, PyTorch 2.13 misplaces the state of the random numbers among the results of such a graph.
    if s.activation_checkpoint.mode != "none":
        mode = f"activation_checkpoint.mode = {s.activation_checkpoint.mode!r}"
        ways_out = "PyTorch 2.13 compiles no such layers on a CPU; set activation_checkpoint.mode = 'none'"
        yield "compile.enable", f"{degree} and {mode}: {ways_out}"
    # On a CPU, PyTorch 2.13 then computes a wrong loss without an error, also for a model without a converter.
    if "loss" in s.compile.components and uses_inductor and not s.parallelism.disable_loss_parallel:
        yield (
            "compile.components",
            f"{degree}: PyTorch 2.13 compiles a wrong loss on a CPU; set compile.components = ['model'] or "
            "parallelism.disable_loss_parallel = true",
        )
