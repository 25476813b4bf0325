"""Reads Python source code as training text: the standard library and, optionally, every installed package.

It is real text that is on every machine and needs no network. ``data.other_files`` adds C and C++ source, documentation
and manual pages. A file's key is its path relative to its root ("stdlib/json/decoder.py", "site-packages/six.py",
"include/stdio.h"), so order and split are the same on every machine, wherever the roots lie.
"""

import gzip
import os
import re
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from mxtrain.data.config import DataConfig
from mxtrain.data.documents import OVER_LIMIT, Document, Progress, Source, fraction, megabytes
from mxtrain.errors import ConfigError

PACKAGE_FOLDERS = ("site-packages", "dist-packages")
SYSTEM_FOLDERS = {"include": "/usr/include", "doc": "/usr/share/doc", "man": "/usr/share/man"}
"""Root in a key -> folder of the system's C headers, documentation or manual pages"""

PYTHON = re.compile(r".*\.py", re.DOTALL)
TEXT = re.compile(r".*\.(py|h|hpp|hh|c|cc|cpp|cu|cuh|inc|tcc|pyi|pyx|pxd|md|rst|txt)(\.gz)?", re.DOTALL)
MANUAL_PAGE = re.compile(r"(.*\.)?\d[^.]*(\.gz)?", re.DOTALL)  # "ls.1.gz", "printf.3posix"
MAX_FILE_BYTES = 1_000_000
"""Size limit of files other than Python source: longer ones are tables, dictionaries and logs"""

CONTROL_CHARACTERS = bytes(set(range(32)) - set(b"\t\n\r\f\v\x1b"))
"""Bytes that no text has; a form feed divides pages, and an escape colors them"""

# Generated tables and bindings compress to 0.05-0.14 of their size at zlib's level 1; of 12,277 installed files 1.3 %
# are below 0.17. Level 6 also finds distant repeats and would drop hand-written modules: torch/nn/modules/conv.py has
# 0.13 at level 6 and 0.17 at level 1. Smaller files are kept: a short list of imports may compress as well as a table.
MACHINE_MADE_RATIO, MACHINE_MADE_LEVEL, MACHINE_MADE_FROM_BYTES = 0.17, 1, 4096

UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError)


class SourceFile(NamedTuple):
    key: str
    path: str
    size: int
    mtime_ns: int

    @property
    def package(self) -> str | None:
        """Top-level folder or module in site-packages or in a folder of the system; None for the standard library."""
        root, first, *_ = self.key.split("/")
        return None if root == "stdlib" else first.removesuffix(".py")

    @property
    def is_python(self) -> bool:
        return self.key.endswith(".py")

    def read(self) -> bytes:
        """Return the content, decompressed: of Python source all, else at most MAX_FILE_BYTES + 1. Raises UNREADABLE"""
        with (gzip.open if self.path.endswith(".gz") else open)(self.path, "rb") as opened:
            return opened.read(-1 if self.is_python else MAX_FILE_BYTES + 1)


class PythonSource(Source):
    """The Python files of this machine, and its other text if asked for. ``scan`` raises ConfigError for no text."""

    def __init__(self, config: DataConfig):
        self._config = config
        self._setting = f"{config.section}.dataset = 'python'"
        self._files = list_files(config.installed, config.other_files)
        self.listing = [(file.path, file.size, file.mtime_ns) for file in self._files]

    def scan(self, progress: Progress) -> None:
        config = self._config
        # Sorted by a hash of the key, so that files that two machines share have the same relative order on both.
        files = sorted(self._files, key=lambda file: (fraction(file.key, f"order {config.seed}"), file.path))
        files, self.dropped = _clean(files, config.max_bytes, progress)
        self._kept, self.cut = cap_packages(files, config.package_share)
        self.dropped["over the package share"] = len(files) - len(self._kept)
        self.text_bytes = sum(file.size for file in self._kept)
        if not self._kept:
            raise ConfigError(
                f"{self._setting} found no usable text in {len(self._files):,} files with "
                f"data.max_bytes = {config.max_bytes}, data.package_share = {config.package_share}"
            )
        progress.say(f"kept {len(self._kept):,} of {len(self._files):,} files, {megabytes(self.text_bytes)}")

    def documents(self) -> Iterator[Document]:
        for file in self._kept:
            try:
                text = file.read().decode()
            except UNREADABLE as error:
                problem = f"{file.path} changed while it was read: {error}; try again"
                raise ConfigError(f"{self._setting}: {problem}") from error
            yield Document(file.key, text)


