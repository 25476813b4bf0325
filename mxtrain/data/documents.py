"""Documents and their hashes, and how local JSONL, CSV, Parquet, Arrow and text files are read, piece by piece.

Documents stay in file order, and duplicates are kept, because a mixture may repeat a file to give it more weight. A
document's text decides whether it is held out, as in a stream: equal documents are on the same side, and stay there
when files or rows come and go. The pieces of a long text file go where its first piece goes, unless it is the only
file. Hashes depend on keys alone, so every machine gets the same order, split and sample.

A column of integer lists holds documents that are tokenized already. ``token_files.py`` reads files of ids only.

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
from functools import partial
from hashlib import blake2b, sha256
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from mxtrain.data.config import DataConfig
from mxtrain.errors import ConfigError, one_line
from mxtrain.files import parse

SPLITS = ("train", "validation")
OVER_LIMIT = "over max_bytes"
"""The reason for which a source leaves out what does not fit into ``DataConfig.max_bytes``"""

FORMATS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
FORMATS |= {".feather": "arrow", ".csv": "csv", ".tsv": "csv", ".bin": "tokens", ".idx": "tokens"}
"""Format by suffix, without a suffix of COMPRESSED. Files with any other suffix are plain text."""
DATASETS_OWN = re.compile(r"dataset_info\.json|state\.json|cache-.*\.arrow")
"""Files of the library ``datasets`` beside those with a dataset's rows"""

# Longer text files are cut at line ends into documents of about this size, so that they need not fit into the memory.
# A typical source file or article fits into one document.
PIECE_CHARACTERS = 1 << 16


class Document(NamedTuple):
    key: str
    """Input of the hashes. Python source: the path relative to its root, with "/" on every platform. Files: the text
    itself, or a hash of its ids, because the same text may stand in several files and rows"""

    text: str | np.ndarray
    """Or its token ids, which are stored as they are"""

    split_key: str = ""
    """If not empty, it decides instead of ``key`` whether the document is held out"""

    @property
    def size(self) -> int:
        """UTF-8 bytes of the text, or bytes of the ids. Raises UnicodeEncodeError."""
        return len(self.text.encode()) if isinstance(self.text, str) else self.text.nbytes

    def is_held_out(self, validation_share: float) -> bool:
        return is_held_out(self.split_key or self.key, validation_share)


def fraction(key: str, salt: str) -> float:
    """Hash ``key`` and ``salt`` to a number in [0, 1). Different salts give independent numbers."""
    digest = blake2b(f"{salt}\0{key}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def is_held_out(key: str, validation_share: float) -> bool:
    """Return whether a document belongs to validation. A larger share contains every smaller share."""
    return fraction(key, "validation") < validation_share


class TextColumn:
    """Takes the text out of rows, which are dicts, and counts the rows without text.

    A few bad rows are common in large data. Data without any text are an error, and so are ``patience`` rows without
    text before any other: a stream may have no end. Messages name ``where``, the file or dataset of the rows.
    """

    def __init__(self, text_key: str, where: str = "", patience: int = sys.maxsize):
        self.text_key, self.where, self._patience = text_key, where, patience
        self._without_text, self._has_text, self._first_problem = 0, False, ""

    def __call__(self, row: dict) -> str | None:
        """Return the text of a row, or None if it has none."""
        text = row.get(self.text_key)
        if isinstance(text, str):
            self._has_text = True
            return text
        if not self._without_text:
            kind, columns = type(text).__name__, ", ".join(map(str, row))
            missing = f"is not a column of {self.where}, which has: {columns}"
            problem = f"in {self.where} holds {kind}, not text" if self.text_key in row else missing
            self._first_problem = f"data.text_key = {self.text_key!r} {problem}"
        self._without_text += 1
        if self._without_text == self._patience:
            self.require_text()
        return None

    def require_text(self) -> None:
        """Raise ConfigError if there were rows, and none of them had text."""
        if self._without_text and not self._has_text:
            raise ConfigError(self._first_problem)


class LocalFiles:
    """The files that match ``config.path``. They can be read more than once."""

    listing: list[tuple[str, int, int]]
    """All files found, before any is read: path, bytes and time of the last change in ns, for the cache key"""
    dropped: Counter[str]
    """Number of files or documents that the last reading left out, by reason"""
    has_ids: bool
    """Whether documents have shown to be token ids"""
    token_files: list[Path]
    """Files of token ids only, which have no documents (see ``token_files.py``)"""

    def __init__(self, config: DataConfig, vocabulary: int = 0):
        self._config, self.vocabulary = config, vocabulary
        self.setting = f"{config.section}.dataset_path = {config.path!r}"
        self.dropped, self.token_files = Counter(), []
        try:
            self._files = listed = self._find()
            self._format = self._one_format()
            if self._format == "tokens":
                self.token_files = sorted({file.with_suffix(".bin") for file in listed})
                indices = [file.with_suffix(".idx") for file in self.token_files]
                listed = [*self.token_files, *filter(Path.exists, indices)]
            self.listing = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in listed]
        except OSError as error:  # no permission, or a file that was deleted meanwhile
            raise ConfigError(f"{self.setting} cannot be read: {error}") from error
        self.has_ids = bool(self.token_files)

    def _find(self) -> list[Path]:
        """Return the files in sorted order, those in folders without hidden ones."""
        if not self._config.path:
            raise ConfigError(
                f"{self._config.section}.dataset = 'files' needs {self._config.section}.dataset_path: "
                "a file, a folder or a glob of text, or of files with token ids"
            )
        path = Path(os.path.expanduser(self._config.path)).absolute()
        for file in (path, Path(f"{path}.bin")):  # Megatron names two files by their prefix
            if file.is_file():
                return [file]
        pattern = f"{glob.escape(str(path))}/**" if path.is_dir() else str(path)
        files = sorted(file for file in map(Path, glob.glob(pattern, recursive=True)) if file.is_file())
        files = [f for f in files if not (DATASETS_OWN.fullmatch(f.name) and (f.parent / "state.json").exists())]
        if not files:
            problem = "holds no files" if path.is_dir() else f"does not exist and matches no files: {path}"
            raise ConfigError(f"{self.setting} {problem}; correct it, or name a prepared text in data.prepared")
        return files

    def _one_format(self) -> str:
        suffixes = Counter(_suffix(file) for file in self._files)
        formats = {FORMATS.get(suffix, "text") for suffix in suffixes}
        if len(formats) > 1:
            counts = ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in suffixes.most_common())
            pattern = f"**/*{next(suffix for suffix in suffixes if suffix in FORMATS)}"
            raise ConfigError(f"{self.setting} mixes formats ({counts}); select one with a glob such as {pattern!r}")
        return formats.pop()

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
                self.dropped[f"{OVER_LIMIT} and all after it"] = 1
                break  # later ones may fit, but the search for them would read all files
            else:
                total += size
                yield document

    def _all_documents(self) -> Iterator[Document]:
        column, is_only_file = TextColumn(self._config.text_key), len(self._files) == 1
        try:
            for file in self._files:
                first, column.where = None, str(file)
                for text in self._texts(file, column):
                    if isinstance(text, np.ndarray):
                        self.has_ids = True
                        require_ids(text, self.vocabulary)
                        yield Document(sha256(text.astype("<u4")).hexdigest(), text)
                        continue
                    first = text if first is None else first
                    yield Document(text, text, "" if self._format != "text" or is_only_file else first)
        except Exception as error:  # each format's reader raises its own types
            problem = f"{self.setting}: cannot read {file} as {self._format}: {one_line(error)}"
            if isinstance(error, UnicodeDecodeError):
                problem += f"; formats are {', '.join(FORMATS)} and UTF-8 text, and {', '.join(COMPRESSED)} of them"
            raise ConfigError(problem) from error
        column.require_text()

    def _texts(self, file: Path, column: TextColumn) -> Iterator[str | np.ndarray]:
        if self._format == "text":
            with open_text(file) as opened:
                yield from split_lines(opened, PIECE_CHARACTERS)
            return
        rows = {"json": json_rows, "csv": csv_rows}.get(self._format) or partial(table_rows, key=column.text_key)
        for row in rows(file):
            if isinstance(ids := row.get(column.text_key), np.ndarray):
                yield ids
            elif (text := column(row)) is not None:
                yield text
            else:
                self.dropped["without text"] += 1


