"""Helpers for nodes of a graph: views that only regroup rows, and the formula that pointwise operations compute.

``node.meta["val"]`` holds the result of a node: a fake tensor with shape, dtype and strides.
"""

from collections.abc import Callable

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default, aten.detach.default)


def without_views(node: Node) -> Node:
    """Return the node that computed the rows of ``node``, before all views that only regroup rows."""
    while _regroups_rows(node):
        node = node.args[0]
    return node


def final_users(node: Node) -> set[Node]:
    """Return the users of ``node`` and of its views that only regroup rows. The views themselves are left out."""
    found = set()
    for user in node.users:
        found |= final_users(user) if _regroups_rows(user) else {user}
    return found


def that_depend_on_tangents(graph: Graph) -> set[Node]:
    """Return the nodes that depend on the gradients of the graph's results."""
    found: set[Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in node.target
        if is_tangent or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def as_matrix(graph: Graph, node: Node) -> Node:
    """Return ``node`` as a matrix [rows, last dimension]: the node itself, or a new view of it."""
    value = node.meta["val"]
    if value.ndim == 2:
        return node
    matrix = graph.call_function(aten.view.default, (node, [-1, value.shape[-1]]))
    matrix.meta = {**node.meta, "val": value.view(-1, value.shape[-1])}
    return matrix


def describe_call(node: Node, like: Node, results: list[torch.Tensor]) -> None:
    """Give a new call of an operation its ``results``, and all other metadata of the call ``like``."""
    node.meta = {
        **like.meta,
        "val": results,
        # Inductor passes arguments with the strides of these tensors.
        "eager_input_vals": torch.fx.map_arg((node.args, {}), lambda argument: argument.meta["val"]),
    }


def _regroups_rows(node: Node) -> bool:
    if node.op != "call_function" or node.target not in VIEWS:
        return False
    mine, others = _row_length(node), _row_length(node.args[0])
    return mine is not None and others is not None and statically_known_true(mine == others)


def _row_length(node: Node):
    value = node.meta.get("val")
    return value.shape[-1] if isinstance(value, torch.Tensor) and value.ndim else None


# A chain of pointwise operations is recognized by running it and a formula on numbers.
#
# PyTorch releases write the same function as different operations (a silu is one operation, or x / (1 + exp(-x)), or
# x * sigmoid(x)), and models differ in the order of factors. In fp64, two ways to compute the same function agree in
# nine digits, and two different functions do not.
#
# Inductor computes a chain in fp32 and skips the roundings to bf16 between its operations. So conversions among bf16,
# fp32 and fp64 are ignored here. A conversion to a shorter dtype such as fp8 changes values, and a chain ends there.

_CONVERSIONS = (CONVERT, aten._to_copy.default)
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
# Longer chains are not followed. A silu and its gradient together have about 20 operations.
_LONGEST = 40


class Chain:
    """The pointwise operations that end in ``node``, and the tensors of the same shape that they read.

    Attributes:
        operations: the nodes of the operations.
        inputs: the nodes of the tensors that the chain reads; empty if the chain is too long.
    """

    def __init__(self, node: Node):
        self._last = without_views(node)
        self.operations: set[Node] = set()
        self.inputs: tuple[Node, ...] = ()
        inputs: dict[Node, None] = {}
        waiting = [self._last]
        while waiting:
            node = without_views(waiting.pop())
            if node in self.operations or node in inputs:
                continue
            if not _is_pointwise(node):
                inputs[node] = None
                continue
            self.operations.add(node)
            if len(self.operations) > _LONGEST:
                return
            waiting += node.all_input_nodes
        self.inputs = tuple(inputs)

    def computes(self, formula: Callable[..., torch.Tensor], *inputs: Node) -> bool:
        """Return whether the chain computes ``formula`` of ``inputs``, element by element."""
        if {*inputs} != {*self.inputs}:
            return False
        # Passes run while PyTorch traces with tensors that have no data.
        with _disable_current_modes(), torch.no_grad():
            numbers = _numbers(len(inputs))
            try:
                got = self._evaluate(self._last, dict(zip(inputs, numbers)))
            except (TypeError, RuntimeError):  # an operation that does not run on these vectors
                return False
            want = formula(*numbers)
            return got.shape == want.shape and torch.allclose(got, want, rtol=1e-9, atol=1e-30, equal_nan=True)

    def _evaluate(self, node: Node, known: dict[Node, torch.Tensor]) -> torch.Tensor:
        node = without_views(node)
        if node not in known:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: self._evaluate(n, known))
            # Conversions are skipped: all numbers stay in fp64.
            known[node] = args[0] if node.target in _CONVERSIONS else node.target(*args, **kwargs)
        return known[node]


def _numbers(count: int) -> list[torch.Tensor]:
    """Vectors of fp64 numbers, most of them near zero, in an order of their own for each vector.

    The ends lie outside the range of bf16 and fp32, so that no bound within it goes unseen.
    """
    ends = torch.tensor([-1e60, -300.0, -50.0, 50.0, 300.0, 1e60, torch.nan], dtype=torch.float64, device="cpu")
    numbers = torch.cat([torch.linspace(-9.5, 10, 94, dtype=torch.float64, device="cpu"), ends])
    # The steps have no divisor in common with the length.
    at = torch.arange(len(numbers), device="cpu")
    return [numbers[(at * step) % len(numbers)] for step in (1, 10, 37)[:count]]


def _is_pointwise(node: Node) -> bool:
    """Whether the node, of one of ``_DTYPES``, is a pointwise operation on tensors of its own shape and on numbers."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.pointwise not in node.target.tags and node.target not in _CONVERSIONS:
        return False
    mine, *inputs = (n.meta.get("val") for n in (node, *node.all_input_nodes))
    if not isinstance(mine, torch.Tensor) or mine.dtype not in _DTYPES:
        return False
    floats = [value for value in inputs if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return len(floats) == len(inputs) and all(value.ndim > 1 and value.shape == mine.shape for value in floats)
