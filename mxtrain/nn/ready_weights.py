"""Weights cast once per optimizer step, for all microbatches between two updates.

A forward casts W for fprop, and a backward casts W for dgrad. With gradient accumulation, W is the same in all
microbatches of a step. ``ReadyWeights`` casts W before the first microbatch and gives the operands to the layers, which
then do not cast. Linears that are one GEMM (``mxtrain.nn.group``) share joined operands instead of having their own,
and experts have operands of each of their stacked weights.
``torch.compile`` takes operands as inputs of a block's graph, because they are attributes of a module or a group.

Results have the same bits as with a cast in every microbatch. Memory, until ``drop``: two operands per weight, together
4 bytes per element in mode "emulated", 8 in "reference", 2 (MXFP8) or 1.1 (NVFP4) in "native", 2 in "fp8_merged". With
weights in tiles, mode "emulated" takes 2, because one image serves both.

Without microbatches nothing is held from forward to backward: each casts, and a compiled backward makes even the image
of tiles anew. Holding that image would save one of two casts, and take 2 bytes per weight.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from mxtrain.nn.experts import QuantizedExperts
from mxtrain.nn.group import LinearGroup
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.three_gemms import QuantizedLinear, ThreeGEMMs, version, weight_of


class ReadyWeights:
    """Casts the weights of all swapped linears and experts ahead of the forward.

    Weights that are DTensors are left out: FSDP2 gathers them anew in every forward and again in every backward, so a
    cast could not be used twice. Tensor parallelism makes DTensors, too. Parametrized weights and gains are left out,
    because every access computes a new tensor, which a forward would not take for the one that was cast.
    """

    def __init__(self, parts: Iterable[nn.Module]):
        modules = [module for part in parts for module in part.modules()]
        self._layers = [module for module in modules if isinstance(module, (QuantizedLinear, QuantizedExperts))]
        self._norms = [module for module in modules if isinstance(module, MXNorm) and module.group is not None]
        self._made_from: dict[QuantizedLinear | LinearGroup | QuantizedExperts, tuple] = {}

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast every weight that has changed since its last cast. Call it before every forward.

        A weight has changed if it or its gain is another tensor, or was written to, or if the layer has another
        recipe. A group casts all its weights if one of them has changed. PyTorch does not count writes through
        ``tensor.data`` and writes of a fused optimizer, so these stay unseen until ``drop``.
        """
        joined = {linear for norm in self._norms if self._refresh_group(norm) for linear in norm.group.linears}
        for layer in self._layers:
            if layer not in joined:
                self._refresh_single(layer)

    def drop(self) -> None:
        """Free all operands. Every forward casts again, until the next ``refresh``."""
        for holder in (*self._layers, *(norm.group for norm in self._norms)):
            holder.ready = None

    def _refresh_group(self, norm: MXNorm) -> bool:
        """Cast the weights of a norm's linears as one, if the linears are one GEMM now; return whether they are."""
        group, linears = norm.group, norm.group.linears
        gemms = linears[0].gemms(linears[0].weight.device)
        parametrized = any(map(is_parametrized, (norm, *linears)))
        if parametrized or not group.is_one_gemm(gemms.mode, norm.recipe.needs_signs):
            group.ready = None
            return False
        for linear in linears:
            linear.ready = None
        weights = [linear.weight for linear in linears]
        make = partial(gemms.quantize_ahead, weights, norm, group.joins_fprop)
        self._cast(group, weights, norm, gemms, make, group.joins_fprop)
        return True

    def _refresh_single(self, layer: QuantizedLinear | QuantizedExperts) -> None:
        norms = layer.fed_by
        if norms is None or any(map(is_parametrized, (layer, *norms))) or layer.layer_state.is_plain:
            layer.ready = None
        elif isinstance(layer, QuantizedExperts):
            gemms = layer.gemms(layer.weights[0].device)
            self._cast(layer, layer.weights, layer.folded_norm, gemms, partial(layer.quantize_ahead, gemms))
        else:
            weights, norm, gemms = [layer.weight], norms[0] if norms else None, layer.gemms(layer.weight.device)
            self._cast(layer, weights, norm, gemms, partial(gemms.quantize_ahead, weights, norm))

    def _cast(
        self,
        holder: QuantizedLinear | LinearGroup | QuantizedExperts,
        weights: Sequence[torch.Tensor],
        norm: MXNorm | None,
        gemms: ThreeGEMMs,
        make: Callable,
        joined: bool = True,
    ) -> None:
        """Give the holder the operands that ``make`` casts from weights and gain, unless it has them already."""
        parameters = *weights, weight_of(norm)
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            holder.ready = None
            return
        made_from = (gemms.recipe, gemms.mode, joined, *map(_identity, parameters))
        if holder.ready is None or self._made_from.get(holder) != made_from:
            holder.ready = None  # frees the old operands before the new ones are allocated
            holder.ready = make()
            self._made_from[holder] = made_from


def _identity(x: torch.Tensor | None) -> tuple:
    # The operands hold the tensors that they were made from, so no other tensor has the same id.
    return (None,) if x is None else (id(x), x.data_ptr(), version(x))
