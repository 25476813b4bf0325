"""Tensor and sequence parallelism for swapped modules: styles for a model's plan.

The plan says where every activation of a model is split, and stays. But its styles give DTensors to
modules, whose operations PyTorch then splits by its own rules, and expect tensors from norms. An MXNorm gives a
``NormedInput``, and the casts have no such rules: every process casts its local part. So each style is replaced by one
for the swapped module:

    norm              SequenceParallel      GatheringNorm       gathers sequences or codes, once for all its linears
    attention, FFN    PrepareModuleInput    passes on what such a norm has gathered
    wq, wk, wv, w1    ColwiseParallel       Columnwise          local tensors inside, DTensors of the plan outside
    wo, w2            RowwiseParallel       Rowwise             the same; sums the parts of the result as planned

``mxtrain.titan.v02.repairs.expert_gradients`` has those within mixtures of experts.
"""

import copy

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from mxtrain.nn.mxnorm import MXNorm, MXNormLinear
from mxtrain.nn.split import SplitSequences, by_input_features, by_output_features
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.parallel.tensor_parallel import no_split

_SEQUENCES = (Shard(1),)


class GatheringNorm(SequenceParallel):
    """An MXNorm takes a shard [B, S / P, D] of the sequences, and returns a NormedInput of whole sequences.

    Its gain is replicated.
    """

    def _apply(self, module: MXNorm, device_mesh: DeviceMesh) -> nn.Module:
        if self.sequence_sharding != _SEQUENCES:
            raise ValueError(f"{self.sequence_sharding}: expected {_SEQUENCES}, the dimension that an MXNorm gathers")
        self._replicate_module_fn("", module, device_mesh)
        module.split = SplitSequences(_group(device_mesh), device_mesh.size(), device_mesh.get_local_rank())
        module.gathers_plain = not module.feeds_mixture  # whose boundary gathers tensors
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
