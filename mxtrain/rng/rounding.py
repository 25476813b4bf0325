"""The random bits of stochastic rounding: the position in training that they are drawn for, and the number of a call.

A position is step, microbatch and rank. It is a tensor, so that one compiled graph serves all steps. A new step gets a
new tensor: a backward still uses the position that its forward saved.

A layer that is called twice at one position draws new bits. In eager mode the forwards of a layer and of its copies are
counted. Activation checkpointing runs a forward again inside of the backward; that changes no bits, because a backward
keeps the draws of the first forward (see ``mxtrain.nn``).

A compiled graph counts nothing while it runs. Calls in one graph are numbered when the graph is traced, and a graph
that would repeat bits, because it runs twice at one position, is refused. Calls that reach a layer in two ways at one
position, eagerly and compiled or through two different graphs, are not told apart: they may repeat bits.
"""

from collections import Counter
from enum import IntEnum
from numbers import Integral
from weakref import WeakKeyDictionary

import torch

from mxtrain.launch.functions import define_op
from mxtrain.launch.pytorch import inside_backward, traced_graph

_WORD = 2**32
# Largest matrix with random bits. Four elements share one draw, and the index of a draw must fit in 32 bits.
MAX_ELEMENTS = 4 * _WORD


class Draws(IntEnum):
    """Index of each number in the int64 [4] tensor that determines a layer's random bits."""

    KEY = 0
    STEP = 1
    MICROBATCH = 2
    RANK = 3


# Device type -> int64 [3] (step, microbatch, rank). Empty until a step is set.
_position: dict[str, torch.Tensor] = {}
# Step, microbatch and rank as set by ``set_rounding_step``. Empty until then.
_numbers: list[int] = []


def set_rounding_step(step: int | None, microbatch: int = 0, rank: int | None = None) -> None:
    """Set the step, and with gradient accumulation the microbatch, of the next forward.

    Call it before every forward, as ``mxtrain.train`` does: a resumed run then repeats the random bits of every step.
    Without any call, each forward draws a random step from PyTorch's default generator. After a call, the position
    stays: further calls of a layer draw other bits in eager mode, and raise RuntimeError where the layer is compiled.

    Args:
        step: from 0 to 2^32 - 1; None removes the position, and forwards draw from the generator again.
        microbatch: number of the forward within the step.
        rank: number that differs between processes with different data; None for the rank in the default process
            group.

    Raises:
        ValueError: for anything but an integer that fits in 32 bits.
    """
    if step is None:
        forget_calls()
        _position.clear()
        _numbers.clear()
        return
    _numbers[:] = _set(step, microbatch, _default_rank() if rank is None else rank)


def set_rounding_chunk(chunk: int, chunks: int) -> None:
    """Set the chunk of the next forward, in a pipeline that splits the microbatch of ``set_rounding_step`` into chunks.

    A chunk of a microbatch is then a microbatch of its own: number ``microbatch * chunks + chunk``. Does nothing while
    no step is set.

    Args:
        chunk: from 0 to ``chunks`` - 1.
        chunks: number of chunks of every microbatch.
    """
    if _numbers:
        step, microbatch, rank = _numbers
        _set(step, microbatch * chunks + chunk, rank)


def _set(*numbers: int) -> list[int]:
    """Set step, microbatch and rank, and return them as Python's integers: NumPy's overflow."""
    for name, number in zip(("step", "microbatch", "rank"), numbers):
        if isinstance(number, bool) or not isinstance(number, Integral) or not 0 <= number < _WORD:
            raise ValueError(f"{name} = {number!r} is not an integer from 0 to {_WORD - 1}")
    integers = [int(number) for number in numbers]
    forget_calls()
    for device_type in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        # A fill kernel, because copying from the CPU would wait for all work queued on the GPU.
        filled = [torch.full((), number, dtype=torch.int64, device=device_type) for number in integers]
        _position[device_type] = torch.stack(filled)
    return integers


def step_is_set() -> bool:
    """Return whether ``set_rounding_step`` has set a step."""
    return bool(_position)


def position_as_set(device_type: str) -> torch.Tensor | None:
    """Return step, microbatch and rank, int64 [3] on the current device of this type; None if no step was set.

    It is the same tensor until the next call of ``set_rounding_step``.
    """
    return _position.get(device_type)


def random_position(device: torch.device) -> torch.Tensor:
    """Return a random step, microbatch 0 and the rank, int64 [3] on ``device``."""
    step = torch.randint(_WORD, (), dtype=torch.int64, device=device)
    return torch.stack((step, torch.zeros_like(step), torch.full_like(step, _default_rank())))


def _default_rank() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if distributed else 0


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
    """Count a call and return its key and position, int64 [4] (``Draws``).

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
    if inside_backward():
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
    calls = _traced.setdefault(traced_graph(), Counter())
    calls[seeds.data_ptr()] += 1
    return calls[seeds.data_ptr()] - 1


def _compiled_draws(seeds: torch.Tensor, position: torch.Tensor, number: int) -> torch.Tensor:
    """The draws of call ``number`` of a graph. A graph draws once in a run, be it in its forward or in its backward.

    A graph inside of a checkpoint may run twice, the second time inside of the backward.
    """
    if _count(seeds, position, (number, inside_backward()), 1):
        raise RuntimeError(
            "a compiled layer with stochastic rounding ran twice at one position and would repeat its random bits: "
            "call mxtrain.set_rounding_step(step, microbatch) before every forward; if one forward calls the layer "
            "twice, compile both calls in one graph, or not at all; give a copy of a layer other bits with set_seed"
        )
    # The first call's key is the layer's own: no sum, and two kernels fewer.
    return _draws(seeds, position, number) if number else torch.cat((seeds.to(position.device)[1:], position))


def _fake(seeds, position, number):
    return position.new_empty(4)


# An op, because it must run whenever the graph does.
_rounding_draws = define_op(
    "rounding_draws(Tensor seeds, Tensor position, int number) -> Tensor", _compiled_draws, _fake
)
