"""Reads local JSONL, Parquet and text files as training text, piece by piece: a file may be larger than the memory.

Documents stay in file order; the data loader shuffles chunks of the tokenized text in each epoch.
Duplicates are kept, because a mixture may repeat a file to give it more weight. A document's text decides whether it
is held out, as in a stream: equal documents are on the same side, and stay there when files or rows come and go. The
pieces of a long text file go where its first piece goes, unless it is the only file.

The library ``datasets`` does not read these files, because it infers types. It turns texts that look like dates into
dates ("2020-01-01" into "2020-01-01 00:00:00", even with a given schema), refuses JSON Lines whose rows have different
columns or types, half a surrogate pair, and Parquet with types that it does not know, and names no line of an error.
"""

import bz2
import glob
import gzip
import lzma
import os
import re
from collections import Counter
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from mxtrain.data.config import DataConfig
from mxtrain.data.documents import (
    OVER_LIMIT,
    WITHOUT_TEXT,
    Document,
    FileEntry,
    Progress,
    TextColumn,
    megabytes,
    one_line,
)
from mxtrain.errors import ConfigError
from mxtrain.json_toml import parse

FORMATS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}
"""Format by suffix. Files with any other suffix are plain text."""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
READ = f"formats are {', '.join(FORMATS)} and UTF-8 text, all but Parquet also compressed ({', '.join(COMPRESSED)})"


def _open_zstd(file: Path, mode: str, encoding: str) -> TextIO:
    import pyarrow

    return TextIOWrapper(pyarrow.input_stream(str(file), compression="zstd"), encoding=encoding)


# First bytes of a compressed file -> the function that opens it.
COMPRESSIONS = {
    rb"\x1f\x8b": gzip.open,
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": bz2.open,  # the second one: an empty text
    rb"\xfd7zXZ\x00": lzma.open,
    rb"\x28\xb5\x2f\xfd": _open_zstd,
}

LONE_SURROGATE = re.compile("[\ud800-\udfff]")

# Longer text files are cut at line ends into documents of about this size, so that they need not fit into the memory.
# A typical source file or article fits into one document.
PIECE_CHARACTERS = 1 << 16
READ_CHARACTERS = 1 << 20


class LocalFiles:
    """The files that match ``config.path``. Implements ``Source``.

    Raises:
        ConfigError: no files are found, formats are mixed, a file is unreadable, or no row has text in ``text_key``.
    """

    cut: dict[str, int] = {}

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
        self._file_bytes = sum(entry.size for entry in self.listing)
        self.text_bytes = min(self._file_bytes, config.max_bytes or self._file_bytes)
        self.dropped: Counter[str] = Counter()
        self._keeps_together = self._format == "text" and len(self._files) > 1
        has_pieces = any(e.size > PIECE_CHARACTERS or e.path.endswith(COMPRESSED) for e in self.listing)
        self.corrections = ("pieces of a file on one side",) if self._keeps_together and has_pieces else ()

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
                if size > limit:  # its size says nothing about the room that is left
                    self.dropped[OVER_LIMIT] += 1
                    continue
                files = megabytes(self._file_bytes)
                self.dropped[f"{OVER_LIMIT} and all after it, of {files} in files"] = 1
                break  # later ones may fit, but the search for them would read all files
            total += size
            yield document

    def _all_documents(self) -> Iterator[Document]:
        column = TextColumn(self._config.text_key)
        for file in self._files:
            try:
                first = None
                for text in self._texts(file, column):
                    first = text if first is None else first
                    yield Document(text, text, first if self._keeps_together else "")
            except Exception as error:  # each format's reader raises its own types
                formats = f"; {READ}" if isinstance(error, UnicodeDecodeError) else ""
                raise ConfigError(
                    f"{self._setting}: cannot read {file} as {self._format}: {one_line(error)}{formats}"
                ) from error
        column.require_text()

    def _texts(self, file: Path, column: TextColumn) -> Iterator[str]:
        if self._format == "text":
            with open_text(file) as opened:
                yield from split_lines(opened, PIECE_CHARACTERS)
            return
        for row in json_rows(file) if self._format == "json" else parquet_rows(file, column.text_key):
            text = column.text_of(row, str(file))
            if text is None:
                self.dropped[WITHOUT_TEXT] += 1
            elif not text.isascii() and LONE_SURROGATE.search(text):  # JSON can hold half a character, UTF-8 cannot
                self.dropped["half of a surrogate pair"] += 1
            else:
                yield text

    def _find(self) -> tuple[Path, list[Path]]:
        """Return the folder that a glob starts from, and the files in sorted order."""
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
            parts = path.parts
            root = Path(*parts[: next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)])
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


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _files_in(folder: Path, around: frozenset[tuple[int, int]] = frozenset()) -> Iterator[Path]:
    """Yield the files in a folder and in its subfolders, also behind links, as a glob does.

    Does not follow a link to a folder that is being read: ``around`` has the devices and numbers of these folders.
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


def open_text(file: Path) -> TextIO:
    """Open a UTF-8 text file, plain or compressed with gzip, bzip2, xz or zstd. Every line end is read as "\\n".

    A byte order mark at the start is not part of the text.
    """
    with file.open("rb") as raw:
        start = raw.read(16)
    opener = next((opener for magic, opener in COMPRESSIONS.items() if re.match(magic, start)), open)
    return opener(file, "rt", encoding="utf-8-sig")


def split_lines(file: TextIO, size: int) -> Iterator[str]:
    """Cut the text of ``file`` after line ends into pieces of at most ``size`` characters. A longer line stays whole.

    The last piece may be empty.
    """
    text, start = "", 0
    while True:
        if len(text) - start <= size:
            more = file.read(max(size, READ_CHARACTERS))
            if not more:
                yield text[start:]
                return
            text, start = text[start:] + more, 0
            continue
        end = text.rfind("\n", start, start + size) + 1 or text.find("\n", start + size) + 1
        if not end:
            text, start = text[start:] + file.readline(), 0
            end = len(text)
        yield text[start:end]
        start = end


def json_rows(file: Path) -> Iterator[dict]:
    """Yield the rows in a file: one JSON object per line, or an array of objects, which is read whole.

    Raises ValueError for text that is neither, with the line or the row.
    """
    with open_text(file) as opened:
        is_first = True
        for number, line in enumerate(opened, start=1):
            line = line.lstrip("\ufeff").strip()
            if not line:
                continue
            if is_first and line.startswith("["):
                for row_number, row in enumerate(parse(line + opened.read()), start=1):
                    yield _checked(row, f"row {row_number}")
                return
            is_first = False
            try:
                row = parse(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            yield _checked(row, f"line {number}")


def _checked(row: object, place: str) -> dict:
    if not isinstance(row, dict):
        raise ValueError(f"{place} is a JSON {type(row).__name__}, not an object with a text")
    return row


def parquet_rows(file: Path, key: str) -> Iterator[dict]:
    """Yield rows with the column ``key`` alone, or, in a file without it, with the names of all columns."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as opened:
        names = opened.schema_arrow.names
        for batch in opened.iter_batches(1000, columns=[key] if key in names else []):
            yield from batch.to_pylist() if key in names else [dict.fromkeys(names)] * batch.num_rows
