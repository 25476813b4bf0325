"""Documents, their sources, and the hashes that order, split and sample them.

The hashes depend on document keys alone, so every machine gets the same order, split and sample.
"""

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple, Protocol

from mxtrain.data.progress import Progress

OVER_LIMIT = "over max_bytes"
"""The reasons for which a source leaves out what does not fit into ``DataConfig.max_bytes`` begin with this"""


class Document(NamedTuple):
    key: str
    """What the hashes go by. Python source: the path relative to its root, with "/" on every platform. Files: the
    text itself, because the same text may stand in several files and rows"""

    text: str

    file: str = ""
    """If this is not empty, it decides instead of the key whether the document is held out"""


class FileEntry(NamedTuple):
    """A source file in the cache key. An edit changes its size or its time."""

    path: str
    size: int
    mtime_ns: int


class Source(Protocol):
    """Text on this machine. It can be read more than once."""

    listing: list[FileEntry]
    """All files found, before any is read"""

    dropped: Counter[str]
    """Number of files or documents left out, by reason"""

    cut: dict[str, int]
    """Bytes cut from each package that exceeded its share"""

    corrections: tuple[str, ...]
    """What earlier versions read otherwise, in the cache's key"""

    @property
    def text_bytes(self) -> int:
        """Estimated bytes of all documents. Call ``scan`` first."""

    def scan(self, progress: Progress) -> None:
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
