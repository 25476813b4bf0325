"""Tensor and sequence parallelism for swapped modules: styles for a model's plan.

The plan says where every activation of a model is split, and stays. But its styles give DTensors to
modules, whose operations PyTorch then splits by its own rules, and expect tensors from norms. An MXNorm gives a
``NormedInput``, and the casts have no such rules: every process casts its local part. So each style is replaced by one
for the swapped module:

    norm              SequenceParallel      GatheringNorm       gathers sequences or codes, once for all its linears
    attention, FFN    PrepareModuleInput    passes on what such a norm has gathered
    wq, wk, wv, w1    ColwiseParallel       Columnwise          local tensors inside, DTensors of the plan outside
    wo, w2            RowwiseParallel       Rowwise             the same; sums the parts of the result as planned

``mxtrain.titan.v02.parallelize`` puts these styles into TorchTitan's plans,
``mxtrain.titan.v02.repairs.expert_gradients`` has those within mixtures of experts.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace

import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from mxtrain.errors import ConfigError
from mxtrain.nn.experts import QuantizedExperts, weight_names
from mxtrain.nn.mxnorm import MXNorm, MXNormLinear
from mxtrain.nn.split import SplitSequences, by_input_features, by_output_features
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.recipes.recipe import LinearRecipe

DEGREE = "parallelism.tensor_parallel_degree"
_SEQUENCES = (Shard(1),)
WHOLE_FEATURES = 8
"""PyTorch's grouped products take rows of 16 bytes each, which are 8 features in bf16"""


class GatheringNorm(SequenceParallel):
    """An MXNorm takes a shard [B, S / P, D] of the sequences, and returns a NormedInput of whole sequences.

    Its gain is replicated.
    """

    def _apply(self, module: MXNorm, device_mesh: DeviceMesh) -> nn.Module:
        if self.sequence_sharding != _SEQUENCES:
            raise ValueError(f"{self.sequence_sharding}: expected {_SEQUENCES}, the dimension that an MXNorm gathers")
        self._replicate_module_fn("", module, device_mesh)
        module.split = SplitSequences(_group(device_mesh), device_mesh.size(), device_mesh.get_local_rank())
        return module


class Columnwise(ColwiseParallel):
    """``ColwiseParallel`` for a quantized linear, which has its part of the output features."""

    def _apply(self, module: QuantizedLinear, device_mesh: DeviceMesh) -> nn.Module:
        module.split = by_output_features(_group(device_mesh))
        return super()._apply(module, device_mesh)

    @staticmethod
    def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):
        if isinstance(mod, MXNormLinear):
            return inputs  # whole sequences, which the norm has gathered
        x = ColwiseParallel._prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh)
        return x.to_local(grad_placements=[Partial()])

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        y = DTensor.from_local(outputs, device_mesh, [Shard(-1)], run_check=False)
        return ColwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, y, device_mesh)


class Rowwise(RowwiseParallel):
    """``RowwiseParallel`` for a quantized linear, which has its part of the input features."""

    def _apply(self, module: QuantizedLinear, device_mesh: DeviceMesh) -> nn.Module:
        module.split = by_input_features(_group(device_mesh))
        return super()._apply(module, device_mesh)

    @staticmethod
    def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):
        x = RowwiseParallel._prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh)
        return x.to_local()

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        y = DTensor.from_local(outputs, device_mesh, [Partial()], run_check=False)
        return RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, y, device_mesh)


class WaitingEmbedding(RowwiseParallel):
    """``RowwiseParallel`` for an embedding, whose result is ready.

    PyTorch 2.13 loses the gradient of an asynchronous result that enters a compiled graph, here the first block.
    """

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        outputs = outputs.redistribute(placements=output_layouts)
        return outputs.to_local() if use_local_output else outputs


def _group(device_mesh: DeviceMesh) -> str:
    return device_mesh.get_group().group_name


def restyled(style: ParallelStyle, kind: type[ParallelStyle]) -> ParallelStyle:
    """Return a copy of a style as one of a subclass. Their constructors take different arguments."""
    new = copy.copy(style)
    new.__class__ = kind
    return new


