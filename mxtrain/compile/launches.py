"""A pass that lets compiled graphs launch kernels themselves.

    before    a graph calls an op of ours, whose Python allocates the results, looks the kernel up and launches it
    after     the graph's own code allocates the results and launches the kernel

The kernels, and so the bits, are the same. Forward and backward of a norm and its feed-forward took 2.7 ms of the CPU's
time and take less than 2 (H200). Layers of experts, whose kernels are short, would otherwise wait for the CPU.

PyTorch knows such launches as those of a user's own kernels: as an operation that takes the results' memory, and
returns it filled.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
import triton
from torch._higher_order_ops import triton_kernel_wrap
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor import ir
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.dependencies import ReadWrites, StarDep
from torch._inductor.pattern_matcher import fwd_only
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet
from triton.runtime.autotuner import Autotuner

from mxtrain.launch.launch import Launch, as_sequence, implementations

DEVICES, VIEW = ("cuda",), torch.ops.aten.view.dtype


def launch_from_graphs(graph: Graph) -> None:
    """Replace calls of ops on a GPU whose launches PyTorch can state: with a number of warps, and no other option."""
    for node in list(graph.nodes):
        implementation = implementations.get(node.target)
        if implementation is not None and node.all_input_nodes[0].meta["val"].device.type in DEVICES:
            _inline(graph, node, implementation)
    graph.eliminate_dead_code()


def _inline(graph: Graph, node: Node, implementation: Callable) -> None:
    leaves, spec = pytree.tree_flatten(node.args)
    nodes = [leaf for leaf in leaves if isinstance(leaf, Node)]
    can_state = True

    def run(*values) -> list[torch.Tensor]:
        nonlocal can_state
        given = iter(values)
        args = pytree.tree_unflatten([next(given) if isinstance(leaf, Node) else leaf for leaf in leaves], spec)
        results, launches = implementation(*args)
        launches = as_sequence(launches)
        inputs = {_memory(value) for value in values if isinstance(value, torch.Tensor)}
        # Without launches an op leaves open how it fills its results: some know none while sizes are symbolic.
        can_state = bool(launches) and all(_can_state(launch, inputs) for launch in launches)
        if not can_state:
            return results
        filled = _run(launches, inputs)
        return pytree.tree_map(lambda result: _as(result, filled.get(_memory(result), result)), results)

    values = [leaf.meta["val"] for leaf in nodes]
    with values[0].fake_mode:
        traced = fwd_only(run, values, run_functional_passes=False).graph
    if not can_state:
        return
    _drop_views_back(traced)
    copies = dict(zip(traced.find_nodes(op="placeholder"), nodes, strict=True))
    with graph.inserting_before(node):
        new = graph.graph_copy(traced, copies)
    for launch in traced.find_nodes(op="call_function", target=triton_kernel_wrapper_functional):
        # Inductor passes arguments with the strides of these tensors.
        kwargs = torch.fx.map_arg(launch.kwargs, lambda argument: argument.meta["val"])
        copies[launch].meta["eager_input_vals"] = (), kwargs
    if isinstance(new, Node):
        node.replace_all_uses_with(new)
    else:
        for item in list(node.users):
            item.replace_all_uses_with(new[item.args[1]])
            graph.erase_node(item)
    graph.erase_node(node)


def _drop_views_back(graph: Graph) -> None:
    """Let kernels fill bytes, not a view as bytes of codes that are a view of bytes, which Inductor does not take."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default):
        node.replace_all_uses_with(node.args[0])
    for node in graph.find_nodes(op="call_function", target=VIEW):
        source, dtype = node.args
        if source.target is VIEW and source.args[0].meta["val"].dtype == dtype:
            node.replace_all_uses_with(source.args[0])


