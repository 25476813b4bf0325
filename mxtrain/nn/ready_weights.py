"""Weights cast once per optimizer step, for all microbatches between two updates.

A forward casts W for fprop, and a backward for dgrad. With gradient accumulation, W is the same in all microbatches of
a step. ``ReadyWeights`` casts it before the first one and gives the operands to the layers, which use them in the place
of a cast. ``torch.compile`` takes them as inputs of a block's graph, because they are attributes of a module.

The bits are those of a cast in every microbatch. Memory, until ``drop``: two operands per weight, together 4 bytes per
element in mode "emulated", 8 in "reference", 2 (MXFP8) or 1.1 (NVFP4) in "native"; with the tiles of NVFP4 and mode
"emulated" 2, because one image serves both.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from mxtrain.nn.three_gemms import QuantizedLinear, ReadyWeight
from mxtrain.ops import quantize


def note_norms(model: nn.Module, feeds: Mapping[str, Sequence[str]]) -> None:
    """Tell every linear which norm feeds it: its weight is cast with that norm's gain.

    Args:
        feeds: FQN of every MXNorm -> FQNs of the linears that it feeds (``Plan.norms``).
    """
    for norm, linears in feeds.items():
        for fqn in linears:
            # A tuple, because a module would become a child of the linear.
            model.get_submodule(fqn).fed_by = (model.get_submodule(norm),)


class ReadyWeights:
    """Casts the weights of all swapped linears ahead of the forward.

    Weights that are DTensors are left out: FSDP2 gathers them anew in every forward and again in every backward, so a
    cast could not be used twice. Tensor parallelism makes DTensors, too.
    """

    def __init__(self, parts: Iterable[nn.Module]):
        modules = [module for part in parts for module in part.modules()]
        self._linears = [module for module in modules if isinstance(module, QuantizedLinear)]
        self._made_from: dict[QuantizedLinear, tuple] = {}

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast every weight that has changed since its last cast. Call it before every forward.

        A weight has changed if it or its gain is another tensor, or was written to, or if the layer has another
        recipe. Writes through ``tensor.data`` do not count as such in PyTorch, and go unseen until ``drop``.
        """
        for linear in self._linears:
            weight, gain = linear.weight, _gain_of(linear)
            if isinstance(weight, DTensor) or linear.fed_by is None or linear.state.is_plain:
                linear.ready = None
                continue
            gemms = linear.gemms(weight.device)
            made_from = (gemms.recipe, gemms.mode, *_identity(weight), *_identity(gain))
            if linear.ready is None or self._made_from[linear] != made_from:
                linear.ready = None  # frees the old operands before the new ones are allocated
                linear.ready = ReadyWeight(*quantize.weight_for_both(weight, gemms.recipe, gemms.mode, gain))
                self._made_from[linear] = made_from

    def drop(self) -> None:
        """Free all operands. Every forward casts again, until the next ``refresh``."""
        for linear in self._linears:
            linear.ready = None


def _gain_of(linear: QuantizedLinear) -> torch.Tensor | None:
    return linear.fed_by[0].weight if linear.fed_by else None


def _identity(x: torch.Tensor | None) -> tuple:
    return (None,) if x is None else (x.data_ptr(), x._version)
