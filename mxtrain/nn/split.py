"""What a layer knows about tensor parallelism: which of its matrices are split over a process group, and how.

X is [T, D], W is [N, D], dY is [T, N]. A process group of P processes splits a linear layer in one of two ways:

    by output features    W [N / P, D], dY [T, N / P], X whole        dX is a part of a sum
    by input features     W [N, D / P], X [T, D / P], dY whole        Y is a part of a sum

``mxtrain.parallel.tensor_parallel`` sums the parts. Every operand is cast as in one process: blocks lie within a
shard if the shards are whole blocks, and NVFP4's tensor scales come from the parts of all processes.

Between the layers, sequence parallelism splits the sequences. Norms have whole rows and work on their own tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial

from mxtrain.launch import Keyed


@dataclass(frozen=True)
class SplitMatrices:
    """Name of the process group that holds the parts of a linear layer's matrix; None for a whole matrix."""

    x: str | None = None
    w: str | None = None
    dy: str | None = None


WHOLE = SplitMatrices()


def by_output_features(group: str) -> SplitMatrices:
    """The matrices of a column-wise parallel linear layer."""
    return SplitMatrices(w=group, dy=group)


def by_input_features(group: str) -> SplitMatrices:
    """The matrices of a row-wise parallel linear layer."""
    return SplitMatrices(x=group, w=group)


@dataclass(frozen=True, eq=False)
class SplitSequences(Keyed):
    """The processes that hold the shards [B, S / processes, D] of sequences.

    Attributes:
        group: name of the process group.
        processes: their number.
        rank: number of this process among them; it has shard ``rank``.
        gather: what a norm sends: "high_precision" (its input), "quantized" (codes and scales), or "auto" (fewer
            bytes).
        forwards: how often a norm's forward runs for one backward: 2 inside of activation checkpointing.
    """

    group: str
    processes: int
    rank: int
    gather: str = "auto"
    forwards: int = 1

    def __post_init__(self):
        self._register()


def own_part(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Return this process's tensor of a parameter: its shard of a DTensor, or the whole of a replicated or plain one.

    The gradient of a replicated DTensor is this process's part of a sum.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    parts = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    return parameter.to_local(grad_placements=parts)


class LocalLinear(nn.Linear):
    """``nn.Linear`` whose parameters are DTensors, and whose input and result are plain tensors.

    For tensor parallelism inside a mixture of experts that returns a part of a sum.

    A replicated weight [N, D] gives the whole result, and gets this process's part of the weight's gradient. A shard of
    the rows gives a shard of the result's features. A shard of the columns takes a shard of the features of x, and
    gives a part of a sum. No gradient of x is summed over processes.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] or its shard of features -> the result [..., N], its shard of features, or a part of a sum."""
        return F.linear(x, own_part(self.weight), own_part(self.bias))
