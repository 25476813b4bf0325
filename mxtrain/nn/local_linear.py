"""A linear layer on local tensors, for tensor parallelism where nothing but parts of sums leaves a group of layers."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from mxtrain.nn.split import own_part


class LocalLinear(nn.Linear):
    """``nn.Linear`` whose parameters are DTensors, and whose input and result are plain tensors.

    A weight [N, D] that every process has whole gives the whole result, and gets this process's part of its gradient.
    A shard of N rows gives so many features of the result; a shard of D columns takes so many features of x and gives a
    part of a sum. No gradient of x is summed over processes.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D], or this process's features of it -> [..., N], or this process's features, or a part of a sum."""
        return F.linear(x, own_part(self.weight), own_part(self.bias))
