"""The number of a layer's call at one position of stochastic rounding: a layer that is called twice draws new bits.

In eager mode the forwards of a layer are counted. Activation checkpointing runs a forward again inside of the backward;
that changes no bits, because a backward keeps the draws of the first forward (see ``mxtrain.nn``).

A compiled graph counts nothing while it runs. Calls in one graph are numbered when the graph is traced, and a graph
that would repeat bits, because it runs twice at one position, is refused. Calls that reach a layer in two ways at one
position, eagerly and compiled or through two different graphs, are not told apart: they may repeat bits.
"""

from collections import Counter
from weakref import WeakKeyDictionary

import torch

from mxtrain.custom_op import define_op

# Odd, so that no two calls have the same key. This one spreads them evenly: 2^64 divided by the golden ratio.
_KEY_STEP = 0x9E3779B97F4A7C15
_KEYS = 2**63

# (address of a layer's seeds, address of a position, kind of call, ...) -> how often that happened.
_calls: Counter[tuple] = Counter()
# The tensors of ``_calls``: no other tensor may get their addresses.
_counted: list[torch.Tensor] = []


def forget_calls() -> None:
    """Start to count anew: the position has changed."""
    _calls.clear()
    _counted.clear()


def draws_of_call(seeds: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Count a call and return its key and position, int64 [4] (``mxtrain.rng.rounding_position.Draws``).

    The first call has the layer's own key.

    Args:
        seeds: int64 [2] with the layer's key in second place, always the same tensor for a layer.
        position: int64 [3], as set by ``set_rounding_step``.

    Raises:
        RuntimeError: for a compiled graph that has drawn the bits of this layer and position before.
    """
    if torch.compiler.is_compiling():
        return _rounding_draws(seeds, position, _number_in_graph(seeds))
    return _draws(seeds, position, _number(seeds, position))


def _number(seeds: torch.Tensor, position: torch.Tensor) -> int:
    """Number a call in eager mode. Reentrant checkpointing draws inside of the backward for the first time."""
    if _inside_backward():
        return _count(seeds, position, "forward", 0) + _count(seeds, position, "again", 1)
    return _count(seeds, position, "forward", 1)


def _count(seeds: torch.Tensor, position: torch.Tensor, kind: str | tuple, more: int) -> int:
    """Return how often this happened before, and add ``more``."""
    key = (seeds.data_ptr(), position.data_ptr(), kind)
    if key not in _calls:
        _counted.extend((seeds, position))
    before = _calls[key]
    _calls[key] = before + more
    return before


def _inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _draws(seeds: torch.Tensor, position: torch.Tensor, number: int) -> torch.Tensor:
    # The sum wraps around, as int64 does. The first call computes it, too: selective activation checkpointing wants
    # the same operations in both forwards.
    # ``%`` keeps Python's integer within int64.
    key = (seeds.to(position.device)[1:] + number * _KEY_STEP % _KEYS) & (_KEYS - 1)
    return torch.cat((key, position))


# Graph that is being traced -> address of a layer's seeds -> calls so far.
_traced: WeakKeyDictionary = WeakKeyDictionary()


@torch.compiler.assume_constant_result
def _number_in_graph(seeds: torch.Tensor) -> int:
    """Number a call that is being traced; a constant of the graph."""
    calls = _traced.setdefault(torch._guards.TracingContext.get(), Counter())
    calls[seeds.data_ptr()] += 1
    return calls[seeds.data_ptr()] - 1


def _compiled_draws(seeds: torch.Tensor, position: torch.Tensor, number: int) -> torch.Tensor:
    """The draws of call ``number`` of a graph. A graph draws once in a run, be it in its forward or in its backward.

    A graph inside of a checkpoint may run twice, the second time inside of the backward.
    """
    if _count(seeds, position, (number, _inside_backward()), 1):
        raise RuntimeError(
            "a compiled layer with stochastic rounding ran twice at one position and would repeat its random bits: "
            "call mxtrain.set_rounding_step(step, microbatch) before every forward; if one forward calls the layer "
            "twice, compile both calls in one graph, or do not compile the layer"
        )
    return _draws(seeds, position, number)


def _fake(seeds, position, number):
    return position.new_empty(4)


# An op, because it must run whenever the graph does.
_rounding_draws = define_op(
    "rounding_draws(Tensor seeds, Tensor position, int number) -> Tensor", _compiled_draws, _fake
)
