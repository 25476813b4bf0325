"""Reads Python source code as training text: the standard library and, optionally, every installed package.

It is real text that is on every machine and needs no network. A file's key is its path relative to its root
("stdlib/json/decoder.py", "site-packages/six.py"), so order and split are the same on every machine, wherever the roots
lie.
"""

import os
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from mxtrain.data.config import DataConfig
from mxtrain.data.documents import OVER_LIMIT, Document, fraction

PACKAGE_FOLDERS = ("site-packages", "dist-packages")

PACKAGE_SHARE = 0.2
"""Largest share of the text from one package"""

# Generated tables and bindings compress to 0.05-0.14 of their size at zlib's level 1; of 12,277 installed files 1.3 %
# are below 0.17. Level 6 also finds distant repeats and would drop hand-written modules: torch/nn/modules/conv.py has
# 0.13 at level 6 and 0.17 at level 1. Smaller files are kept: a short list of imports may compress as well as a table.
MACHINE_MADE_RATIO, MACHINE_MADE_LEVEL, MACHINE_MADE_FROM_BYTES = 0.17, 1, 4096


class SourceFile(NamedTuple):
    key: str
    path: str
    size: int
    mtime_ns: int

    @property
    def package(self) -> str | None:
        """Top-level folder or module in site-packages; None for the standard library."""
        root, first, *_ = self.key.split("/")
        return None if root == "stdlib" else first.removesuffix(".py")


class PythonSource:
    """The Python files of this machine, with the attributes of ``LocalFiles``."""

    has_ids, token_files = False, []

    def __init__(self, config: DataConfig):
        self._config = config
        self._files = list_files(config.installed)
        self.listing = [(file.path, file.size, file.mtime_ns) for file in self._files]
        self.dropped = Counter()

    @cached_property
    def _kept(self) -> list[SourceFile]:
        # Sorted by a hash of the key, so that files that two machines share have the same relative order on both.
        order = f"order {self._config.seed}"
        files, seen, total, limit = [], set(), 0, self._config.max_bytes
        for file in sorted(self._files, key=lambda file: (fraction(file.key, order), file.path)):
            if limit and total + file.size > limit:
                self.dropped[OVER_LIMIT] += 1
            elif reason := _reason_to_drop(file, seen):
                self.dropped[reason] += 1
            else:
                files.append(file)
                total += file.size
        kept = cap_packages(files)
        self.dropped["over the package share"] = len(files) - len(kept)
        return kept

    def documents(self) -> Iterator[Document]:
        for file in self._kept:
            yield Document(file.key, Path(file.path).read_bytes().decode())


def list_files(installed: bool) -> list[SourceFile]:
    """List every ``.py`` file of the standard library and, if ``installed``, of the packages on ``sys.path``."""
    roots = [("stdlib", Path(sysconfig.get_paths()["stdlib"]))]
    if installed:
        folders = (Path(entry).resolve() for entry in sys.path if Path(entry).name in PACKAGE_FOLDERS)
        roots += [("site-packages", folder) for folder in dict.fromkeys(folders)]
    files = []
    for prefix, root in roots:
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(name for name in subfolders if name not in PACKAGE_FOLDERS)
            for path in (os.path.join(folder, name) for name in sorted(names) if name.endswith(".py")):
                if os.path.isfile(path):  # no link to nothing
                    key, status = prefix + path.removeprefix(str(root)), os.stat(path)
                    files.append(SourceFile(key, path, status.st_size, status.st_mtime_ns))
    return files


def _reason_to_drop(file: SourceFile, seen: set[bytes]) -> str:
    """Return why a file is left out, or "". ``seen`` gets the hash of its content."""
    try:
        content = Path(file.path).read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return "unreadable"
    digest = sha256(content).digest()
    is_duplicate = digest in seen
    seen.add(digest)
    if not content.strip():
        return "empty"
    return "duplicate" if is_duplicate else "machine-made" if is_machine_made(content) else ""


def is_machine_made(content: bytes) -> bool:
    """Return whether a file compresses so well that it is probably a generated table or one repeated pattern."""
    limit = MACHINE_MADE_RATIO * len(content)
    return len(content) >= MACHINE_MADE_FROM_BYTES and len(zlib.compress(content, MACHINE_MADE_LEVEL)) < limit


def cap_packages(files: list[SourceFile], share: float = PACKAGE_SHARE) -> list[SourceFile]:
    """Drop files until no package supplies more than ``share`` of the remaining bytes. Never cuts the standard library.

    A package over the limit (``package_limit``) keeps, in order, the files that still fit. Whole files rarely fill the
    limit exactly, so the total shrinks and the limit with it: the loop repeats until every package is within the limit.
    """
    limit = float("inf")
    while True:
        kept, sizes = [], Counter()
        for file in files:
            if file.package is None or sizes[file.package] + file.size <= limit:
                kept.append(file)
                sizes[file.package] += file.size
        packages = [size for name, size in sizes.items() if name is not None]
        files, limit = kept, package_limit(sizes[None], packages, share)
        if max(packages, default=0) <= limit:
            return kept


def package_limit(standard: int, sizes: list[int], share: float) -> float:
    """Return the largest c with c <= share * (standard + sum(min(size, c) for size in sizes)), in bytes.

    If the k largest packages are cut to c, then c = share * (standard + rest + k * c).
    """
    sizes = sorted(sizes, reverse=True)
    for count, size in enumerate([*sizes, 0]):
        limit = share * (standard + sum(sizes[count:])) / (1 - count * share)
        if size <= limit:  # at the latest before count * share reaches 1
            return limit
