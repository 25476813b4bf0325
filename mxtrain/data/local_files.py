"""Reads local JSONL, Parquet and text files as training text.

Documents stay in file order; the data loader shuffles chunks of the tokenized text in each epoch.
Duplicates are kept, because a mixture may repeat a file to give it more weight. A document's text decides whether it
is held out, as in a stream: equal documents are on the same side, and stay there when files or rows come and go. The
pieces of a long text file go where its first piece goes, unless it is the only file.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mxtrain.data.config import DataConfig
from mxtrain.data.documents import OVER_LIMIT, Document, FileEntry
from mxtrain.data.json_rows import json_rows
from mxtrain.data.progress import Progress, megabytes, one_line
from mxtrain.data.rows import WITHOUT_TEXT, TextColumn
from mxtrain.data.text_files import open_text, split_lines
from mxtrain.errors import ConfigError

FORMATS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}
"""Format by suffix. Files with any other suffix are plain text."""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
READ = f"formats are {', '.join(FORMATS)} and UTF-8 text, all but Parquet also compressed ({', '.join(COMPRESSED)})"

NO_UNICODE = "half of a surrogate pair"
"""Reason for leaving out a row: JSON can hold half a character, UTF-8 cannot"""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")

# Longer text files are cut at line ends into documents of about this size, so that they need not fit into the memory.
# A typical source file or article fits into one document.
PIECE_CHARACTERS = 1 << 16


class LocalFiles:
    """The files that match ``config.path``. Implements ``Source``.

    Raises:
        ConfigError: no files are found, formats are mixed, a file is unreadable, or no row has text in ``text_key``.
    """

    def __init__(self, config: DataConfig):
        self._config = config
        self._setting = f"{config.section}.dataset_path = {config.path!r}"
        try:
            self._root, self._files = self._find()
            status = [(file, file.stat()) for file in self._files]
        except OSError as error:  # no permission, or a file that was deleted meanwhile
            raise ConfigError(f"{self._setting} cannot be read: {error}") from error
        self._format = self._one_format()
        self.listing = [FileEntry(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in status]
        self.dropped: Counter[str] = Counter()
        self.cut: dict[str, int] = {}
        self._keeps_together = self._format == "text" and len(self._files) > 1
        has_pieces = any(e.size > PIECE_CHARACTERS or e.path.endswith(COMPRESSED) for e in self.listing)
        self.corrections = ("pieces of a file on one side",) if self._keeps_together and has_pieces else ()

    @property
    def text_bytes(self) -> int:
        size = sum(entry.size for entry in self.listing)
        return min(size, self._config.max_bytes or size)

    def scan(self, progress: Progress) -> None:
        pass  # ``documents`` decides while it reads

    def documents(self) -> Iterator[Document]:
        limit, total, self.dropped = self._config.max_bytes, 0, Counter()
        for document in self._all_documents():
            if not document.text.strip():
                self.dropped["empty"] += 1
                continue
            size = len(document.text.encode("utf-8"))
            if limit and total + size > limit:
                if size > limit:  # it says nothing about the room that is left
                    self.dropped[OVER_LIMIT] += 1
                    continue
                files = megabytes(sum(entry.size for entry in self.listing))
                self.dropped[f"{OVER_LIMIT} and all after it, of {files} in files"] = 1
                break  # later ones may fit, but the search for them would read all files
            total += size
            yield document

    def _all_documents(self) -> Iterator[Document]:
        read = self._pieces if self._format == "text" else self._texts
        column = TextColumn(self._config.text_key)
        for file in self._files:
            try:
                first = None
                for text in read(file, column):
                    first = text if first is None else first
                    yield Document(text, text, first if self._keeps_together else "")
            except Exception as error:  # each format's reader raises its own types
                formats = f"; {READ}" if isinstance(error, UnicodeDecodeError) else ""
                raise ConfigError(
                    f"{self._setting}: cannot read {file} as {self._format}: {one_line(error)}{formats}"
                ) from error
        column.require_text()

    def _pieces(self, file: Path, _: TextColumn) -> Iterator[str]:
        with open_text(file) as opened:
            yield from split_lines(opened, PIECE_CHARACTERS)

    def _texts(self, file: Path, column: TextColumn) -> Iterator[str]:
        # Files may differ in their other columns, so each file is loaded by itself.
        for row in self._rows(file):
            text = column.text_of(row, str(file))
            if text is None:
                self.dropped[WITHOUT_TEXT] += 1
            elif not text.isascii() and LONE_SURROGATE.search(text):
                self.dropped[NO_UNICODE] += 1
            else:
                yield text

    def _rows(self, file: Path) -> Iterator[dict]:
        """Yield rows, those of Parquet with the text alone: ``datasets`` would refuse types that it does not know."""
        if self._format == "json":
            with open_text(file) as opened:
                yield from json_rows(opened)
            return
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(file) as opened:
            names, key = opened.schema_arrow.names, self._config.text_key
            for batch in opened.iter_batches(1000, columns=[key] if key in names else []):
                yield from batch.to_pylist() if key in names else [dict.fromkeys(names)] * batch.num_rows

    def _find(self) -> tuple[Path, list[Path]]:
        """Return the folder that keys are relative to, and the files in sorted order."""
        if not self._config.path:
            raise ConfigError(
                f"{self._config.section}.dataset = 'files' needs {self._config.section}.dataset_path: "
                "a file, a folder or a glob of .jsonl, .parquet or text files"
            )
        given = Path(os.path.expanduser(self._config.path))
        path = given.absolute()
        if path.is_file():
            return path.parent, [path]
        if path.is_dir():
            root, found = path, _files_in(path)
        else:
            root = Path(*path.parts[: _first_pattern(path)])
            found = map(Path, glob.glob(str(path), recursive=True))
        files = sorted(file for file in found if file.is_file() and not _is_hidden(file.relative_to(root)))
        if not files:
            where = "" if given.is_absolute() else f" in the current folder, {Path.cwd()}"
            problem = "holds no files" if path.is_dir() else f"does not exist and matches no files{where}"
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


def _suffix(file: Path) -> str:
    name = file.name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return os.path.splitext(name)[1]


def _files_in(folder: Path, around: frozenset[tuple[int, int]] = frozenset()) -> Iterator[Path]:
    """Yield the files in a folder and in its subfolders, also those that links lead to, as a glob does.

    A link to one of the folders ``around`` it, of which these are device and number, ends there.
    """
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in around:
        return
    try:
        entries = list(folder.iterdir())
    except PermissionError:  # lost+found, for example
        return
    for path in entries:
        if not path.is_dir():
            yield path
        elif not path.name.startswith("."):
            yield from _files_in(path, around | {identity})


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _first_pattern(path: Path) -> int:
    """Return the index of the first part of ``path`` that is a glob pattern, or else of the last part."""
    parts = path.parts
    return next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
