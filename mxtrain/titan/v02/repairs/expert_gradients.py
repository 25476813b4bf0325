"""Fault: tensor parallelism takes parts of gradients within experts for the whole. Mended in TorchTitan 0.3.0.

Repair: parts of sums inside a mixture of experts, and one sum at its boundary.

Every process sees all tokens of a mixture of experts, and returns a part of its result: from its share of every
expert's features, or from some of the experts. So all gradients inside are parts of sums as well, those of the gate
and of the tokens among them. TorchTitan 0.2.2 sums the gradient of what goes into the experts, and takes the other
parts for whole gradients: gates are wrong, and without tensor parallelism inside of the experts the tokens, too. Here
only the boundary sums, which scatters the tokens' gradient to the shards of the sequences anyway. Later releases of
TorchTitan do the same (pull request 2416).

    moe                 PrepareModuleInputOutput             Boundary
    gate                NoParallel                           Replicated
    w1, w3 (shared)     ColwiseParallel                      InnerColumnwise
    w2 (shared)         RowwiseParallel                      InnerRowwise
    experts             TensorParallel                       SplitExperts
    experts             ExpertTensorParallel                 ExchangedSplitExperts
    experts             ExpertParallel                       CodesExpertParallel
"""

import copy

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torchtitan.distributed import NoParallel
from torchtitan.distributed.expert_parallel import ExpertParallel, ExpertTensorParallel, TensorParallel

from mxtrain.errors import ConfigError
from mxtrain.nn.decompose_k.router import DecomposeKRouter
from mxtrain.nn.normed_input import NormedInput
from mxtrain.nn.routed_rows import RoutedRows
from mxtrain.nn.split import LocalLinear
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.parallel.expert_dispatch import SentRows
from mxtrain.parallel.tensor_parallel import DEGREE, check_part_of_experts
from mxtrain.titan.v02.styles import Columnwise, Rowwise, restyled


class Boundary(PrepareModuleInput):
    """``PrepareModuleInput`` that gives local tensors, whose gradients are parts of sums."""

    def _prepare_input_arg(self, input, mesh, input_layout, desired_layout):
        if isinstance(input, NormedInput):
            return input  # whole sequences, which the norm has gathered
        x = super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        return x if input_layout is None else x.to_local(grad_placements=[Partial()])


class Replicated(NoParallel):
    """``NoParallel`` for a gate whose logits' gradients are parts of sums."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(_local(module, device_mesh), device_mesh)


class _LocalTensors(ParallelStyle):
    """A style whose module takes and returns local tensors, so that nothing is prepared.

    (``inner_style`` could not assign a class with a base that is no ParallelStyle.)
    """

    @staticmethod
    def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):
        return inputs

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        return outputs


class InnerColumnwise(_LocalTensors, Columnwise):
    """``ColwiseParallel`` from all tokens to this process's features of the result, without sums of gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = Columnwise if isinstance(module, QuantizedLinear) else ColwiseParallel
        return own._apply(self, _local(module, device_mesh), device_mesh)


class InnerRowwise(_LocalTensors, Rowwise):
    """``RowwiseParallel`` from this process's features to a part of the result."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if module.bias is not None:
            raise ConfigError(
                f"{DEGREE} = {device_mesh.size()} splits a linear with a bias in a mixture of experts by input "
                "features, and every process would add the bias: allowed is 1"
            )
        own = Rowwise if isinstance(module, QuantizedLinear) else RowwiseParallel
        return own._apply(self, _local(module, device_mesh), device_mesh)


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
        h = SentRows.apply(rows.h, rows.index, self.permuted_indices, *self._exchange(device_mesh))
        return RoutedRows(h, packed, rows.format), counts

    def _exchange(self, device_mesh) -> tuple[list[int], list[int], str]:
        return self.input_splits, self.output_splits, device_mesh.get_group().group_name


class ExchangedSplitExperts(ExpertTensorParallel, CodesExpertParallel):
    """``ExpertTensorParallel`` that leaves the gradient of the routed tokens in parts."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_part_of_experts(module, device_mesh["etp"].size())
        return super()._apply(module, device_mesh)

    def _token_dispatch(self, mod, inputs, device_mesh):
        return CodesExpertParallel._token_dispatch(self, mod, inputs, device_mesh["ep"])


def _local(module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
    """Make a linear compute on local tensors, and return it."""
    if type(module) is nn.Linear:
        module.__class__ = LocalLinear
    elif not isinstance(module, DecomposeKRouter | QuantizedLinear):
        raise ConfigError(
            f"{DEGREE} = {device_mesh.size()} does not know the gradients of {type(module).__name__} in a mixture of "
            "experts: allowed is 1"
        )
    return module


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
    NoParallel: Replicated,
    ColwiseParallel: InnerColumnwise,
    RowwiseParallel: InnerRowwise,
    TensorParallel: SplitExperts,
    ExpertTensorParallel: ExchangedSplitExperts,
    ExpertParallel: CodesExpertParallel,
}


def inner_style(style: ParallelStyle) -> ParallelStyle:
    """Return the style that does within a boundary what ``style`` does in TorchTitan's plans, with parts of sums."""
    return restyled(style, _INNER[type(style)]) if type(style) in _INNER else style
