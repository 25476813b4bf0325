"""Tensor and sequence parallelism for swapped modules: styles for a model's plan.

The plan says where every activation of a model is split, and stays. But its styles give DTensors to
modules, whose operations PyTorch then splits by its own rules, and expect tensors from norms. An MXNorm gives a
``NormedInput``, and the casts have no such rules: every process casts its local part. So each style is replaced by one
for the swapped module:

    norm              SequenceParallel      GatheringNorm       gathers sequences or codes, once for all its linears
    attention, FFN    PrepareModuleInput    passes on what such a norm has gathered
    wq, wk, wv, w1    ColwiseParallel       Columnwise          local tensors inside, DTensors of the plan outside
    wo, w2            RowwiseParallel       Rowwise             the same; sums the parts of the result as planned
"""

import copy

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torchtitan.distributed import NoParallel
from torchtitan.distributed.expert_parallel import ExpertParallel, TensorParallel

from mxtrain.nn.mxnorm import MXNorm, MXNormLinear
from mxtrain.nn.normed_input import NormedInput, RoutedRows
from mxtrain.nn.split import LocalLinear, SplitSequences, by_input_features, by_output_features
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.parallel.expert_dispatch import SentRows
from mxtrain.parallel.tensor_parallel import check_part_of_experts, no_split


class GatheringNorm(SequenceParallel):
    """An MXNorm takes a shard [B, S / P, D] of the sequences, and returns a NormedInput of whole sequences.

    Its gain is replicated.
    """

    def _apply(self, module: MXNorm, device_mesh: DeviceMesh) -> nn.Module:
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

    The module is None for a name of the plan, ``fqn``, that the model does not have.
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


# Fault: tensor parallelism takes parts of gradients within experts for the whole. Mended in TorchTitan 0.3.0.
#
# Every process sees all tokens of a mixture of experts, and returns a part of its result: from its share of every
# expert's features, or from some of the experts. So all gradients inside are parts of sums as well, those of the gate
# and of the tokens among them. TorchTitan 0.2.2 sums the gradient of what goes into the experts, and takes the other
# parts for whole gradients: gates are wrong, and without tensor parallelism inside of the experts the tokens, too. Here
# only the boundary sums, which scatters the tokens' gradient to the shards of the sequences anyway. Later releases of
# TorchTitan do the same (pull request 2416).
#
#     moe                 PrepareModuleInputOutput             Boundary
#     gate                NoParallel                           Inner(None)
#     w1, w3 (shared)     ColwiseParallel                      Inner(0)
#     w2 (shared)         RowwiseParallel                      Inner(1)
#     experts             TensorParallel                       SplitExperts
#     experts             ExpertParallel                       CodesExpertParallel


class Boundary(PrepareModuleInput):
    """``PrepareModuleInput`` that gives local tensors, whose gradients are parts of sums."""

    def _prepare_input_arg(self, input, mesh, input_layout, desired_layout):
        if isinstance(input, NormedInput):
            return input  # whole sequences, which the norm has gathered
        x = super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        return x if input_layout is None else x.to_local(grad_placements=[Partial()])


class Inner(ParallelStyle):
    """A linear that takes and returns local tensors, without sums of gradients.

    Args:
        dim: the dimension of the weight that the processes split; None for a gate, whose weight they all have.
    """

    def __init__(self, dim: int | None):
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is nn.Linear:
            module.__class__ = LocalLinear
        elif isinstance(module, QuantizedLinear) and self.dim is not None:
            module.split = (by_output_features, by_input_features)[self.dim](_group(device_mesh))
        placements = [Replicate() if self.dim is None else Shard(self.dim)]
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, device_mesh, placements)))
        return module


class SplitExperts(TensorParallel):
    """``TensorParallel`` that leaves the gradient of the routed tokens in parts."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_part_of_experts(module, device_mesh.size())
        return super()._apply(module, device_mesh)

    def _prepare_input_fn(self, mod, inputs, device_mesh):
        return inputs


class CodesExpertParallel(ExpertParallel):
    """``ExpertParallel`` that also takes codes (``mxtrain.parallel.expert_dispatch``). For tensors it does the same."""

    def _token_dispatch(self, mod, inputs, device_mesh):
        rows, counts = inputs
        if not isinstance(rows, RoutedRows):
            return super()._token_dispatch(mod, inputs, device_mesh)
        packed, counts = super()._token_dispatch(mod, (rows.packed[rows.index], counts), device_mesh)
        self.input_shape = (self.input_shape[0], rows.h.shape[1])  # of the results, not of the bytes
        splits = self.input_splits, self.output_splits
        h = SentRows.apply(rows.h, rows.index, self.permuted_indices, *splits, _group(device_mesh))
        return RoutedRows(h, packed, rows.format), counts


def is_boundary(style: ParallelStyle) -> bool:
    """Whether a module with this style returns parts of sums, as mixtures of experts do in TorchTitan's plans."""
    return type(style) is PrepareModuleInputOutput and style.prepare_module_output.output_layouts == (Partial(),)


def boundary(style: PrepareModuleInputOutput) -> PrepareModuleInputOutput:
    """Return the same style with gradients of the input as parts of sums."""
    new = copy.copy(style)
    new.prepare_module_input = restyled(style.prepare_module_input, Boundary)
    new.prepare_module_input.use_local_output = False  # Boundary makes the local tensor
    return new


_INNER = {
    NoParallel: Inner(None),
    ColwiseParallel: Inner(0),
    RowwiseParallel: Inner(1),
    TensorParallel: SplitExperts(),
}


def inner_style(style: ParallelStyle) -> ParallelStyle:
    """Return the style that does within a boundary what ``style`` does in TorchTitan's plans, with parts of sums."""
    # One of its own for every mixture: it holds the numbers of rows between dispatch and combine.
    return CodesExpertParallel() if type(style) is ExpertParallel else _INNER.get(type(style), style)


# Fault: the plan of tensor parallelism gives Qwen3's attention DTensors. TorchTitan 0.3.0 has no such plans.
#
# TorchTitan 0.2.2 normalizes Qwen3's queries and keys head by head as DTensors. So its attention gets DTensors, for
# which PyTorch has no rule on a CPU. Every process has whole heads. Here all tensors between wq, wk, wv and wo are
# therefore local, as in TorchTitan's plan for Llama. Only the two norms compute with DTensors, so that every process's
# part of the gradient of their weights counts.

_HEADS = (Shard(2),)
"""Queries and keys are [B, S, heads, head_dim]"""


def with_local_heads(plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return a plan in which attention modules with norms of heads compute on local tensors."""
    norms = [
        fqn for fqn, style in plan.items() if type(style) is SequenceParallel and style.sequence_sharding == _HEADS
    ]
    attentions = {fqn.rpartition(".")[0] for fqn in norms}
    return {
        fqn: _with_local_output(style) if attentions & {fqn, fqn.rpartition(".")[0]} else style
        for fqn, style in plan.items()
    }


def _with_local_output(style: ParallelStyle) -> ParallelStyle:
    new = copy.copy(style)
    if type(style) in (ColwiseParallel, SequenceParallel):
        new.use_local_output = True
    elif type(style) is PrepareModuleInput:
        # Rotary embeddings and positions stay plain tensors.
        rest = (None,) * (len(style.input_layouts) - 1)
        new.input_layouts = (style.input_layouts[0], *rest)
        new.desired_input_layouts = (style.desired_input_layouts[0], *rest)
    return new
