"""PyTorch's private names, under names of our own. Only ``launch/`` and ``compile/`` use private names."""

from collections.abc import Callable

import torch
from torch._C import DisableTorchFunction
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "CheckpointWrapper",
    "DisableTorchFunction",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "detect_fake_mode",
    "tree_leaves",
    "tree_map_only",
    "unset_fake_temporarily",
]

# Operations on lists of tensors, by few kernels.
abs_of_each, max_of_each, neg_of_each = torch._foreach_abs, torch._foreach_max, torch._foreach_neg
norm_of_each, sub_of_each = torch._foreach_norm, torch._foreach_sub

collectives = torch.ops._c10d_functional
"""Collectives on plain tensors, whose results are waited for by an operation of their own"""


def autocasts_on_cuda(function: str) -> bool:
    """Return whether autocast on a GPU casts the arguments of this function of ``torch.ops.aten``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{function}", "AutocastCUDA")


def delayed_error(message: str) -> Callable:
    """Return a function that returns a tensor as it is, and raises RuntimeError in its backward."""
    return torch._C._functions.DelayedError(message.encode(), 1)
