"""Reads local JSONL, CSV, Parquet, Arrow and text files as training text, piece by piece: a file may exceed the memory.

A column of integer lists holds documents that are tokenized already. ``token_files.py`` reads files of ids only.

Documents stay in file order, and duplicates are kept, because a mixture may repeat a file to give it more weight. A
document's text decides whether it is held out, as in a stream: equal documents are on the same side, and stay there
when files or rows come and go. The pieces of a long text file go where its first piece goes, unless it is the only
file.

The readers of ``datasets`` infer types: they turn texts that look like dates into dates, refuse Parquet with types that
they do not know, and name no line of an error.
"""

import bz2
import csv
import glob
import gzip
import lzma
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from hashlib import sha256
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np

from mxtrain.data.config import DataConfig
from mxtrain.data.documents import OVER_LIMIT, Document, TextColumn, megabytes, one_line
from mxtrain.errors import ConfigError
from mxtrain.files import parse

FORMATS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
FORMATS |= {".feather": "arrow", ".csv": "csv", ".tsv": "csv", ".bin": "tokens", ".idx": "tokens"}
"""Format by suffix. Files with any other suffix are JSON Lines or plain text, as their content says."""
NOT_TEXT = {
    r"PK\x03\x04|7z\ufffd\ufffd|Rar!\x1a|.{157,257}ustar": "an archive: unpack it",
    r"PAR1\x15|ARROW1\0": "a table: rename it to .parquet or .arrow",
    r"\ufffdNUMPY": "a NumPy file: write its ids with ids.tofile('text.bin')",
    r"[^\0]*\0": "no UTF-8 text: it has zero bytes",
}
"""How files begin that are no text, and what they are. "\\ufffd" stands for a byte that is not UTF-8"""
DATASETS_OWN = re.compile(r"dataset_info\.json|state\.json|cache-.*\.arrow")
"""Files of the library ``datasets`` beside those with a dataset's rows"""
MEGATRONS_OWN = re.compile(r"[0-9a-f]{32}-.*-(description\.txt|\w+_index\.npy)|.*_indexmap_.*_idx\.npy")
"""Files in which Megatron keeps the order of its samples, in a folder below its ``.bin`` file or beside it"""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
READ = f"formats are {', '.join(FORMATS)} and UTF-8 text; JSON, CSV and text also compressed ({', '.join(COMPRESSED)})"


def _open_zstd(file: Path, mode: str, **text) -> TextIO:
    import pyarrow

    return TextIOWrapper(pyarrow.input_stream(str(file), compression="zstd"), **text)


# First bytes of a compressed file -> the function that opens it.
COMPRESSIONS = {
    rb"\x1f\x8b": gzip.open,
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": bz2.open,  # the second one: an empty text
    rb"\xfd7zXZ\x00": lzma.open,
    rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18": _open_zstd,  # the second one: a skippable frame, as pzstd writes
}

# Longer text files are cut at line ends into documents of about this size, so that they need not fit into the memory.
# A typical source file or article fits into one document.
PIECE_CHARACTERS = 1 << 16


