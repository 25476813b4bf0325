"""The random bits of stochastic rounding: the position in training that they are drawn for.

A position is step, microbatch and rank. It is a tensor, so that one compiled graph serves all steps. A new step gets a
new tensor: a backward still uses the position that its forward saved. A layer that is called twice at one position
draws the same bits for both calls.
"""

from numbers import Integral

import torch

_WORD = 2**32
# Largest matrix with random bits. Four elements share one draw, and the index of a draw must fit in 32 bits.
MAX_ELEMENTS = 4 * _WORD


# Device type -> int64 [3] (step, microbatch, rank). Empty until a step is set.
_position: dict[str, torch.Tensor] = {}
# Step, microbatch and rank as set by ``set_rounding_step``. Empty until then.
_numbers: list[int] = []


def set_rounding_step(step: int | None, microbatch: int = 0, rank: int | None = None) -> None:
    """Set the step, and with gradient accumulation the microbatch, of the next forward.

    Call it before every forward, as ``mxtrain.train`` does: a resumed run then repeats the random bits of every step.
    Without any call, each forward draws a random step from PyTorch's default generator. After a call, the position
    stays, and further calls of a layer draw the same bits.

    Args:
        step: from 0 to 2^32 - 1; None removes the position, and forwards draw from the generator again.
        microbatch: number of the forward within the step.
        rank: number that differs between processes with different data; None for the rank in the default process
            group.

    Raises:
        ValueError: for anything but an integer that fits in 32 bits.
    """
    if step is None:
        _position.clear()
        _numbers.clear()
        return
    _numbers[:] = _set(step, microbatch, _default_rank() if rank is None else rank)


def set_rounding_chunk(chunk: int, chunks: int) -> None:
    """Set the chunk of the next forward, in a pipeline that splits the microbatch of ``set_rounding_step`` into chunks.

    A chunk of a microbatch is then a microbatch of its own: number ``microbatch * chunks + chunk``. Does nothing while
    no step is set.
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