def _open_zstd(file: Path, mode: str, **text) -> TextIO:
    import pyarrow

    return TextIOWrapper(pyarrow.input_stream(str(file), compression="zstd"), **text)


COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}


def _suffix(file: Path) -> str:
    name, suffix = os.path.splitext(file.name.lower())
    return os.path.splitext(name)[1] if suffix in COMPRESSED else suffix


def open_text(file: Path) -> TextIO:
    """Open a UTF-8 text file, plain or compressed with gzip, bzip2, xz or zstd. Every line end is read as "\\n".

    A byte order mark at the start is not part of the text.
    """
    return COMPRESSED.get(file.suffix.lower(), open)(file, "rt", encoding="utf-8-sig")


def split_lines(file: TextIO, size: int) -> Iterator[str]:
    """Cut the text of ``file`` after line ends into pieces of at most ``size`` characters. A longer line stays whole.

    An empty file is one empty piece. Raises ValueError for archives and other files that begin with a zero byte.
    """
    lines, length = [], 0
    for line in file:
        if not lines and "\0" in line:
            raise ValueError("the file is not text, because it has zero bytes")
        if lines and length + len(line) > size:
            yield "".join(lines)
            lines, length = [], 0
        lines.append(line)
        length += len(line)
    yield "".join(lines)


def json_rows(file: Path) -> Iterator[dict]:
    """Yield the rows in a file: one JSON object per line, or an array of objects, which is read whole.

    Raises ValueError for text that is neither, with the line.
    """
    is_first = True
    with open_text(file) as opened:
        for number, line in enumerate(opened, start=1):
            if not (line := line.strip()):
                continue
            is_array, is_first = is_first and line.startswith("["), False
            try:
                rows = parse(line + opened.read()) if is_array else [parse(line)]
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            for row in rows:
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} holds a JSON {type(row).__name__}, not an object with a text")
                yield row


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
        raise ValueError("a list of ids has a null; remove it")
    lengths = list_value_length(column).fill_null(0).to_numpy()
    return np.split(values.to_numpy(), np.cumsum(lengths)[:-1])


def require_ids(ids: np.ndarray, vocabulary: int) -> None:
    """Raise ValueError for an id that is not in the vocabulary. 0 stands for a tokenizer that would be built."""
    if not vocabulary:
        raise ValueError("token ids need the tokenizer that made them; name its folder in model.hf_assets_path")
    for wrong in {int(ids.min()), int(ids.max())} if len(ids) else ():
        if not 0 <= wrong < vocabulary:
            has = f"the {vocabulary:,} tokens of the tokenizer in model.hf_assets_path"
            raise ValueError(f"the id {wrong}, read as {ids.dtype}, is not among {has}")
