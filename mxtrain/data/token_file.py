"""Token ids in files, each with a hash that every machine compares once."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from mxtrain.data.verified import fact, facts_beside, remember
from mxtrain.errors import ConfigError
from mxtrain.files import hash_file


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
        """See ``verified.fact``."""
        return fact(self.path, f"{self.sha256}@{self.start}" if self.start else self.sha256)

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
