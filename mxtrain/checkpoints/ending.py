"""What ends training before its last step: NaN or infinite losses, weights or optimizer states, or a stop signal.

Every step ends with one small reduction: the loss of every rank and the signal that it has got, so that all ranks see
the same and stop after the same step. On a GPU the result is copied without waiting, and read one step later: the GPU
then has the next step's work in its queue.
"""

import logging
import math
import os
import shlex
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from mxtrain.checkpoints.start import latest_checkpoint
from mxtrain.launched import START_VARIABLE, stop_signals

STOP, CONTINUE = "stop", "continue"
SETTING = "metrics.on_nonfinite_loss"
SHOWN_RANKS = 8


class NonFiniteError(RuntimeError):
    """Something is NaN or infinite, and training stops. The message is for the user, without a traceback.

    It is the ``loss`` of ``step``, summed over ranks, or after this step ``what``: "weights" or "optimizer states".
    """

    def __init__(self, message: str, step: int, loss: float | None = None, what: str = ""):
        super().__init__(message)
        self.step, self.loss, self.what = step, loss, what


class LossWatch:
    """Looks at the loss of every step and of every rank, and at the stop signals that the ranks have got.

    With ``stops`` it raises NonFiniteError; otherwise it warns, and again only after a finite loss. ``stop_signal`` is
    the first stop signal that ``look`` has read, the same at the same step on all ranks, or None.
    """

    def __init__(self, device: torch.device, stops: bool):
        self.device = device
        self.stops = stops
        self.was_finite = True
        self.stop_signal: signal.Signals | None = None
        # Steps, and numbers on their way to the host: [world size, 2], loss and signal of every rank.
        self._copies: list[tuple[int, torch.Tensor, torch.cuda.Event | None]] = []

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
        self._copies.append((step, values, event))

    def look(self, at_last_step: bool) -> None:
        """Read what was recorded; the last step only if asked, because reading it waits for the device.

        Raises NonFiniteError, on all ranks, for a loss that is NaN or infinite.
        """
        count = len(self._copies) if at_last_step else len(self._copies) - 1
        for _ in range(count):
            step, copied, event = self._copies.pop(0)
            if event is not None:
                event.synchronize()
            values, signals = copied.T.tolist()
            if self.stop_signal is None and any(signals):
                self.stop_signal = signal.Signals(int(max(signals)))
            is_finite = all(map(math.isfinite, values))
            if not is_finite and self.was_finite:
                found = f"step {step}: the loss is {describe(values)}"
                self.end(NonFiniteError(found, step, sum(values)))
            self.was_finite = is_finite

    def end(self, error: NonFiniteError, otherwise: str = f'training goes on ({SETTING} = "{CONTINUE}")') -> None:
        """Raise ``error``, or warn of it and of what happens instead."""
        if self.stops:
            raise error
        logging.getLogger(__name__).warning(f"{error}; {otherwise}")


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
    """Name the values that are not finite and their ranks: "nan on rank 0, inf on rank 1"."""
    found = [f"{value} on rank {rank}" for rank, value in enumerate(values) if not math.isfinite(value)]
    more = f" and {len(found) - SHOWN_RANKS} more" if len(found) > SHOWN_RANKS else ""
    return ", ".join(found[:SHOWN_RANKS]) + more


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class StopSignals:
    """The handlers for stop signals. ``received`` is the number of the first signal since ``install``, or 0."""

    def __init__(self):
        self.received = 0
        self._earlier: dict[signal.Signals, object] = {}

    def install(self) -> None:
        """Note signals from now on. Does nothing after the first time."""
        if self._earlier:
            return
        for number in stop_signals():
            self._earlier[number] = signal.signal(number, self._note)
            # System calls that the signal interrupts, in libraries that may not expect it, go on by themselves.
            signal.siginterrupt(number, False)

    def ignore(self) -> None:
        """Ignore signals until this process ends. Slurm's reaches both the worker and the launcher, which passes it on.

        The handlers above would not do: Python removes them before the process has ended.
        """
        for number in self._earlier:
            signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Put back the handlers from before ``install``."""
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier.clear()

    def _note(self, number: int, frame: object) -> None:
        self.received = self.received or number


@dataclass(frozen=True)
class Stop:
    """A signal stopped training after this step."""

    signal: signal.Signals
    step: int
    is_saved: bool

    def describe(self, folder: Path, checkpoint) -> str:
        """Return a line for the user: which signal, after which step, and how to resume the run in ``folder``."""
        stopped = f"stopped by {self.signal.name} after step {self.step}, which is"
        if self.is_saved:
            return f"{stopped} saved; resume with: {resume_command(folder)}"
        if not checkpoint.enable:
            return f"{stopped} not saved: checkpoint.enable is false"
        if checkpoint.load_only:
            return f"{stopped} not saved: checkpoint.load_only is true"
        last = latest_checkpoint(folder, checkpoint)
        resume = f"; resume from {last} with: {resume_command(folder)}" if last else ""
        return f"{stopped} not saved: its weights are not finite{resume}"


def resume_command(folder: Path) -> str:
    """Return the command that resumes the run in ``folder``, for the shell, with the launcher of this process."""
    run = shlex.quote(str(folder))
    if START_VARIABLE in os.environ:
        return f"mxtrain train --resume {run}"
    return f"torchrun ... -m mxtrain.train --resume {run}"