class LocalFiles:
    """The files that match ``config.path``. They can be read more than once.

    Raises:
        ConfigError: no files are found, formats are mixed, a file is unreadable, or no row has text in ``text_key``.
    """

    listing: list[tuple[str, int, int]]
    """All files found, before any is read: path, bytes and time of the last change in ns, for the cache key"""
    dropped: Counter[str]
    """Number of files or documents that the last reading left out, by reason"""
    formats: Counter[str]
    """Number of files by the format in which they were read"""
    has_ids: bool
    """Whether documents have shown to be token ids"""
    token_files: list[Path]
    """Files of token ids only, which have no documents (see ``token_files.py``)"""

    def __init__(self, config: DataConfig, vocabulary: int = 0):
        self._config, self.vocabulary = config, vocabulary
        self.setting = f"{config.section}.dataset_path = {config.path!r}"
        self.dropped, self.formats, self.token_files = Counter(), Counter(), []
        try:
            self._files = listed = self._find()
            self._format = self._one_format()
            if self._format == "tokens":
                if packed := [file for file in listed if file.suffix in COMPRESSED]:
                    raise ConfigError(f"{packed[0]} is compressed: unpack it, because ids are read where they lie")
                self.token_files = sorted({file.with_suffix(".bin") for file in listed})
                indices = [file.with_suffix(".idx") for file in self.token_files]
                listed = [*self.token_files, *filter(Path.exists, indices)]
            self.listing = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in listed]
        except OSError as error:  # no permission, or a file that was deleted meanwhile
            raise ConfigError(f"{self.setting} cannot be read: {error}") from error
        self.has_ids = bool(self.token_files)

    def documents(self) -> Iterator[Document]:
        """Yield all documents in the order of the files."""
        limit, total, self.dropped = self._config.max_bytes, 0, Counter()
        for document in self._all_documents():
            try:
                size = document.size
            except UnicodeEncodeError:  # JSON can hold half a character, UTF-8 cannot
                self.dropped["half of a surrogate pair"] += 1
                continue
            if not (document.text.strip() if isinstance(document.text, str) else size):
                self.dropped["empty"] += 1
            elif limit and size > limit:  # its size says nothing about the room that is left
                self.dropped[OVER_LIMIT] += 1
            elif limit and total + size > limit:
                found = megabytes(sum(size for _, size, _ in self.listing))
                self.dropped[f"{OVER_LIMIT} and all after it, of {found} in files"] = 1
                break  # later ones may fit, but the search for them would read all files
            else:
                total += size
                yield document

    def _all_documents(self) -> Iterator[Document]:
        column, formats, format = TextColumn(self._config.text_key), [], self._format
        try:
            for file in self._files:  # before any document: an archive may come last
                formats.append(text_format(file, column.text_key) if format == "text" else format)
            self.formats = Counter(formats)
            for file, format in zip(self._files, formats):
                first = None
                for text in self._texts(file, format, column):
                    if isinstance(text, np.ndarray):
                        self.has_ids = True
                        require_ids(text, self.vocabulary)
                        yield Document(sha256(text.astype("<u4")).hexdigest(), text)
                        continue
                    first = text if first is None else first
                    yield Document(text, text, first if format == "text" and len(self._files) > 1 else "")
        except Exception as error:  # each format's reader raises its own types
            known = f"; {READ}" if isinstance(error, UnicodeDecodeError) else ""
            raise ConfigError(f"{self.setting}: cannot read {file} as {format}: {one_line(error)}{known}") from error
        column.require_text()

    def _texts(self, file: Path, format: str, column: TextColumn) -> Iterator[str | np.ndarray]:
        if format == "text":
            with open_text(file) as opened:
                yield from split_lines(opened, PIECE_CHARACTERS)
            return
        rows = {"json": json_rows, "csv": csv_rows}.get(format) or partial(table_rows, key=column.text_key)
        for row in rows(file):
            if isinstance(ids := row.get(column.text_key), np.ndarray):
                yield ids
            elif (text := column.text_of(row, str(file))) is not None:
                yield text
            else:
                self.dropped["without text"] += 1

    def _find(self) -> list[Path]:
        """Return the files in sorted order."""
        if not self._config.path:
            raise ConfigError(
                f"{self._config.section}.dataset = 'files' needs {self._config.section}.dataset_path: "
                "a file, a folder or a glob of text, or of files with token ids"
            )
        given = Path(os.path.expanduser(self._config.path))
        path = given.absolute()
        if path.is_file():
            return [path]
        if (path / "dataset_dict.json").exists():
            raise ConfigError(f"{self.setting} holds several splits of a dataset: name the folder of one of them")
        if path.is_dir():
            fixed, found = len(path.parts), _files_in(path)
        else:  # the parts before the first pattern may be hidden folders
            fixed = next((i for i, part in enumerate(path.parts) if glob.has_magic(part)), len(path.parts) - 1)
            found = map(Path, glob.glob(str(path), recursive=True))
        files = sorted(f for f in found if f.is_file() and not any(part.startswith(".") for part in f.parts[fixed:]))
        files = [f for f in files if not (DATASETS_OWN.fullmatch(f.name) and (f.parent / "state.json").exists())]
        files = [f for f in files if not MEGATRONS_OWN.fullmatch(f.name)]
        if not files and (tokens := Path(f"{path}.bin")).is_file():  # Megatron's prefix of both files
            return [tokens]
        if not files:
            where = "" if given.is_absolute() else f" in the current folder, {Path.cwd()}"
            problem = "holds no files" if path.is_dir() else f"does not exist and matches no files{where}"
            raise ConfigError(f"{self.setting} {problem}; data.prepared names a text that is prepared already")
        return files

    def _one_format(self) -> str:
        suffixes = Counter(_suffix(file) for file in self._files)
        formats = {FORMATS.get(suffix, "text") for suffix in suffixes}
        if len(formats) > 1:
            counts = ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in suffixes.most_common())
            pattern = f"**/*{next(suffix for suffix in suffixes if suffix in FORMATS)}"
            raise ConfigError(f"{self.setting} mixes formats ({counts}); select one with a glob such as {pattern!r}")
        return formats.pop()


def shared_files(one: DataConfig, other: DataConfig) -> tuple[int, bool]:
    """Return how many files two paths have in common, in whatever words, and whether these are all files of both."""
    first, second = ({os.path.realpath(path) for path, *_ in LocalFiles(config).listing} for config in (one, other))
    return len(first & second), first == second


def _suffix(file: Path) -> str:
    name = file.name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return os.path.splitext(name)[1]