def _can_state(launch: Launch, inputs: set[int]) -> bool:
    """Whether the launch has no option but warps, and one argument for each result, which is the whole result."""
    written = [arg for arg in launch.args if isinstance(arg, torch.Tensor) and _memory(arg) not in inputs]
    options = launch.constants.keys() - {*launch.kernel.arg_names, "num_warps", "maxnreg"}
    if options or len({*map(_memory, written)}) < len(written):
        return False
    # Of a result in parts, which a graph would take for the whole, one part begins behind another.
    starts = [arg.storage_offset() for arg in written]
    return all(isinstance(start, int) and start == 0 for start in starts) and _stands_alone(launch.kernel)


@functools.cache
def _stands_alone(kernel: Callable) -> bool:
    """Whether PyTorch copies a kernel's whole source: modules are lost, and all functions share one namespace."""
    meanings, functions = {}, [kernel]
    for function in functions:
        names = function.fn.__globals__
        for name in names.keys() & {*function.fn.__code__.co_names} - {"tl"}:
            meaning = names[name].value if isinstance(names[name], triton.language.constexpr) else names[name]
            if isinstance(meaning, ModuleType) or meanings.setdefault(name, meaning) != meaning:
                return False
            if isinstance(meaning, triton.JITFunction) and meaning not in functions:
                functions.append(meaning)
    return True


def _run(launches: Sequence[Launch], inputs: set[int]) -> dict[int, torch.Tensor]:
    """Launch kernels one after the other; return what each memory that is not an input's holds then."""
    filled: dict[int, torch.Tensor] = {}
    for launch in launches:
        kernel, args = _stated(launch)
        tensors = {name: arg for name, arg in args.items() if isinstance(arg, torch.Tensor)}
        results = [name for name, tensor in tensors.items() if _memory(tensor) not in inputs]
        tensors |= {name: filled.get(_memory(tensors[name]), tensors[name]) for name in results}
        symbols = {name: arg for name, arg in args.items() if isinstance(arg, torch.SymInt)}
        constants = {name: arg for name, arg in args.items() if name not in tensors | symbols}
        after = triton_kernel_wrapper_functional(
            kernel_idx=kernel_side_table.add_kernel(kernel),
            constant_args_idx=kernel_side_table.add_constant_args(constants),
            grid=[(*launch.grid, 1, 1)[:3]],
            tma_descriptor_metadata={},
            kwargs=tensors | symbols,
            tensors_to_clone=results,
        )
        filled |= {_memory(args[name]): after[name] for name in results}
        _results.setdefault(launch.kernel, set()).update(results)
        _inputs.setdefault(launch.kernel, set()).update(tensors.keys() - results)
    return filled


def _stated(launch: Launch) -> tuple[Callable, dict]:
    """A launch's kernel with its options, and all arguments by name."""
    args = dict(zip(launch.kernel.arg_names, launch.args)) | launch.constants
    return _with_options(launch.kernel, args.pop("num_warps"), args.pop("maxnreg", None)), args


