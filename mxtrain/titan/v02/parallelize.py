"""mxtrain's additions to TorchTitan's parallelize functions.

They put mxtrain's styles into the plans of tensor parallelism, let selective activation checkpointing know mxtrain's
operations, run FSDP2 on gloo, and draw initial weights that fit every layout.
"""

import copy
import functools
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools import utils

from mxtrain.conversion.layers import find_gates
from mxtrain.errors import ConfigError
from mxtrain.nn.experts import QuantizedExperts
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.parallel.activation_checkpoint import knows_own_operations, multiply_one_by_one
from mxtrain.parallel.expert_dispatch import choose_exchange
from mxtrain.parallel.initial_weights import draw_by_name, shared_seed
from mxtrain.parallel.tensor_parallel import DEGREE, check_part, choose_gathers
from mxtrain.reports.terminal import show_line
from mxtrain.settings.machine import Machine, check_machine
from mxtrain.settings.mxnorm_section import quantizing_among
from mxtrain.settings.titan import settings_of
from mxtrain.titan.metrics import describe_model
from mxtrain.titan.v02.check_job import check_model_layout
from mxtrain.titan.v02.repairs.context_parallel import prepare_context_parallelism
from mxtrain.titan.v02.repairs.expert_gradients import boundary, inner_style, is_boundary
from mxtrain.titan.v02.repairs.patches import in_every_module, meshes_on_cpu
from mxtrain.titan.v02.repairs.qwen3_heads import with_local_heads
from mxtrain.titan.v02.repairs.replicas import Layout
from mxtrain.titan.v02.repairs.tied_weights import shared_group, stays_tied
from mxtrain.titan.v02.styles import style_for


def checked_parallelize(parallelize_fn):
    """Wrap ``parallelize_fn``: show the model, and give the model that it returns mxtrain's additions.

    The wrapper raises ConfigError for a layout that gives wrong gradients.
    """

    @functools.wraps(parallelize_fn)
    def parallelize(model, parallel_dims, job_config):
        check_layout(parallel_dims, job_config)
        prepare_context_parallelism(parallel_dims, job_config)
        if not parallel_dims.pp_enabled:
            show_line(describe_model(job_config, model))  # here, while the model is whole
        gates = find_gates(model) if parallel_dims.tp_enabled else {}
        splits = parallel_dims.tp_enabled or parallel_dims.ep_enabled
        plans = plans_with_own_styles() if splits else nullcontext(set())
        with shared_group(model), plans as inner, knows_own_operations():
            model = parallelize_fn(model, parallel_dims, job_config)
        check_gates(parallel_dims.tp, gates, inner)
        if parallel_dims.tp_enabled and quantizing_among(job_config.model.converters):
            choose_gathers(model, job_config.mxnorm.gather)
        if parallel_dims.ep_enabled and quantizing_among(job_config.model.converters):
            choose_exchange(model, job_config.mxnorm.dispatch)
        checkpointing = job_config.activation_checkpoint
        if checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op":
            multiply_one_by_one(model)
        if job_config.compile.enable and "model" in job_config.compile.components:
            # TorchTitan compiles its own function for experts, and leaves the module alone because of its hooks.
            for module in model.modules():
                if isinstance(module, QuantizedExperts):
                    module.compile_products(job_config.compile.backend)
        if torch.distributed.get_backend() == "gloo":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    # FSDP2 expresses TorchTitan's gradient sum, scaled by 1, as PREMUL_SUM, which gloo lacks.
                    module.set_force_sum_reduction_for_comms(True)
        draw_by_name(model, shared_seed(parallel_dims, job_config.debug.seed), torch.device(utils.device_type))
        return model

    return parallelize


def checked_pipeline(pipelining_fn):
    """Wrap ``pipelining_fn``: check the layout first, and show the model."""

    @functools.wraps(pipelining_fn)
    def pipeline(model, parallel_dims, job_config, *args, **kwargs):
        check_layout(parallel_dims, job_config)
        show_line(describe_model(job_config, model))  # here, while the model is not yet split into stages
        return pipelining_fn(model, parallel_dims, job_config, *args, **kwargs)

    return pipeline


