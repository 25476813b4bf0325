"""Documents, their sources, the hashes that order, split and sample them, and progress lines.

The hashes depend on document keys alone, so every machine gets the same order, split and sample.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple, Protocol

from mxtrain.errors import ConfigError

OVER_LIMIT = "over max_bytes"
"""The reasons for which a source leaves out what does not fit into ``DataConfig.max_bytes`` begin with this"""
WITHOUT_TEXT = "without text"
"""Reason for leaving out a row: the text column is missing, null or not a string"""

TICK_SECONDS = 2.0


class Document(NamedTuple):
    key: str
    """Input of the hashes. Python source: the path relative to its root, with "/" on every platform. Files: the text
    itself, because the same text may stand in several files and rows"""

    text: str

    split_key: str = ""
    """If not empty, it decides instead of ``key`` whether the document is held out"""

    def is_held_out(self, validation_share: float) -> bool:
        return is_held_out(self.split_key or self.key, validation_share)


class FileEntry(NamedTuple):
    """A source file in the cache key. An edit changes its size or its time."""

    path: str
    size: int
    mtime_ns: int


class Source(Protocol):
    """Text on this machine. It can be read more than once."""

    listing: list[FileEntry]
    """All files found, before any is read"""
    text_bytes: int
    """Estimated bytes of all documents, after ``scan``"""
    dropped: Counter[str]
    """Number of files or documents left out, by reason"""
    cut: dict[str, int]
    """Bytes cut from each package that exceeded its share"""
    corrections: tuple[str, ...]
    """What earlier versions read differently, for the cache key"""

    def scan(self, progress: "Progress") -> None:
        """Decide which files to keep. Called once, before ``documents``."""

    def documents(self) -> Iterator[Document]:
        """Yield all documents, in an order that depends only on the config."""


def fraction(key: str, salt: str) -> float:
    """Hash ``key`` and ``salt`` to a number in [0, 1). Different salts give independent numbers."""
    digest = blake2b(f"{salt}\0{key}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def is_held_out(key: str, validation_share: float) -> bool:
    """Return whether a document belongs to validation. A larger share contains every smaller share."""
    return fraction(key, "validation") < validation_share


class TextColumn:
    """Takes the text out of rows, which are dicts, and counts the rows without text.

    A few bad rows are common in large data. Data without any text are an error.
    """

    def __init__(self, text_key: str):
        self.text_key = text_key
        self.without_text = 0
        self._has_text = False
        self._first_problem = ""

    def text_of(self, row: dict, where: str) -> str | None:
        """Return the text of a row, or None if it has none. ``where`` names the row's file or dataset."""
        text = row.get(self.text_key)
        if isinstance(text, str):
            self._has_text = True
            return text
        self.without_text += 1
        if self.without_text == 1:
            setting, kind = f"data.text_key = {self.text_key!r}", "only null" if text is None else type(text).__name__
            self._first_problem = (
                f"{setting} in {where} holds {kind}, not text"
                if self.text_key in row
                else f"{setting} is not a column of {where}, which has: {', '.join(map(str, row))}"
            )
        return None

    def require_text(self) -> None:
        """Raise ConfigError if there were rows, and none of them had text."""
        if self.without_text and not self._has_text:
            raise ConfigError(self._first_problem)


class Progress:
    """Sends progress as plain lines, which suit both logs and terminals, to ``emit``."""

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


@contextmanager
def raised_as(problem: str) -> Iterator[None]:
    """Turn every error into a ConfigError that begins with ``problem``: networks and readers raise many types."""
    try:
        yield
    except Exception as error:
        raise ConfigError(f"{problem}: {type(error).__name__}: {one_line(error)}") from error
