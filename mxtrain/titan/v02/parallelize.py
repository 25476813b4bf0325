"""mxtrain's additions to TorchTitan's parallelize functions.

They refuse layouts of other trainers, put mxtrain's styles into the plans of tensor parallelism, let selective
activation checkpointing know mxtrain's operations, and divide a pipeline's loss by its tokens.
``mxtrain.titan.layouts`` does what both releases need.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.expert_parallel import ExpertParallel

from mxtrain.checkpoints.terminal import show_line
from mxtrain.errors import ConfigError
from mxtrain.nn.experts import QuantizedExperts
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.parallel.activation_checkpoint import knows_own_operations
from mxtrain.parallel.tensor_parallel import check_part
from mxtrain.titan.layouts import build_pipeline, finish_layout
from mxtrain.titan.metrics import describe_model
from mxtrain.titan.v02.tensor_parallel import boundary, inner_style, is_boundary, style_for, with_local_heads


def checked_parallelize(parallelize_fn):
    """Wrap ``parallelize_fn``: show the model, and give the model that it returns mxtrain's additions.

    The wrapper raises ConfigError for a layout that gives wrong gradients.
    """

    @functools.wraps(parallelize_fn)
    def parallelize(model, parallel_dims, job_config):
        check_layout(parallel_dims)
        if not parallel_dims.pp_enabled:
            show_line(describe_model(job_config, model))  # here, while the model is whole
        with shared_group(model), plans_with_own_styles(), knows_own_operations():
            model = parallelize_fn(model, parallel_dims, job_config)
        checkpointing = job_config.activation_checkpoint
        is_selective = checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op"
        finish_layout(model, parallel_dims, job_config, is_selective)
        if job_config.compile.enable and "model" in job_config.compile.components:
            # TorchTitan compiles its own function for experts, and leaves the module alone because of its hooks.
            for module in model.modules():
                if isinstance(module, QuantizedExperts):
                    module.compile_products(job_config.compile.backend)
        return model

    return parallelize


def checked_pipeline(pipelining_fn):
    """Wrap ``pipelining_fn``: check the layout, show the model, and divide and share the loss (``LossPerToken``)."""

    @functools.wraps(pipelining_fn)
    def pipeline(model, parallel_dims, job_config, device, model_args, parallelize_fn, loss_fn):
        check_layout(parallel_dims)
        show_line(describe_model(job_config, model))  # here, while the model is not yet split into stages
        loss = LossPerToken(loss_fn, parallel_dims.cp)

        def build() -> tuple:
            return pipelining_fn(model, parallel_dims, job_config, device, model_args, parallelize_fn, loss)

        schedule, *others = build_pipeline(build, parallel_dims, device)
        schedule.loss_fn = loss
        return schedule, *others

    return pipeline


def check_layout(parallel_dims) -> None:
    """Raise ConfigError for a layout that another trainer than mxtrain's has made, unless it is FSDP's alone.

    mxtrain's trainer has checked its own. With ``-m torchtitan.train`` nobody divides a pipeline's loss by the number
    of tokens, and replicas average their gradients.
    """
    kinds = {"data_parallel_replicate": "dp_replicate", "context_parallel": "cp", "tensor_parallel": "tp"}
    kinds |= {"pipeline_parallel": "pp", "expert_parallel": "ep"}
    for kind, name in kinds.items() if not isinstance(parallel_dims, Layout) else ():
        if (degree := getattr(parallel_dims, name)) > 1:
            raise ConfigError(
                f"parallelism.{kind}_degree = {degree} needs mxtrain's trainer; train with -m mxtrain.train"
            )


@contextmanager
def plans_with_own_styles() -> Iterator[None]:
    """While active, plans serve models with swapped modules, and give mixtures of experts right gradients."""
    inner: set[nn.Module] = set()  # the modules within mixtures of experts, when a plan has been applied to these

    @functools.wraps(parallelize_module)
    def parallelize(module, device_mesh=None, parallelize_plan=None, **others):
        if isinstance(parallelize_plan, dict):
            modules = dict(module.named_modules())
            parallelize_plan = _own_plan(modules, parallelize_plan, inner, device_mesh)
            for fqn, style in parallelize_plan.items():
                if isinstance(linear := modules.get(fqn), QuantizedLinear):
                    by_output = isinstance(style, ColwiseParallel) or getattr(style, "dim", None) == 0
                    check_part(fqn, linear, by_output, device_mesh.size())
        elif module in inner or type(parallelize_plan) is ExpertParallel:
            parallelize_plan = inner_style(parallelize_plan)
        return parallelize_module(module, device_mesh, parallelize_plan, **others)

    with in_every_module("parallelize_module", parallelize_module, parallelize):
        yield


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


# Fault: a pipeline's loss is not divided by the tokens before its backward. Mended in TorchTitan 0.3.0. PyTorch's
# schedules split a batch into chunks, and run the backward of the loss of each chunk.


class LossPerToken:
    """A loss function whose result is divided by a number of tokens before the backward.

    Args:
        loss_fn: (prediction, labels) -> sum of the losses of all tokens, fp32 [].
        parts: number of parts of every sequence in context parallelism. The validator, which divides for itself, counts
            the tokens of one part and adds up the losses of all.
    """

    def __init__(self, loss_fn: Callable[..., torch.Tensor], parts: int):
        self.loss_fn, self._parts, self._divisor = loss_fn, parts, parts

    def __call__(self, prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss_fn(prediction, labels) / self._divisor

    @contextmanager
    def divided_by(self, tokens: float | torch.Tensor) -> Iterator[None]:
        """Divide by ``tokens``, the tokens of the whole global batch, inside of the context."""
        self._divisor = tokens
        try:
            yield
        finally:
            self._divisor = self._parts


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


# Fault: FSDP2 makes two weights of a tied embedding and head. Mended in TorchTitan 0.3.0.


@contextmanager
def shared_group(model: nn.Module) -> Iterator[None]:
    """Context in which TorchTitan's parallelize functions shard embedding, last norm and head as one group, if tied.

    FSDP2 allows a weight in one group only. TorchTitan 0.2.2 puts the embedding and the head into two groups, which
    PyTorch refuses in the first step, its own tied Qwen3 included.
    """
    head, embedding = getattr(model, "output", None), getattr(model, "tok_embeddings", None)
    if head is None or embedding is None or head.weight is not embedding.weight:  # a stage has None in their place
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
