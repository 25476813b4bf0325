"""A linear layer on local tensors, for tensor parallelism inside a mixture of experts that returns a part of a sum."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from mxtrain.nn.split import own_part


class LocalLinear(nn.Linear):
    """``nn.Linear`` whose parameters are DTensors, and whose input and result are plain tensors.

    A replicated weight [N, D] gives the whole result, and gets this process's part of the weight's gradient. A shard of
    the rows gives a shard of the result's features. A shard of the columns takes a shard of the features of x, and
    gives a part of a sum. No gradient of x is summed over processes.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] or its shard of features -> the result [..., N], its shard of features, or a part of a sum."""
        return F.linear(x, own_part(self.weight), own_part(self.bias))