@functools.cache
def _with_options(kernel: Callable, warps: int, registers: int | None) -> Callable:
    # Inductor keeps a configuration's number of registers among its constants only.
    constants = {} if registers is None else {"maxnreg": registers}
    return triton.autotune([triton.Config(constants, num_warps=warps)], key=[])(kernel)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _as(result: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    return filled if filled.dtype == result.dtype else filled.view(result.dtype)


# A first step spends most of the CPU's time on kernels that graphs launch, so PyTorch is told more about them:
#   - the arguments that a kernel writes. Else PyTorch compiles its source for every launch, to see them.
#   - only the kind of a number. Else PyTorch compiles a kernel for every number, and Triton the same code each time.
_ANALYSES = ("identify_accessed_tensors", "identify_mutated_tensors")
"""PyTorch's analysis in 2.13 and in 2.11"""
_NAME = next(name for name in _ANALYSES if hasattr(triton_kernel_wrap, name))
_ANALYZE, _DEFINE = getattr(triton_kernel_wrap, _NAME), PythonWrapperCodegen.define_user_defined_triton_kernel

_results: dict[Callable, set[str]] = {}
"""Kernel that graphs launch -> names of the arguments that hold results in a launch so far"""
_inputs: dict[Callable, set[str]] = {}
"""Kernel that graphs launch -> names of the arguments that hold inputs in a launch so far"""


def _find_written(kernel: Callable, kwargs: dict, tma_descriptor_metadata: dict):
    """What PyTorch's analysis returns: the written arguments, since 2.13 with all that may be read.

    PyTorch analyzes other kernels, and those with an argument that held an input in one launch and a result in another.
    """
    function = kernel.fn if isinstance(kernel, Autotuner) else kernel
    results, inputs = _results.get(function, set()), _inputs.get(function, set())
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
    if kernel in _results:
        if _ahead and AsyncCompile.use_process_pool():
            _begin(wrapper, next(kwargs[name] for name in _results[kernel] if kwargs.get(name) is not None), others)
        kwargs = _with_kinds(kernel, kwargs)
    return _DEFINE(wrapper, kernel, configs, kwargs, *others)


def _with_kinds(kernel: Callable, kwargs: dict) -> dict:
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    return {name: arg if name in constants else _representative(arg) for name, arg in kwargs.items()}


def _representative(arg):
    """The number that stands for all integers for which Triton compiles the same code; any other argument itself."""
    if type(arg) is not int or arg == 1 or abs(arg) >= 2**31:
        return arg
    return 16 if arg % 16 == 0 else 2


def describe_launches(describe: bool) -> None:
    """Let PyTorch know more about the launches in graphs that are compiled from now on, or no more."""
    setattr(triton_kernel_wrap, _NAME, _find_written if describe else _ANALYZE)
    PythonWrapperCodegen.define_user_defined_triton_kernel = _define if describe else _DEFINE


# Workers would begin with a backward's kernels when the backward's code is complete, long after the forward's. But a
# kernel of the backward takes longest, NVFP4's cast of gradients: 3 to 7 s. Here workers begin with all kernels of both
# when the forward defines its first kernel. A graph's code that comes later finds a kernel under the same name in the
# same place, or its code in Triton's cache.
_ahead: list[Launch] = []
"""Launches of the last joint graph, until workers begin with them"""


def note_launches(graph: Graph) -> None:
    """Note the launches of a joint graph, which does not change."""
    _ahead.clear()
    for node in graph.nodes:
        implementation = implementations.get(node.target)
        if implementation is not None and node.all_input_nodes[0].meta["val"].device.type in DEVICES:
            args = torch.fx.map_arg(node.args, lambda argument: argument.meta["val"])
            inputs = {_memory(arg) for arg in pytree.tree_leaves(args) if isinstance(arg, torch.Tensor)}
            with node.all_input_nodes[0].meta["val"].fake_mode:
                launches = as_sequence(implementation(*args)[1])
            _ahead.extend(launch for launch in launches if _can_state(launch, inputs) and not _has_symbols(launch))


def _has_symbols(launch: Launch) -> bool:
    return any(isinstance(arg, torch.SymInt) for arg in launch.args)


def _begin(wrapper: PythonWrapperCodegen, result: ir.Buffer, others: tuple) -> None:
    """Let workers compile the noted launches. ``result`` stands for tensors: they are aligned as a new result is."""
    launches, _ahead[:] = [*_ahead], []
    apart = copy.copy(wrapper)
    apart.user_defined_kernel_cache = {}
    apart.define_kernel = lambda name, call, *_: eval(call, {"async_compile": AsyncCompile()})
    for kernel, args in map(_stated, launches):
        for name, arg in args.items():
            if isinstance(arg, torch.Tensor):
                args[name] = ir.Buffer(name=result.get_name(), layout=ir.FixedLayout(arg.device, arg.dtype, [1]))
        _DEFINE(apart, kernel.fn, kernel.configs, _with_kinds(kernel.fn, args), *others)
