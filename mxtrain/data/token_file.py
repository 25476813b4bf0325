"""Token ids in files. Every machine reads a file once for its hash, and remembers that it was right.

A line of the file ``verified`` beside the prepared texts stands for a machine and a file's path, size, time and hash.
The file is in the user's own cache where others own the folder of the texts.
"""

import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from mxtrain.errors import ConfigError
from mxtrain.files import cache_folder, hash_file

RECORD = "verified"


@dataclass(frozen=True)
class TokenFile:
    """Token ids in a file or a part of it, or in several shards, which follow each other."""

    path: Path
    """The file, or that of the first shard"""
    dtype: str
    """In prepared text "<u2" if it holds the largest id, else "<u4\""""
    count: int
    """Number of tokens"""
    sha256: str = ""
    """SHA-256 of the tokens' bytes, in hexadecimal digits; of shards, that of their hashes"""
    start: int = 0
    """Number of tokens before them in the file"""
    shards: tuple["TokenFile", ...] = ()

    @classmethod
    def of(cls, shards: list["TokenFile"]) -> "TokenFile":
        """Return the tokens of shards."""
        if len(shards) == 1:
            return shards[0]
        digest = sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()
        count = sum(shard.count for shard in shards)
        return cls(shards[0].path, shards[0].dtype, count, digest, shards=tuple(shards))

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.count * np.dtype(self.dtype).itemsize

    @property
    def span(self) -> tuple[int, int]:
        """The places in the file where the bytes begin and end."""
        begin = self.start * np.dtype(self.dtype).itemsize
        return begin, begin + self.size

    @property
    def files(self) -> tuple["TokenFile", ...]:
        """The shards, or the one file."""
        return self.shards or (self,)

    @property
    def fact(self) -> str:
        """The line that says that the tokens have their hash. Raises OSError."""
        status, expected = self.path.stat(), f"{self.sha256}@{self.start}" if self.start else self.sha256
        file = str(self.path.absolute()), str(status.st_size), str(status.st_mtime_ns)
        words = [socket.gethostname(), *file, expected]
        return sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()

    def is_intact(self) -> bool:
        """Read the file for its hash. Raises OSError."""
        return hash_file(self.path, *self.span).sha256 == self.sha256

    def open(self) -> "np.ndarray | Shards":
        """Return the tokens as a read-only array [count], or as ``Shards``, which can be sliced like it."""
        if self.shards:
            return Shards(self.shards)
        if self.count == 0:  # an empty file cannot be mapped
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, mode="r", offset=self.span[0], shape=(self.count,))


class Shards:
    """The tokens of files that follow each other. A file's hash is compared before its first use on this machine."""

    def __init__(self, files: tuple[TokenFile, ...]):
        # Opened now: the files may be removed from the cache.
        self._files, self._opened = files, [file.open() for file in files]
        self._facts = [file.fact for file in files]
        self._ends = np.cumsum([file.count for file in files])
        self._seen = set()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return the tokens of a slice without a step. Raises ConfigError if a file is damaged."""
        start, stop, _ = part.indices(len(self))
        parts, number = [], int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end, content = int(self._ends[number]), self._intact(number)
            begin = start - (end - len(content))
            parts.append(content[begin : begin + stop - start])
            start, number = min(stop, end), number + 1
        return np.concatenate(parts) if parts else self._opened[0][:0]

    def _intact(self, number: int) -> np.ndarray:
        content, file = self._opened[number], self._files[number]
        if number not in self._seen and self._facts[number] not in facts_beside(file.path.parent):
            if sha256(content).hexdigest() != file.sha256:
                raise ConfigError(
                    f"the prepared text {file.path.parent} is damaged: the contents of {file.path.name} have changed; "
                    f"'mxtrain cache --remove {file.path.parent.name}' lets the next start prepare it again"
                )
            remember(file.path.parent, [self._facts[number]])
        self._seen.add(number)
        return content


def facts_beside(folder: Path) -> set[str]:
    """Return the lines about the prepared text in ``folder``, and about others."""
    found = set()
    for record in _records(folder):
        with suppress(OSError):
            found.update(record.read_text(errors="replace").split())
    return found


def remember(folder: Path, facts: Iterable[str]) -> None:
    """Add lines about the prepared text in ``folder``. Where none can be written, the files are read again."""
    for record in _records(folder):
        with suppress(OSError), record.open("a") as file:
            file.write("".join(f"{fact}\n" for fact in facts))  # lines of processes that write at once stay whole
            return


def _records(folder: Path) -> list[Path]:
    records = [folder.parent / RECORD]
    with suppress(ConfigError):  # a user without a home
        records.append(cache_folder() / RECORD)
    return records
