"""Reads Python source code as training text: the standard library and, optionally, every installed package.

Python source is real text that is on every machine and needs no network. With ``data.other_files``, C and C++ source,
documentation and manual pages come to it. ``machine_files.py`` lists the files.
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from hashlib import sha256

from mxtrain.data.config import DataConfig
from mxtrain.data.documents import OVER_LIMIT, Document, FileEntry, fraction
from mxtrain.data.machine_files import MAX_FILE_BYTES, SourceFile, has_control_characters, list_files, read_bytes
from mxtrain.data.progress import Progress, megabytes
from mxtrain.errors import ConfigError

# Generated tables and bindings compress better than hand-written code. At zlib's level 1, character tables and
# protobuf bindings compress to 0.05-0.14 of their size; of 12,277 installed files 1.3 % are below 0.17. The default
# level 6 also finds distant repeats and would drop well-documented hand-written modules: torch/nn/modules/conv.py
# compresses to 0.13 at level 6 and to 0.17 at level 1.
MACHINE_MADE_RATIO = 0.17
MACHINE_MADE_LEVEL = 1
# Smaller files are always kept: a short list of imports may compress as well as a table.
MACHINE_MADE_FROM_BYTES = 4096


class PythonSource:
    """The Python files of this machine, and its other text if asked for. Implements ``Source``.

    ``scan`` raises ConfigError if no file is kept.
    """

    def __init__(self, config: DataConfig):
        self._config = config
        self._files = list_files(config.installed, config.other_files)
        self._kept: list[SourceFile] = []
        self.listing = [FileEntry(file.path, file.size, file.mtime_ns) for file in self._files]
        self.dropped: Counter[str] = Counter()
        self.cut: dict[str, int] = {}
        self.corrections: tuple[str, ...] = ()

    @property
    def text_bytes(self) -> int:
        return sum(file.size for file in self._kept)

    def scan(self, progress: Progress) -> None:
        files, self.dropped = _clean(_shuffled(self._files, self._config.seed), self._config.max_bytes, progress)
        self._kept, self.cut = cap_packages(files, self._config.package_share)
        self.dropped["over the package share"] = len(files) - len(self._kept)
        if not self._kept:
            raise ConfigError(
                f"{self._config.section}.dataset = 'python' found no usable text in {len(self._files):,} files with "
                f"data.max_bytes = {self._config.max_bytes}, data.package_share = {self._config.package_share}"
            )
        progress.say(f"kept {len(self._kept):,} of {len(self._files):,} files, {megabytes(self.text_bytes)}")

    def documents(self) -> Iterator[Document]:
        for file in self._kept:
            try:
                text = read_bytes(file).decode("utf-8")
            except (OSError, UnicodeDecodeError) as error:  # changed since ``scan``
                setting = f"{self._config.section}.dataset = 'python'"
                raise ConfigError(f"{setting}: {file.path} changed while it was read: {error}; try again") from error
            yield Document(file.key, text)


def _shuffled(files: list[SourceFile], seed: int) -> list[SourceFile]:
    # Sort by a hash of the key, so that files that two machines share have the same relative order on both.
    return sorted(files, key=lambda file: (fraction(file.key, f"order {seed}"), file.path))


def _clean(files: list[SourceFile], max_bytes: int, progress: Progress) -> tuple[list[SourceFile], Counter[str]]:
    """Return the readable, distinct, hand-written files that fit into ``max_bytes``, in order; 0 means no limit.

    Also return the number of the other files by reason.
    """
    kept, dropped, seen, total = [], Counter(), set(), 0
    for position, file in enumerate(files):
        progress.tick(lambda position=position: f"read {position:,} of {len(files):,} files")
        if max_bytes and total + file.size > max_bytes:
            dropped[OVER_LIMIT] += 1
            continue
        try:
            content = read_bytes(file)
            if not file.is_python and len(content) > MAX_FILE_BYTES:
                dropped[f"over {megabytes(MAX_FILE_BYTES)}"] += 1
                continue
            content.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            dropped["unreadable"] += 1
            continue
        digest = sha256(content).digest()
        if max_bytes and total + len(content) > max_bytes:  # a compressed file is longer than it seemed
            dropped[OVER_LIMIT] += 1
        elif not file.is_python and has_control_characters(content):
            dropped["not text"] += 1
        elif not content.strip():
            dropped["empty"] += 1
        elif digest in seen:
            dropped["duplicate"] += 1
        elif is_machine_made(content):
            dropped["machine-made"] += 1
        else:
            kept.append(file._replace(size=len(content)))
            total += len(content)
        seen.add(digest)
    return kept, dropped


def is_machine_made(content: bytes) -> bool:
    """Return whether a file compresses so well that it is probably a generated table or one repeated pattern."""
    if len(content) < MACHINE_MADE_FROM_BYTES:
        return False
    return len(zlib.compress(content, MACHINE_MADE_LEVEL)) < MACHINE_MADE_RATIO * len(content)


def cap_packages(files: list[SourceFile], share: float) -> tuple[list[SourceFile], dict[str, int]]:
    """Drop files until no package supplies more than ``share`` of the remaining bytes.

    The standard library is never cut. A package over the limit (``package_limit``) keeps, in order, the files that
    still fit. Whole files rarely fill the limit exactly, so the total shrinks and the limit with it: the loop
    repeats until every package is within the limit.

    Returns:
        The kept files in their original order, and the bytes cut from each package that was cut.
    """
    packages = defaultdict(list)
    for file in files:
        packages[file.package].append(file)
    standard = sum(file.size for file in packages.pop(None, []))
    before = {name: _bytes(members) for name, members in packages.items()}
    while True:
        sizes = {name: _bytes(members) for name, members in packages.items()}
        limit = package_limit(standard, list(sizes.values()), share)
        over = [name for name, size in sizes.items() if size > limit]
        if not over:
            break
        for name in over:
            packages[name] = _fitting(packages[name], limit)
    kept = {file.path for members in packages.values() for file in members}
    cut = {name: before[name] - size for name, size in sizes.items() if size < before[name]}
    return [file for file in files if file.package is None or file.path in kept], cut


def package_limit(standard: int, sizes: list[int], share: float) -> float:
    """Return the largest c with c <= share * (standard + sum(min(size, c) for size in sizes)), in bytes.

    If the k largest packages are cut to c, then c = share * (standard + rest + k * c). The limit is 0 if there is
    no standard library and fewer than 1 / share packages.
    """
    sizes = sorted(sizes, reverse=True)
    for count in range(len(sizes) + 1):
        if count * share >= 1:
            break
        limit = share * (standard + sum(sizes[count:])) / (1 - count * share)
        if count == len(sizes) or sizes[count] <= limit:
            return limit
    return float("inf")


def _fitting(files: list[SourceFile], limit: float) -> list[SourceFile]:
    kept, total = [], 0
    for file in files:
        if total + file.size <= limit:
            kept.append(file)
            total += file.size
    return kept


def _bytes(files: list[SourceFile]) -> int:
    return sum(file.size for file in files)
