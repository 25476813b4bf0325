"""Passes stop signals on to the workers, which save and end by themselves (``mxtrain.titan.stop``).

Torchrun's engine would kill workers that take longer than 30 seconds. A large checkpoint does, so ``mxtrain train``
handles the signals in place of the engine and waits for as long as the workers take.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mxtrain.launched import stop_signals

IMPATIENT = (signal.SIGINT, signal.SIGTERM)
"""Signals that a person sends again to end a run at once"""
ECHO_SECONDS = 1.0
"""A signal that arrives again within this time is the same: a terminal or Slurm may send one twice"""


class StoppedAtOnce(Exception):
    """Signal ``number`` ended the workers before they could save, or came before any worker had started."""

    def __init__(self, number: signal.Signals):
        super().__init__(number.name)
        self.number = number


@contextmanager
def stop_signals_to(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Context in which ``handler(number, frame)`` gets the stop signals. The handlers from before return after it."""
    earlier = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, before in earlier.items():
            signal.signal(number, before)


class StopWorkers:
    """Passes every stop signal on to the workers once.

    Attributes:
        received: the first signal, or None.
    """

    def __init__(self):
        self.received: signal.Signals | None = None
        self._is_killing = False
        self._times: dict[int, float] = {}

    def explains(self, statuses: list[int]) -> bool:
        """Return whether workers that ended with these statuses were stopped before they could save.

        A worker that a signal ends, and not an error, was not in training yet. Torchrun's engine then ends the others.
        """
        return self._is_killing or any(-status in self._times for status in statuses)

    def handle(self, number: int, frame: object) -> None:
        """Handle a signal; see ``stop_signals_to``."""
        now = time.monotonic()
        if number not in self._times:
            self._times[number] = now
            self._pass_on(signal.Signals(number))
        elif number in IMPATIENT and now - self._times[number] > ECHO_SECONDS:
            self._is_killing = True
            for worker in _children():
                with suppress(OSError):
                    os.killpg(worker, signal.SIGKILL)  # every worker leads a process group

    def _pass_on(self, number: signal.Signals) -> None:
        workers = _children()
        if self.received is None:
            self.received = number
            say_from_handler(
                f"{number.name}: stopping" + f"; a second {number.name} kills the workers" * (number in IMPATIENT)
            )
            if not workers:
                raise StoppedAtOnce(number)
        for worker in workers:
            with suppress(OSError):  # it may have ended
                os.kill(worker, number)


def _children() -> list[int]:
    """Return the child processes of this process, which are the workers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # "PID (name) state parent ...": a name may hold anything, parentheses too
            parent = path.read_text(errors="replace").rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(path.parent.name))
    return found


def say_from_handler(text: str) -> None:
    """Write a line to stderr, from a signal handler: the interpreter may be in the middle of a print."""
    start = "\n" if os.isatty(2) else ""  # after a worker's status line and the terminal's ^C
    with suppress(OSError):
        os.write(2, f"{start}mxtrain: {text}\n".encode())
