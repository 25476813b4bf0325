"""A document, where documents come from, and the hashes that order, split and sample them alike on every machine."""

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple, Protocol

from mxtrain.data.progress import Progress


class Document(NamedTuple):
    key: str
    """Where the text came from, relative to its root, with "/" on every platform"""

    text: str


class FileEntry(NamedTuple):
    """One source file as the cache key sees it: an edit changes its size or its time."""

    path: str
    size: int
    mtime_ns: int


class Source(Protocol):
    """Text on this machine, read as often as need be."""

    listing: list[FileEntry]
    """The files, known without reading them"""

    dropped: Counter[str]
    """How many files or documents were left out, by reason"""

    cut: dict[str, int]
    """Bytes of text cut from each package that was over its share"""

    @property
    def text_bytes(self) -> int:
        """About how much text ``documents`` yields; known after ``scan``."""

    def scan(self, progress: Progress) -> None:
        """Settle what is kept. Called once, before ``documents``."""

    def documents(self) -> Iterator[Document]:
        """All documents, in an order that the config alone decides."""


def fraction(key: str, salt: str) -> float:
    """A number in [0, 1) that depends on ``key`` and ``salt`` alone; independent across salts."""
    digest = blake2b(f"{salt}\0{key}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def is_held_out(key: str, validation_share: float) -> bool:
    """Whether the document ``key`` belongs to validation. A larger share keeps the smaller share's documents."""
    return fraction(key, "validation") < validation_share
