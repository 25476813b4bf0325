"""Shortens the first step. Most of its CPU time goes to compiling the kernels that graphs launch.

PyTorch gets two facts about these kernels:

    the arguments that a kernel writes    else PyTorch compiles its source for every launch, to see them
    only the kind of a number             else PyTorch compiles a kernel for every number, and Triton the same code

Workers compile the backward's kernels as soon as the forward defines its first kernel. PyTorch alone would wait for the
backward's code. NVFP4's cast of gradients takes longest, 3 to 7 s. The backward's code then finds the kernels in
PyTorch's or Triton's cache.
"""

import copy
from collections.abc import Callable

import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor import ir
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.dependencies import ReadWrites, StarDep
from torch.fx import Graph
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet
from triton.runtime.autotuner import Autotuner

from mxtrain.compile.launches import (
    calls_of_ops,
    can_be_stated,
    inputs_of,
    kernel_and_arguments,
    memory_of,
    results_of,
)
from mxtrain.launch.launch import Launch, as_sequence

_ANALYSES = ("identify_accessed_tensors", "identify_mutated_tensors")
"""PyTorch's analysis in 2.13 and in 2.11"""
_NAME = next(name for name in _ANALYSES if hasattr(triton_kernel_wrap, name))
_ANALYZE, _DEFINE = getattr(triton_kernel_wrap, _NAME), PythonWrapperCodegen.define_user_defined_triton_kernel

_ahead: list[Launch] = []
"""Launches of the last joint graph, until workers begin with them"""


def describe_launches(describe: bool) -> None:
    """Turn the description of launches on or off for graphs that are compiled from now on."""
    setattr(triton_kernel_wrap, _NAME, _find_written if describe else _ANALYZE)
    PythonWrapperCodegen.define_user_defined_triton_kernel = _define if describe else _DEFINE


def note_launches(graph: Graph) -> None:
    """Note the launches of a graph of forward and backward, which does not change."""
    _ahead.clear()
    for node, implementation in calls_of_ops(graph):
        args = torch.fx.map_arg(node.args, lambda argument: argument.meta["val"])
        tensors = [arg for arg in pytree.tree_leaves(args) if isinstance(arg, torch.Tensor)]
        with tensors[0].fake_mode:
            launches = as_sequence(implementation(*args)[1])
        inputs = {*map(memory_of, tensors)}
        _ahead.extend(each for each in launches if can_be_stated(each, inputs) and not _has_symbols(each))


def _has_symbols(launch: Launch) -> bool:
    return any(isinstance(arg, torch.SymInt) for arg in launch.args)


def _find_written(kernel: Callable, kwargs: dict, tma_descriptor_metadata: dict):
    """What PyTorch's analysis returns: the written arguments, since 2.13 with all that may be read.

    PyTorch analyzes other kernels, and those with an argument that held an input in one launch and a result in another.
    """
    function = kernel.fn if isinstance(kernel, Autotuner) else kernel
    results, inputs = results_of.get(function, set()), inputs_of.get(function, set())
    tensors = [name for name in function.arg_names if isinstance(kwargs.get(name), (torch.Tensor, ir.TensorBox))]
    if not results or not results ^ inputs >= {*tensors}:
        return _ANALYZE(kernel, kwargs, tma_descriptor_metadata)
    written = [name for name in tensors if name in results]
    if _NAME == "identify_mutated_tensors":
        return written
    reads, writes = (OrderedSet(map(StarDep, names)) for names in (tensors, written))
    return triton_kernel_wrap.TensorAccesses(ReadWrites(reads, writes, OrderedSet()), can_fuse_epilogue=False)


def _define(wrapper: PythonWrapperCodegen, kernel: Callable, configs: list, kwargs: dict, *others):
    """Define a kernel in a graph's code, once for all numbers for which Triton compiles the same code."""
    if kernel in results_of:
        if _ahead and AsyncCompile.use_process_pool():
            result = next(kwargs[name] for name in results_of[kernel] if kwargs.get(name) is not None)
            _begin(wrapper, result, others)
        kwargs = _with_kinds(kernel, kwargs)
    return _DEFINE(wrapper, kernel, configs, kwargs, *others)


def _begin(wrapper: PythonWrapperCodegen, result: ir.Buffer, others: tuple) -> None:
    """Let workers compile the noted launches. ``result`` stands for tensors: they are aligned as a new result is."""
    launches, _ahead[:] = [*_ahead], []
    apart = copy.copy(wrapper)
    apart.user_defined_kernel_cache = {}
    apart.define_kernel = lambda name, call, *_: eval(call, {"async_compile": AsyncCompile()})
    for kernel, args in map(kernel_and_arguments, launches):
        for name, arg in args.items():
            if isinstance(arg, torch.Tensor):
                args[name] = ir.Buffer(name=result.get_name(), layout=ir.FixedLayout(arg.device, arg.dtype, [1]))
        _DEFINE(apart, kernel.fn, kernel.configs, _with_kinds(kernel.fn, args), *others)


def _with_kinds(kernel: Callable, kwargs: dict) -> dict:
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    return {name: arg if name in constants else _representative(arg) for name, arg in kwargs.items()}


def _representative(arg):
    """The number that stands for all integers for which Triton compiles the same code; any other argument itself."""
    if type(arg) is not int or arg == 1 or abs(arg) >= 2**31:
        return arg
    return 16 if arg % 16 == 0 else 2