def list_files(installed: bool, other_files: bool = False) -> list[SourceFile]:
    """List every ``.py`` file of the standard library, and if asked for, of the packages on ``sys.path``.

    ``other_files`` adds the C, C++ and CUDA source, type stubs and documentation in these folders, and the system's
    headers, documentation and manual pages.
    """
    names = TEXT if other_files else PYTHON
    roots = [("stdlib", Path(sysconfig.get_paths()["stdlib"]), names)]
    if installed:
        folders = (Path(entry).resolve() for entry in sys.path if Path(entry).name in PACKAGE_FOLDERS)
        roots += [("site-packages", folder, names) for folder in dict.fromkeys(folders)]
    if other_files:
        system = SYSTEM_FOLDERS.items()
        roots += [(root, Path(folder), MANUAL_PAGE if root == "man" else TEXT) for root, folder in system]
    return [file for root in roots for file in _walk(*root)]


def _walk(prefix: str, root: Path, wanted: re.Pattern) -> Iterator[SourceFile]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in PACKAGE_FOLDERS)
        for path in (os.path.join(folder, name) for name in sorted(names) if wanted.fullmatch(name)):
            if os.path.isfile(path):  # no link to nothing
                status = os.stat(path)
                yield SourceFile(prefix + path.removeprefix(str(root)), path, status.st_size, status.st_mtime_ns)


def _clean(files: list[SourceFile], max_bytes: int, progress: Progress) -> tuple[list[SourceFile], Counter[str]]:
    """Return the readable, distinct, hand-written files that fit into ``max_bytes``, in order; 0 means no limit.

    Also return the number of the other files by reason.
    """
    kept, dropped, seen, total = [], Counter(), set(), 0
    for position, file in enumerate(files):
        progress.tick(lambda position=position: f"read {position:,} of {len(files):,} files")
        content, reason = b"", OVER_LIMIT
        if not max_bytes or total + file.size <= max_bytes:  # else it is not even read
            try:
                content = file.read()
                room = max_bytes - total if max_bytes else None  # a compressed file is longer than its size on disk
                reason = _reason_to_drop(content, file.is_python, room, seen)
            except UNREADABLE:
                reason = "unreadable"
        if reason:
            dropped[reason] += 1
        else:
            kept.append(file._replace(size=len(content)))
            total += len(content)
    return kept, dropped


def _reason_to_drop(content: bytes, is_python: bool, room: int | None, seen: set[bytes]) -> str:
    """Return why a file is left out, or "". ``seen`` gets the hash of its content. Raises UnicodeDecodeError."""
    if not is_python and len(content) > MAX_FILE_BYTES:
        return f"over {megabytes(MAX_FILE_BYTES)}"
    content.decode()
    digest = sha256(content).digest()
    is_duplicate = digest in seen
    seen.add(digest)
    if room is not None and len(content) > room:
        return OVER_LIMIT
    if not is_python and content.translate(None, CONTROL_CHARACTERS) != content:  # a font, an archive
        return "not text"
    if not content.strip():
        return "empty"
    return "duplicate" if is_duplicate else "machine-made" if is_machine_made(content) else ""


def is_machine_made(content: bytes) -> bool:
    """Return whether a file compresses so well that it is probably a generated table or one repeated pattern."""
    limit = MACHINE_MADE_RATIO * len(content)
    return len(content) >= MACHINE_MADE_FROM_BYTES and len(zlib.compress(content, MACHINE_MADE_LEVEL)) < limit


def cap_packages(files: list[SourceFile], share: float) -> tuple[list[SourceFile], dict[str, int]]:
    """Drop files until no package supplies more than ``share`` of the remaining bytes. Never cuts the standard library.

    A package over the limit (``package_limit``) keeps, in order, the files that still fit. Whole files rarely fill the
    limit exactly, so the total shrinks and the limit with it: the loop repeats until every package is within the limit.
    Returns the kept files in their order, and the bytes cut from each package that was cut.
    """
    kept, limit, before = files, float("inf"), None
    while True:
        fitting, sizes = [], Counter()
        for file in kept:
            if file.package is None or sizes[file.package] + file.size <= limit:
                fitting.append(file)
                sizes[file.package] += file.size
        kept, before = fitting, before or sizes
        packages = [size for name, size in sizes.items() if name is not None]
        limit = package_limit(sizes[None], packages, share)
        if max(packages, default=0) <= limit:
            return kept, {name: size - sizes[name] for name, size in before.items() if sizes[name] < size}


def package_limit(standard: int, sizes: list[int], share: float) -> float:
    """Return the largest c with c <= share * (standard + sum(min(size, c) for size in sizes)), in bytes.

    If the k largest packages are cut to c, then c = share * (standard + rest + k * c).
    """
    sizes = sorted(sizes, reverse=True)
    for count in range(len(sizes) + 1):
        if count * share >= 1:
            break
        limit = share * (standard + sum(sizes[count:])) / (1 - count * share)
        if count == len(sizes) or sizes[count] <= limit:
            return limit
    return float("inf")
