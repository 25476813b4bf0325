"""Stops training, or warns, when losses, weights or optimizer states are NaN or infinite; stops it at a stop signal.

Every step ends with one small reduction: the loss of every rank and the signal that it has got, so that all ranks see
the same and stop together. On a GPU the result is copied without waiting, and read one step later: the GPU then has
the next step's work in its queue.
"""

import math
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torchtitan.tools.logging import logger

STOP, CONTINUE = "stop", "continue"
SETTING = "metrics.on_nonfinite_loss"
SHOWN_RANKS = 8


class NonFiniteError(RuntimeError):
    """Something is NaN or infinite, and training stops. The message is for the user, without a traceback.

    Args:
        step: the step whose loss is not finite, or after which something else is not.
        loss: the sum of this loss over ranks; None for anything else.
        what: "weights" or "optimizer states"; empty for a loss.
    """

    def __init__(self, message: str, step: int, loss: float | None = None, what: str = ""):
        super().__init__(message)
        self.step, self.loss, self.what = step, loss, what


@dataclass(frozen=True)
class _Copy:
    """Numbers on their way from the device to the host: [world size, 2], loss and signal of every rank."""

    step: int
    values: torch.Tensor
    event: torch.cuda.Event | None

    def read(self) -> tuple[list[float], list[float]]:
        if self.event is not None:
            self.event.synchronize()
        return self.values[:, 0].tolist(), self.values[:, 1].tolist()


class LossWatch:
    """Looks at the loss of every step and of every rank, and at the stop signals that the ranks have got.

    Args:
        device: where the losses are.
        stops: raise NonFiniteError; otherwise warn, and again only after a finite loss.

    Attributes:
        stop_signal: the first stop signal that ``look`` has read, the same at the same step on all ranks, or None.
        on_losses: (step, loss of every rank) is called for every step that ``look`` reads; None for no call.
    """

    on_losses: Callable[[int, list[float]], None] | None = None

    def __init__(self, device: torch.device, stops: bool):
        self.device = device
        self.stops = stops
        self.was_finite = True
        self.stop_signal: signal.Signals | None = None
        self._copies: list[_Copy] = []

    @torch.no_grad()
    def record(self, step: int, losses: list[torch.Tensor], received: int = 0) -> None:
        """Send the sum of ``losses``, scalars of the microbatches of ``step``, on its way to the host.

        ``received`` is the number of the stop signal that this rank has got, or 0.
        """
        loss = torch.stack([_local(loss) for loss in losses]).float().sum()
        values = over_ranks(torch.stack([loss, torch.full_like(loss, received)]))
        event = None
        if self.device.type == "cuda":
            values = values.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._copies.append(_Copy(step, values, event))

    def look(self, at_last_step: bool) -> None:
        """Read what was recorded; the last step only if asked, because reading it waits for the device.

        Raises NonFiniteError, on all ranks, for a loss that is NaN or infinite.
        """
        count = len(self._copies) if at_last_step else len(self._copies) - 1
        for _ in range(count):
            copy = self._copies.pop(0)
            values, signals = copy.read()
            if self.stop_signal is None and any(signals):
                self.stop_signal = signal.Signals(int(max(signals)))
            is_finite = all(map(math.isfinite, values))
            if not is_finite and self.was_finite:
                found = f"step {copy.step}: the loss is {describe(values)}"
                self.end(NonFiniteError(found, copy.step, sum(values)))
            self.was_finite = is_finite
            if self.on_losses is not None:
                self.on_losses(copy.step, values)

    def end(self, error: NonFiniteError, otherwise: str = f'training goes on ({SETTING} = "{CONTINUE}")') -> None:
        """Raise ``error``, or warn of it and of what happens instead."""
        if self.stops:
            raise error
        logger.warning(f"{error}; {otherwise}")


@torch.no_grad()
def nonfinite(groups: Mapping[str, Iterable[torch.Tensor]], device: torch.device) -> tuple[str, str] | None:
    """Return the first group with a NaN or infinity, and its ranks, such as ("weights", "nan on rank 3"), or None.

    Every rank looks at its own shards, and all ranks get the same answer. Waits for the device.
    """
    values = over_ranks(torch.stack([_sum_of_largest(tensors, device) for tensors in groups.values()]))
    found = zip(groups, map(describe, values.T.tolist()), strict=True)
    return next(((name, where) for name, where in found if where), None)


def _sum_of_largest(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of the largest magnitudes, which is NaN or infinite if and only if an element is."""
    shards = [shard for shard in map(_local, tensors) if shard.is_floating_point() and shard.numel() > 0]
    largest = [torch.linalg.vector_norm(shard, math.inf).to(device, torch.float64) for shard in shards]
    return torch.stack([torch.zeros((), device=device, dtype=torch.float64), *largest]).sum()


def over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Return this tensor of every rank, [world size, ...]."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return value.unsqueeze(0)
    values = value.new_zeros(torch.distributed.get_world_size(), *value.shape)
    values[torch.distributed.get_rank()] = value
    torch.distributed.all_reduce(values)  # adds zeros, and 0 + NaN is NaN
    return values


def describe(values: list[float]) -> str:
    """Name the values that are not finite and their ranks: "nan on ranks 0, 3, inf on rank 1"."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if not math.isfinite(value):
            ranks.setdefault(str(value), []).append(rank)
    return ", ".join(f"{value} on {_ranks(where)}" for value, where in ranks.items())


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN_RANKS]))
    more = f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
