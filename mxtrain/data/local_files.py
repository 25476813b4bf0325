"""Reads local JSONL, Parquet and text files as training text, through the ``datasets`` library.

Documents stay in file order; the data loader shuffles chunks of the tokenized text in each epoch.
Duplicates are kept, because a mixture may repeat a file to give it more weight.
"""

import glob
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mxtrain.data.config import DataConfig
from mxtrain.data.documents import Document, FileEntry
from mxtrain.data.progress import Progress
from mxtrain.errors import ConfigError

FORMATS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}
"""Format by suffix. Files with any other suffix are plain text."""

COMPRESSIONS = (".gz", ".bz2", ".xz")

# Longer text files are cut at line ends into documents of about this size, so that validation can hold out part of
# a single large file. A typical source file or article fits into one document.
PIECE_CHARACTERS = 1 << 16


class LocalFiles:
    """The files that match ``config.path``. Implements ``Source``.

    Raises:
        ConfigError: no files are found, formats are mixed, a file is unreadable, or the column ``text_key`` is missing.
    """

    def __init__(self, config: DataConfig):
        self._config = config
        self._setting = f"{config.section}.dataset_path = {config.path!r}"
        self._root, self._files = self._find()
        self._format = self._one_format()
        self.listing = [FileEntry(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in self._files]
        self.dropped: Counter[str] = Counter()
        self.cut: dict[str, int] = {}

    @property
    def text_bytes(self) -> int:
        size = sum(entry.size for entry in self.listing)
        return min(size, self._config.max_bytes or size)

    def scan(self, progress: Progress) -> None:
        pass  # ``documents`` decides while it reads

    def documents(self) -> Iterator[Document]:
        total, dropped = 0, Counter()
        for document in self._all_documents():
            if not document.text.strip():
                dropped["empty"] += 1
                continue
            total += len(document.text.encode("utf-8"))
            if self._config.max_bytes and total > self._config.max_bytes:
                break
            yield document
        self.dropped = dropped

    def _all_documents(self) -> Iterator[Document]:
        if self._format == "text":
            for name, row in zip(self._names(), self._rows(self._files), strict=True):
                for position, piece in enumerate(split_lines(row["text"], PIECE_CHARACTERS)):
                    yield Document(f"{name}:{position}", piece)
            return
        # Files may differ in their other columns, so each file is loaded by itself.
        for name, file in zip(self._names(), self._files, strict=True):
            for position, row in enumerate(self._rows([file])):
                yield Document(f"{name}:{position}", text_of(row, self._config.text_key, str(file)))

    def _names(self) -> list[str]:
        return [file.relative_to(self._root).as_posix() for file in self._files]

    def _rows(self, files: list[Path]) -> Iterator[dict]:
        """Yield rows with ``datasets``, streamed: a normal load would write an Arrow copy of the data."""
        import datasets

        options = {"sample_by": "document"} if self._format == "text" else {}
        with tempfile.TemporaryDirectory() as scratch:  # for lock files of ``datasets``
            try:
                yield from datasets.load_dataset(
                    self._format,
                    data_files=[glob.escape(str(file)) for file in files],
                    split="train",
                    streaming=True,
                    cache_dir=scratch,
                    **options,
                )
            except Exception as error:  # each format's reader raises its own types
                names = files[0] if len(files) == 1 else f"one of {len(files):,} files (the first is {files[0]})"
                raise ConfigError(f"{self._setting}: cannot read {names} as {self._format}: {error}") from error

    def _find(self) -> tuple[Path, list[Path]]:
        """Return the folder that keys are relative to, and the files in sorted order."""
        if not self._config.path:
            raise ConfigError(
                f"{self._config.section}.dataset = 'files' needs {self._config.section}.dataset_path: "
                "a file, a folder or a glob of .jsonl, .parquet or text files"
            )
        path = Path(self._config.path).expanduser().absolute()
        if path.is_file():
            return path.parent, [path]
        if path.is_dir():
            root, found = path, path.rglob("*")
        else:
            root = Path(*path.parts[: _first_pattern(path)])
            found = map(Path, glob.glob(str(path), recursive=True))
        files = sorted(file for file in found if file.is_file() and not _is_hidden(file.relative_to(root)))
        if not files:
            problem = "holds no files" if path.is_dir() else "does not exist and matches no files"
            raise ConfigError(f"{self._setting} {problem}")
        return root, files

    def _one_format(self) -> str:
        suffixes = Counter(_suffix(file) for file in self._files)
        formats = {FORMATS.get(suffix, "text") for suffix in suffixes}
        if len(formats) > 1:
            counts = ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in suffixes.most_common())
            raise ConfigError(
                f"{self._setting} mixes formats ({counts}); select one format with a glob such as "
                f"{str(self._root / '**' / ('*' + next(s for s in suffixes if s in FORMATS)))!r}"
            )
        return formats.pop()


def text_of(row: dict, text_key: str, where: str) -> str:
    """Return the text of one row, "" for null. Raises ConfigError unless the column ``text_key`` holds a string."""
    if text_key not in row:
        raise ConfigError(f"data.text_key = {text_key!r} is not a column of {where}, which has: {', '.join(row)}")
    text = row[text_key]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ConfigError(f"data.text_key = {text_key!r} in {where} holds {type(text).__name__}, not text")
    return text


def split_lines(text: str, size: int) -> Iterator[str]:
    """Cut ``text`` after line ends into pieces of at most ``size`` characters. A longer line stays whole."""
    start = 0
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1
        if end == 0:
            end = text.find("\n", start + size) + 1 or len(text)
        yield text[start:end]
        start = end
    yield text[start:]


def _suffix(file: Path) -> str:
    name = file.name.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return os.path.splitext(name)[1]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _first_pattern(path: Path) -> int:
    """Return the index of the first part of ``path`` that is a glob pattern, or else of the last part."""
    parts = path.parts
    return next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
