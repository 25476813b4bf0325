"""A pass that lets compiled graphs launch kernels themselves.

    before    a graph calls an op of ours, whose Python allocates the results, looks the kernel up and launches it
    after     the graph's own code allocates the results and launches the kernel

The kernels, and so the bits, are the same. Forward and backward of a norm and its feed-forward took 2.7 ms of the CPU's
time and take less than 2 (H200). Layers of experts, whose kernels are short, would otherwise wait for the CPU.

PyTorch knows such launches as those of a user's own kernels: as an operation that takes the results' memory, and
returns it filled.
"""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
import triton
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor.pattern_matcher import fwd_only
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from mxtrain.launch.launch import Launch, as_sequence, implementations

DEVICES, VIEW = ("cuda",), torch.ops.aten.view.dtype

results_of: dict[Callable, set[str]] = {}
"""Kernel that graphs launch -> names of the arguments that hold results in a launch so far"""
inputs_of: dict[Callable, set[str]] = {}
"""Kernel that graphs launch -> names of the arguments that hold inputs in a launch so far"""


def launch_from_graphs(graph: Graph) -> None:
    """Replace calls of ops on a GPU whose launches PyTorch can state: with a number of warps, and no other option."""
    for node, implementation in calls_of_ops(graph):
        _inline(graph, node, implementation)
    graph.eliminate_dead_code()


def calls_of_ops(graph: Graph) -> list[tuple[Node, Callable]]:
    """Calls of our ops on a GPU, with the ops' implementations."""
    known = [(node, implementations[node.target]) for node in graph.nodes if node.target in implementations]
    return [each for each in known if each[0].all_input_nodes[0].meta["val"].device.type in DEVICES]


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
        inputs = {memory_of(value) for value in values if isinstance(value, torch.Tensor)}
        # Without launches an op leaves open how it fills its results: some know none while sizes are symbolic.
        can_state = bool(launches) and all(can_be_stated(launch, inputs) for launch in launches)
        if not can_state:
            return results
        filled = _run(launches, inputs)
        return pytree.tree_map(lambda result: _as(result, filled.get(memory_of(result), result)), results)

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


def can_be_stated(launch: Launch, inputs: set[int]) -> bool:
    """Whether the launch has no option but warps, and one argument for each result, which is the whole result."""
    written = [arg for arg in launch.args if isinstance(arg, torch.Tensor) and memory_of(arg) not in inputs]
    options = launch.constants.keys() - {*launch.kernel.arg_names, "num_warps", "maxnreg"}
    if options or len({*map(memory_of, written)}) < len(written):
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
        kernel, args = kernel_and_arguments(launch)
        tensors = {name: arg for name, arg in args.items() if isinstance(arg, torch.Tensor)}
        results = [name for name, tensor in tensors.items() if memory_of(tensor) not in inputs]
        tensors |= {name: filled.get(memory_of(tensors[name]), tensors[name]) for name in results}
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
        filled |= {memory_of(args[name]): after[name] for name in results}
        results_of.setdefault(launch.kernel, set()).update(results)
        inputs_of.setdefault(launch.kernel, set()).update(tensors.keys() - results)
    return filled


def kernel_and_arguments(launch: Launch) -> tuple[Callable, dict]:
    """A launch's kernel with its options, and all arguments by name."""
    args = dict(zip(launch.kernel.arg_names, launch.args)) | launch.constants
    return _with_options(launch.kernel, args.pop("num_warps"), args.pop("maxnreg", None)), args


@functools.cache
def _with_options(kernel: Callable, warps: int, registers: int | None) -> Callable:
    # Inductor keeps a configuration's number of registers among its constants only.
    constants = {} if registers is None else {"maxnreg": registers}
    return triton.autotune([triton.Config(constants, num_warps=warps)], key=[])(kernel)


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _as(result: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    return filled if filled.dtype == result.dtype else filled.view(result.dtype)
