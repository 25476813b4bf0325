"""A stop by a signal: training ends after a step, which is saved.

The handlers only note the signal. ``LossWatch`` carries it to all ranks in the reduction that every step does anyway,
so that all ranks stop after the same step, whichever of them got it.
"""

import os
import shlex
import signal
from dataclasses import dataclass
from pathlib import Path

from mxtrain.checkpoints.start import latest_checkpoint
from mxtrain.launched import LAUNCHER_VARIABLE, stop_signals


class StopSignals:
    """The handlers for stop signals in this process.

    Attributes:
        received: number of the first signal since ``install``, or 0.
    """

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
    if LAUNCHER_VARIABLE in os.environ:
        return f"mxtrain train --resume {run}"
    return f"torchrun ... -m mxtrain.train --resume {run}"