def check_layout(parallel_dims, job_config) -> None:
    """Check a layout that another trainer than mxtrain's, which has checked its own, has made.

    With ``-m torchtitan.train`` nobody divides a pipeline's loss by the number of tokens, and replicas average their
    gradients (``mxtrain.titan.v02.repairs``).

    Raises:
        ConfigError: the layout does not fit the processes or the model, or gives wrong gradients.
    """
    if isinstance(parallel_dims, Layout):
        return
    settings = settings_of(job_config)
    machine = Machine(parallel_dims.world_size, torch.cuda.is_available())
    check_machine(settings, machine)
    check_model_layout(settings, machine.has_gpus)
    if parallel_dims.pp_enabled:
        setting = f"pipeline_parallel_degree = {parallel_dims.pp}"
    elif parallel_dims.dp_replicate_enabled and not parallel_dims.fsdp_enabled:
        setting = f"data_parallel_replicate_degree = {parallel_dims.dp_replicate} without sharding"
    else:
        return
    raise ConfigError(f"parallelism.{setting} has wrong gradients in TorchTitan 0.2.2: train with -m mxtrain.train")


def check_gates(processes: int, gates: dict[str, nn.Module], inner: set[nn.Module]) -> None:
    """Raise ConfigError for a gate that is not one of the ``inner`` modules, those within mixtures of experts.

    Each of the ``processes`` of tensor parallelism would take its part of the gradient of such a gate for the whole.
    """
    for fqn, gate in gates.items():
        if gate not in inner:
            raise ConfigError(
                f"{DEGREE} = {processes} gives {fqn} wrong gradients, because no module around it has the style "
                "PrepareModuleInputOutput with output_layouts = Partial(): allowed is 1"
            )


@contextmanager
def plans_with_own_styles() -> Iterator[set[nn.Module]]:
    """While active, plans serve models with swapped modules, and give mixtures of experts right gradients.

    Yields:
        A set that collects the modules within mixtures of experts while plans are applied to them.
    """
    inner: set[nn.Module] = set()

    @functools.wraps(parallelize_module)
    def parallelize(module, device_mesh=None, parallelize_plan=None, **others):
        if isinstance(parallelize_plan, dict):
            modules = dict(module.named_modules())
            parallelize_plan = _own_plan(modules, parallelize_plan, inner, device_mesh)
            for fqn, style in parallelize_plan.items():
                if isinstance(linear := modules.get(fqn), QuantizedLinear):
                    check_part(fqn, linear, isinstance(style, ColwiseParallel), device_mesh.size())
        elif module in inner or type(parallelize_plan) is ExpertParallel:
            parallelize_plan = inner_style(parallelize_plan)
        with stays_tied(module):
            return parallelize_module(module, device_mesh, parallelize_plan, **others)

    with in_every_module("parallelize_module", parallelize_module, parallelize):
        yield inner


def _own_plan(
    modules: dict[str, nn.Module], plan: dict[str, ParallelStyle], inner: set[nn.Module], device_mesh: DeviceMesh
) -> dict[str, ParallelStyle]:
    """Return ``plan`` with mxtrain's styles, and put the modules within boundaries into ``inner``."""
    for fqn, style in plan.items():
        if fqn in modules and is_boundary(style):
            inner.update(set(modules[fqn].modules()) - {modules[fqn]})
    own = {}
    for fqn, style in with_local_heads(plan).items():
        if is_boundary(style):
            own[fqn] = boundary(style)
        elif modules.get(fqn) in inner:
            own[fqn] = inner_style(style)
        else:
            own[fqn] = style_for(fqn, modules.get(fqn), style, device_mesh)
    return own


def try_plan(model: nn.Module, job_config) -> None:
    """Split a converted model on the meta device by the job's degree of tensor parallelism. The model is then split.

    Which parts a plan makes, only the plan knows: those of shared experts, of stacked experts, and of a user's own
    model. So ``mxtrain doctor --model`` lets the plan split the model, in a process group that sends nothing.

    Raises:
        ConfigError: training would refuse to split the model.
    """
    degrees = job_config.parallelism
    tensor, expert = degrees.tensor_parallel_degree, degrees.expert_parallel_degree
    expert_tensor = degrees.expert_tensor_parallel_degree
    if tensor == 1:
        return
    processes = math.lcm(tensor, expert * expert_tensor)
    shards = processes // tensor
    parallelize = inspect.unwrap(get_train_spec(job_config.model.name).parallelize_fn)  # without checks of the machine
    job_config = copy.deepcopy(job_config)  # without what is done to a model after it is split
    job_config.compile.enable = False
    job_config.activation_checkpoint.mode = "none"
    job_config.parallelism.enable_async_tensor_parallel = False
    torch.distributed.init_process_group("fake", rank=0, world_size=processes)
    try:
        layout = Layout(
            dp_replicate=1, dp_shard=shards, cp=1, tp=tensor, pp=1, ep=expert, etp=expert_tensor, world_size=processes
        )
        gates = find_gates(model)
        with meshes_on_cpu(), plans_with_own_styles() as inner:
            parallelize(model, layout, job_config)
        check_gates(tensor, gates, inner)
    finally:
        torch.distributed.destroy_process_group()
