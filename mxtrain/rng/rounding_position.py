"""Where training is, for stochastic rounding: the step, the microbatch and the rank that its random bits are drawn for.

All of it is in tensors, so that compiled graphs serve every step. They are made anew and not changed in place: what a
forward has saved for its backward stays what it was.
"""

from enum import IntEnum

import torch

_WORD = 2**32
# Of a matrix that bits are drawn for: the index of four of them must fit in one word.
MAX_ELEMENTS = 4 * _WORD


class Draws(IntEnum):
    """What is where in the int64 tensor that a layer's random bits follow from."""

    KEY = 0
    STEP = 1
    MICROBATCH = 2
    RANK = 3


# int64 [3] (step, microbatch, rank) by device type; empty until a step is set.
_position: dict[str, torch.Tensor] = {}


def set_rounding_step(step: int | None, microbatch: int = 0, rank: int | None = None) -> None:
    """Say which step (and, with gradient accumulation, which microbatch of it) the next forward belongs to.

    Training loops that resume from checkpoints call this before every forward: the same step then has the same random
    bits. ``mxtrain.train`` does. A loop that never does gets bits that differ from forward to forward too, drawn from
    PyTorch's default generator; but a loop that stops calling it repeats the bits of the last step it named.

    Args:
        step: from 0 to 2^32 - 1; None forgets what was set, and later forwards draw from the generator again.
        microbatch: number of the forward within the step.
        rank: what tells processes apart that see different data; None for the rank in the default process group.

    Raises:
        ValueError: for a number that does not fit in 32 bits.
    """
    if step is None:
        _position.clear()
        return
    numbers = (step, microbatch, _default_rank() if rank is None else rank)
    for name, number in zip(("step", "microbatch", "rank"), numbers):
        if not 0 <= number < _WORD:
            raise ValueError(f"{name} = {number} is not from 0 to {_WORD - 1}")
    for device_type in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        # Numbers filled in by a kernel: a copy would wait for all work queued on the GPU.
        filled = [torch.full((), number, dtype=torch.int64, device=device_type) for number in numbers]
        _position[device_type] = torch.stack(filled)


def position(device: torch.device) -> torch.Tensor:
    """int64 [3] on ``device``: step, microbatch, rank. Without a step that was set, the step is a random number."""
    current = _position.get(device.type)
    if current is not None:
        return current.to(device)
    step = torch.randint(_WORD, (), dtype=torch.int64, device=device)
    return torch.stack((step, torch.zeros_like(step), torch.full_like(step, _default_rank())))


def _default_rank() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if distributed else 0
