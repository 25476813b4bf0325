"""Recognize the formula that a chain of pointwise operations computes, by running both on numbers.

PyTorch releases write the same function as different operations (a silu is one operation, or x / (1 + exp(-x)), or
x * sigmoid(x)), and models differ in the order of factors. So a chain is compared with a formula on numbers in fp64.
There, two ways to compute the same function agree in nine digits, and two different functions do not.

Inductor computes a chain in fp32 and skips the roundings to bf16 between its operations. So conversions among bf16,
fp32 and fp64 are ignored here. A conversion to a shorter dtype such as fp8 changes values, and a chain ends there.
"""

from collections.abc import Callable

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from mxtrain.compile.nodes import CONVERT, without_views

aten = torch.ops.aten
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
