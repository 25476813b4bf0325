"""PyTorch's analysis of what a kernel writes, made once for kernels of ours that differ in numbers only.

PyTorch compiles a kernel's source to see what it writes, and asks several times for each launch of a graph: 324 times
in the first step of a Llama in NVFP4, for launches of 34 kinds (1.5B, torch 2.11).
"""

from collections.abc import Callable

from torch._higher_order_ops import triton_kernel_wrap
from triton.runtime.autotuner import Autotuner

_ANALYSES = ("identify_accessed_tensors", "identify_mutated_tensors")
"""PyTorch's analysis in 2.13 and in 2.11"""
_NAME = next(name for name in _ANALYSES if hasattr(triton_kernel_wrap, name))
_PYTORCHS = getattr(triton_kernel_wrap, _NAME)


def _once(analyse: Callable) -> Callable:
    known = {}

    def find(kernel, kwargs: dict, tma_descriptor_metadata: dict):
        function = kernel.fn if isinstance(kernel, Autotuner) else kernel
        if not function.__module__.startswith("mxtrain."):
            return analyse(kernel, kwargs, tma_descriptor_metadata)
        constexprs = {parameter.name for parameter in function.params if parameter.is_constexpr}
        key = function, frozenset((name, _kind(arg, name in constexprs)) for name, arg in kwargs.items())
        if key not in known:
            known[key] = analyse(kernel, kwargs, tma_descriptor_metadata)
        return known[key]

    return find


def _kind(arg, is_constexpr: bool) -> object:
    """What of an argument decides which code a kernel runs: the dtype of a tensor, the value of a constant."""
    return arg if is_constexpr or arg is None else getattr(arg, "dtype", type(arg))


def install() -> None:
    """Let PyTorch ask once for each kind of launch, in graphs that are compiled from now on."""
    setattr(triton_kernel_wrap, _NAME, _once(_PYTORCHS))


def remove() -> None:
    """Undo ``install``."""
    setattr(triton_kernel_wrap, _NAME, _PYTORCHS)
