"""Reports progress and errors as plain lines, which suit both logs and terminals."""

import time
from collections.abc import Callable

TICK_SECONDS = 2.0


class Progress:
    """Sends progress lines to ``emit``."""

    def __init__(self, emit: Callable[[str], None]):
        self._emit = emit
        self._last = time.monotonic()

    def say(self, line: str) -> None:
        """Send ``line``."""
        self._last = time.monotonic()
        self._emit(line)

    def tick(self, line: Callable[[], str]) -> None:
        """Send ``line()`` if the last line is at least TICK_SECONDS old."""
        if time.monotonic() - self._last >= TICK_SECONDS:
            self.say(line())


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line, or the error's type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__