def _files_in(folder: Path, around: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the files in a folder and in its subfolders, also behind links, except links to a folder ``around`` it."""
    real = os.path.realpath(folder)
    if real in around or not os.access(folder, os.R_OK | os.X_OK):  # lost+found, for example
        return
    for path in folder.iterdir():
        if not path.is_dir():
            yield path
        elif not path.name.startswith("."):
            yield from _files_in(path, around | {real})


def text_format(file: Path, key: str) -> str:
    """Return "json" for JSON Lines, else "text", whatever the file's name is. Raises ValueError for other content."""
    with open_text(file, errors="replace") as opened:
        start = opened.read(1 << 12)
    for pattern, kind in NOT_TEXT.items():
        if re.match(pattern, start, re.DOTALL):
            raise ValueError(f"it is {kind}")
    if start.lstrip().startswith("{"):
        with suppress(ValueError):
            first, *others = islice(json_rows(file), 2)
            return "json" if others or key in first else "text"  # other JSON may be a single object in a line, too
    return "text"


def open_text(file: Path, errors: str = "strict") -> TextIO:
    """Open a UTF-8 text file, plain or compressed with gzip, bzip2, xz or zstd. Every line end is read as "\\n".

    A byte order mark at the start is not part of the text.
    """
    with file.open("rb") as raw:
        start = raw.read(16)
    opener = next((opener for magic, opener in COMPRESSIONS.items() if re.match(magic, start)), open)
    return opener(file, "rt", encoding="utf-8-sig", errors=errors)


def split_lines(file: TextIO, size: int) -> Iterator[str]:
    """Cut the text of ``file`` after line ends into pieces of at most ``size`` characters. A longer line stays whole.

    An empty file is one empty piece.
    """
    lines, length = [], 0
    for line in file:
        if lines and length + len(line) > size:
            yield "".join(lines)
            lines, length = [], 0
        lines.append(line)
        length += len(line)
    yield "".join(lines)


def json_rows(file: Path) -> Iterator[dict]:
    """Yield the rows in a file: one JSON object per line, or an array of objects, which is read whole.

    Raises ValueError for text that is neither, with the line or the row.
    """
    with open_text(file) as opened:
        for place, row in _json_values(opened):
            if not isinstance(row, dict):
                raise ValueError(f"{place} is a JSON {type(row).__name__}, not an object with a text")
            yield row


def _json_values(opened: TextIO) -> Iterator[tuple[str, object]]:
    """Yield every value of a file, and its place in words."""
    is_first = True
    for number, line in enumerate(opened, start=1):
        if not (line := line.lstrip("\ufeff").strip()):
            continue
        if is_first and line.startswith("["):
            yield from ((f"row {row}", value) for row, value in enumerate(parse(line + opened.read()), start=1))
            return
        is_first = False
        try:
            yield f"line {number}", parse(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error


def csv_rows(file: Path) -> Iterator[dict]:
    """Yield the rows of a file with a header and values between commas, or between tabs in ``.tsv``."""
    csv.field_size_limit(sys.maxsize)
    with open_text(file) as opened:
        yield from csv.DictReader(opened, delimiter="\t" if _suffix(file) == ".tsv" else ",", strict=True)


def table_rows(file: Path, key: str) -> Iterator[dict]:
    """Yield rows with the column ``key`` alone, or, in a file without it, with the names of all columns.

    A list of integers is an array. Raises ValueError for a null in it.
    """
    import pyarrow as pa
    import pyarrow.parquet

    with pa.memory_map(str(file)) as opened:
        if _suffix(file) == ".parquet":
            parquet = pa.parquet.ParquetFile(opened)
            schema = parquet.schema_arrow
            batches = parquet.iter_batches(1000, columns=[key] if key in schema.names else [])
        elif opened.read(6) == b"ARROW1":  # Arrow's file format, which Feather has, too
            arrow = pa.ipc.open_file(opened)
            schema, batches = arrow.schema, map(arrow.get_batch, range(arrow.num_record_batches))
        else:
            opened.seek(0)
            batches = pa.ipc.open_stream(opened)
            schema = batches.schema
        kind = schema.field(key).type if key in schema.names else None
        is_list = isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType)
        has_ids = is_list and pa.types.is_integer(kind.value_type)
        for batch in batches:
            if kind is None:
                yield from [dict.fromkeys(schema.names)] * batch.num_rows
            elif has_ids:
                yield from ({key: ids} for ids in _lists(batch.column(key)))
            else:
                yield from batch.select([key]).to_pylist()


def _lists(column) -> list[np.ndarray]:
    """Return the lists of integers in an array of pyarrow. A null is an empty list."""
    from pyarrow.compute import list_value_length

    values = column.flatten()
    if values.null_count:
        raise ValueError("a list of ids has a null")
    lengths = list_value_length(column).fill_null(0).to_numpy()
    return np.split(values.to_numpy(), np.cumsum(lengths)[:-1])


def require_ids(ids: np.ndarray, vocabulary: int) -> None:
    """Raise ValueError for an id that is not in the vocabulary. 0 stands for a tokenizer that would be built."""
    if not vocabulary:
        raise ValueError("ids need the tokenizer that made them: name its folder in model.hf_assets_path")
    for wrong in {int(ids.min()), int(ids.max())} if len(ids) else ():
        if not 0 <= wrong < vocabulary:
            has = f"the {vocabulary:,} tokens of the tokenizer in model.hf_assets_path"
            raise ValueError(f"the id {wrong}, read as {ids.dtype}, is not among {has}")
