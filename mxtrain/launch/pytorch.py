"""PyTorch's private names, under names of our own. Only ``launch/`` and ``compile/`` use private names."""

from collections.abc import Callable

import torch
import torch._functorch.config
from torch._C import DisableTorchFunction as DisableTorchFunction
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper as CheckpointWrapper
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

without_torch_function = torch._C._disabled_torch_function_impl

# Operations on lists of tensors, by few kernels.
norm_of_each = torch._foreach_norm

collectives = torch.ops._c10d_functional
"""Collectives on plain tensors, whose results are waited for by an operation of their own"""


def autocasts_on_cuda(function: str) -> bool:
    """Return whether autocast on a GPU casts the arguments of this function of ``torch.ops.aten``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{function}", "AutocastCUDA")


def replace_local(tensor: DTensor, kind: type[torch.Tensor]) -> torch.Tensor:
    """Make the local tensor of a DTensor an instance of ``kind`` with the same memory, and return it."""
    if type(tensor._local_tensor) is not kind:
        tensor._local_tensor = tensor._local_tensor.as_subclass(kind)
    return tensor._local_tensor


def delayed_error(message: str) -> Callable:
    """Return a function that returns a tensor as it is, and raises RuntimeError in its backward."""
    return torch._C._functions.DelayedError(message.encode(), 1)


def fake_tensor_mode() -> FakeTensorMode:
    """Return the mode that is on, because tensors of two modes do not mix, or a new one.

    A Triton kernel would take the null pointer of a fake tensor for an address. On a GPU this is an illegal memory
    access, after which the process cannot use the GPU any more: in a new mode it is an error instead.
    """
    with torch._functorch.config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        return detect_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
