"""Progress as plain lines, so that it is seen in logs as well as on a terminal."""

import time
from collections.abc import Callable


class Progress:
    """Passes lines on to ``emit``: all that are ``say``-d, and of those ``tick``-ed one per ``every`` seconds."""

    def __init__(self, emit: Callable[[str], None], every: float = 2.0):
        self._emit = emit
        self._every = every
        self._last = time.monotonic()

    def say(self, line: str) -> None:
        self._last = time.monotonic()
        self._emit(line)

    def tick(self, line: Callable[[], str]) -> None:
        if time.monotonic() - self._last >= self._every:
            self.say(line())


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
