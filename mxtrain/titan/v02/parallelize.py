"""mxtrain's additions to TorchTitan's parallelize functions.

They put mxtrain's styles into the plans of tensor parallelism, let selective activation checkpointing know mxtrain's
operations, run FSDP2 on gloo, and draw initial weights that fit every layout.
"""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torchtitan.distributed import ParallelDims
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
from mxtrain.titan.v02.context_parallel import prepare_context_parallelism
from mxtrain.titan.v02.tensor_parallel import boundary, inner_style, is_boundary, style_for, with_local_heads


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
    gradients.

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
    job_config = replace(  # without what is done to a model after it is split
        job_config,
        compile=replace(job_config.compile, enable=False),
        activation_checkpoint=replace(job_config.activation_checkpoint, mode="none"),
        parallelism=replace(degrees, enable_async_tensor_parallel=False),
    )
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


# Fault: DDP averages gradients of a loss that is divided by all tokens. Mended in TorchTitan 0.3.0. Here replicas run
# FSDP2 with a single shard.


class Layout(ParallelDims):
    """TorchTitan's layout, with FSDP on every layout of several processes, also where there is nothing to shard.

    With replicas only, TorchTitan 0.2.2 uses DDP, which averages gradients, although the loss is already divided by the
    tokens of all replicas: with two replicas gradients are half as large as in one process. FSDP on a mesh of
    (replicas, 1 shard) adds them up, because TorchTitan switches FSDP's own division off.

    With pipeline or tensor parallelism only, TorchTitan 0.2.2 ignores ``training.mixed_precision_param``. FSDP on a
    mesh of 1 shard applies it there as on every other layout, and needs no communication.
    """

    @property
    def fsdp_enabled(self) -> bool:
        return self.world_size > 1

    def _mesh_exist(self, name: str, degree: int) -> bool:
        # The group of a mesh that does not exist is a fake one.
        return (name == "fsdp" and self.fsdp_enabled) or super()._mesh_exist(name, degree)


# Fault: FSDP2 and tensor parallelism make two weights of a tied embedding and head. Mended in TorchTitan 0.3.0.


@contextmanager
def shared_group(model: nn.Module) -> Iterator[None]:
    """Context in which TorchTitan's parallelize functions shard embedding, last norm and head as one group, if tied.

    FSDP2 allows a weight in one group only. TorchTitan 0.2.2 puts the embedding and the head into two groups, which
    PyTorch refuses in the first step, its own tied Qwen3 included.
    """
    if not _is_tied(model):
        yield
        return

    def fully_shard_tied(module, **settings):
        if module is model.tok_embeddings:
            return module  # sharded with the head
        if module == [model.norm, model.output]:
            module = [model.tok_embeddings, *module]
        return fully_shard(module, **settings)

    with in_every_module("fully_shard", fully_shard, fully_shard_tied):
        yield


@contextmanager
def stays_tied(model: nn.Module) -> Iterator[None]:
    """Context that ends with one weight for head and embedding, if they shared one before tensor parallelism split it.

    TorchTitan's plans give every process the same tokens of the vocabulary in both. Without this context, FSDP2 would
    gather and reduce two weights.
    """
    tied = _is_tied(model)
    yield
    if not tied:
        return
    parts = [getattr(module.weight, "placements", None) for module in (model.output, model.tok_embeddings)]
    if parts[0] != parts[1]:
        raise ConfigError(
            f"parallelism.tensor_parallel_degree splits a head with the embedding's weight into {parts[0]}, and the "
            f"embedding into {parts[1]}: allowed is 1, or model_args.enable_weight_tying = false"
        )
    model.output.weight = model.tok_embeddings.weight


def _is_tied(model: nn.Module) -> bool:
    """Whether head and embedding share their weight. A stage of a pipeline has None in the place of one or both."""
    head, embedding = getattr(model, "output", None), getattr(model, "tok_embeddings", None)
    return head is not None and embedding is not None and head.weight is embedding.weight


@contextmanager
def in_every_module(name: str, function: Callable, replacement: Callable) -> Iterator[None]:
    """While active, every module that has imported ``function`` by its name has ``replacement`` in its place.

    These are TorchTitan's modules and those of a user's own models. mxtrain's and PyTorch's keep the function.
    """
    with ExitStack() as patches:
        for module, holder in list(sys.modules.items()):
            is_own = module.split(".")[0] in ("mxtrain", "torch")
            if not is_own and vars(holder).get(name) is function:
                patches.enter_context(patch.object(holder, name, replacement))
        yield


def meshes_on_cpu() -> AbstractContextManager:
    """A mesh of GPUs may not span other numbers of them than this machine has."""
    return patch("torchtitan.distributed.parallel_dims.device_type", "cpu")
