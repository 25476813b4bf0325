"""One GEMM for all linears of a norm: wq, wk and wv, or w1 and w3, as fprop, dgrad and wgrad of one large matrix.

The linears share X [T, D]. Their weights [N_i, D] one below the other are W [N, D], N = sum N_i, and their output
gradients side by side are dY [T, N]:

    fprop   Y  = X  W^T     Y_i are columns of Y
    dgrad   dX = dY W       the sum over the linears happens in the GEMM, in fp32
    wgrad   dW = dY^T X     dW_i are rows of dW

Kernels do not store W and dY: their casts write every part to its place in one operand (``ThreeGEMMs``). Every part
has the bits of its own cast, with its own random numbers. Only sums over the linears differ. Single linears round their
parts of dX to the compute dtype, and autograd adds up these parts, and the parts of the gain's gradient in another
order.

Single linears write n parts of dX, and the sum reads them. One GEMM writes one dX [T, D]: for three linears this saves
at least two writes and two reads of T x D elements, for two linears one of each.

Every linear keeps its own parameters, hooks and name. The first linear that is called multiplies for all linears, and
the others take their columns from the ``GroupCall`` of this forward. If the linears differ in more than their weights,
biases and random bits, each multiplies alone.
"""

from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from mxtrain.nn.split import WHOLE
from mxtrain.nn.three_gemms import QuantizedLinear, ReadyOperands, ThreeGEMMs, compute_dtype


class LinearGroup:
    """The linears that one norm feeds, each of which is called once in a forward, with the norm's result.

    Attributes:
        linears: in the order of their calls.
        joins_fprop: whether fprop is one GEMM, too. Its result stays in memory as long as any part is needed.
        ready: the weights, if ``mxtrain.nn.ready_weights`` has cast them. A linear that multiplies alone ignores it.
    """

    def __init__(self, linears: Sequence[QuantizedLinear]):
        self.linears = tuple(linears)
        self.joins_fprop = True
        # Set from the start, because torch.compile would compile again when the attribute appears.
        self.ready: ReadyOperands | None = None

    def __getstate__(self) -> dict:
        # Nothing would renew the operands of a copy.
        return {**self.__dict__, "ready": None}

    def is_one_gemm(self, mode: str, has_signs: bool) -> bool:
        """Return whether the linears can be one GEMM: they differ only in their weights, biases and random bits.

        ``mode`` is that of the first linear, never "auto". ``has_signs``: the norm has signs for wgrad's transform.
        """
        first, *others = self.linears
        if not first.recipe.joins(mode) or (first.recipe.needs_signs and not has_signs):
            return False
        if any(_stays_single(linear) for linear in self.linears):
            return False
        return all(_traits(linear) == _traits(first) for linear in others)


class GroupCall:
    """One forward of a group."""

    def __init__(self, group: LinearGroup):
        self.group = group
        self._outputs: dict[int, torch.Tensor] = {}
        self._made_from: tuple = ()

    def output(self, linear: QuantizedLinear, x, gemms: ThreeGEMMs, multiply: Callable) -> torch.Tensor | None:
        """Return Y [T, N_i] of one linear, without its bias; None if the linears do not make one GEMM.

        ``x`` is the norm's result, a ``NormedInput``; a hook may have replaced it. ``gemms`` are this linear's.
        ``multiply(x, linears, gemms, ready, joined)`` returns Y of every linear, see ``ThreeGEMMs.fprop``.
        """
        place = next((i for i, other in enumerate(self.group.linears) if other is linear), None)
        if place is None or not self.group.is_one_gemm(gemms.mode, x.signs is not None):
            return None
        dtype = compute_dtype(x.h)
        # Another mode of autograd needs new outputs.
        made_from = (dtype, x.h.requires_grad, torch.is_grad_enabled())
        is_same = self._made_from and self._made_from[0] is x.h and self._made_from[1:] == made_from
        if not is_same or place not in self._outputs:
            linears, ready = self.group.linears, self.group.ready
            if ready is not None and not ready.are_of((*(other.parts()[0] for other in linears), x.weight)):
                ready = None
            self._outputs = dict(enumerate(multiply(x, linears, gemms, ready, self.group.joins_fprop)))
            self._made_from = (x.h, *made_from)
        return self._outputs.pop(place)


def _stays_single(linear: QuantizedLinear) -> bool:
    # Every access computes the weight anew: each linear would find the outputs out of date and multiply for all.
    if is_parametrized(linear):
        return True
    # FSDP2 gathers a DTensor when its linear is called, not before. Other hooks may change weights or inputs.
    is_own_unit = isinstance(linear.weight, DTensor) or len(linear._forward_pre_hooks) > 0
    # A replaced forward may fetch the weight.
    is_replaced = "forward" in linear.__dict__
    return linear.is_plain or is_replaced or (linear.split == WHOLE and is_own_unit)


def _traits(linear: QuantizedLinear) -> tuple:
    """The properties that all linears of one GEMM share."""
    weight = linear.weight
    own = linear.recipe, linear.mode, linear.split, linear.gathers_codes
    return *own, weight.requires_grad, weight.dtype, weight.device