def style_for(fqn: str, module: nn.Module | None, style: ParallelStyle, device_mesh: DeviceMesh) -> ParallelStyle:
    """Return the style that does for ``module`` what ``style`` does for the module that it replaced.

    Args:
        fqn: the module's name in the plan.
        module: None for a name of the plan that the model does not have.
        style: the plan's.
        device_mesh: of the processes that split the module.

    Raises:
        ConfigError: for a swapped module with a style that has no counterpart here.
    """
    if isinstance(module, MXNorm | QuantizedLinear):
        for own in (GatheringNorm, Columnwise, Rowwise):
            if type(style) is own.__base__:
                return restyled(style, own)
        raise no_split(fqn, module, type(style).__name__, device_mesh.size())
    if type(style) is RowwiseParallel and isinstance(module, nn.Embedding):
        return restyled(style, WaitingEmbedding)
    if type(style) is PrepareModuleInput and any(isinstance(child, MXNormLinear) for child in module.children()):
        new = copy.copy(style)
        new.input_layouts = (None, *style.input_layouts[1:])
        new.desired_input_layouts = (None, *style.desired_input_layouts[1:])
        return new
    return style


def no_split(fqn: str, module: nn.Module, how: str, processes: int) -> ConfigError:
    """The error for a swapped module that a layout splits in a way that it has no counterpart for."""
    return ConfigError(
        f"{DEGREE} = {processes} splits {fqn} by {how}, which works in high precision only, and it is an "
        f"{type(module).__name__}: allowed is 1, or mxnorm.filter_fqns that match it"
    )


def choose_gathers(model: nn.Module, gather: str) -> None:
    """Tell every norm whose sequences are split what it sends ("mxnorm.gather"), and how often its forward runs.

    Layers are wrapped for activation checkpointing before this is called.
    """
    repeated = {
        module
        for wrapper in model.modules()
        if isinstance(wrapper, CheckpointWrapper)
        for module in wrapper.modules()
        if isinstance(module, MXNorm)
    }
    for module in model.modules():
        if isinstance(module, MXNorm) and module.split is not None:
            # The gate of a mixture reads x itself.
            sent = "high_precision" if module.feeds_mixture else gather
            module.split = replace(module.split, gather=sent, forwards=2 if module in repeated else 1)


def check_part(fqn: str, linear: QuantizedLinear, by_output: bool, processes: int) -> None:
    """Raise ConfigError unless every process's part of a linear is whole blocks, and a bias is added once.

    Args:
        by_output: whether the linear is split by output features, not by input features.
    """
    if linear.bias is not None and not by_output:
        raise ConfigError(
            f"{DEGREE} = {processes} splits {fqn} by input features, and every process would add its bias: allowed is "
            "1, or mxnorm.filter_fqns that match it"
        )
    name = "out_features" if by_output else "in_features"
    features = getattr(linear, name)
    check_blocks(f"{name} = {features} of {fqn}", features, processes, linear.recipes)


def check_part_of_experts(experts: nn.Module, processes: int) -> None:
    """Raise ConfigError unless every process's part of the experts' hidden features is whole rows of products."""
    features = getattr(experts, weight_names(experts)[0]).shape[1]
    if features % (processes * WHOLE_FEATURES):
        raise ConfigError(
            f"{DEGREE} = {processes} splits the {features} hidden features of every expert into parts that are not "
            f"multiples of {WHOLE_FEATURES}, as grouped products need: allowed is a divisor of "
            f"{features // WHOLE_FEATURES}"
        )
    if isinstance(experts, QuantizedExperts):
        check_blocks(f"the {features} hidden features of every expert", features, processes, experts.recipes)


def check_blocks(what: str, features: int, processes: int, recipes: Iterable[LinearRecipe]) -> None:
    """Raise ConfigError unless ``features``, called ``what``, are whole blocks of the recipes on every process."""
    for recipe in recipes:
        block = max((gemm.block_size for gemm in recipe.gemms if gemm.format is not None), default=1)
        if features % (processes * block):
            raise ConfigError(
                f"{DEGREE} = {processes} splits {what} into parts that are not whole blocks of {block} "
                f"(recipe {recipe.name!r}): allowed is a divisor of {features // block}"
            )
