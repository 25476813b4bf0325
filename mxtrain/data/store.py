"""A tokenizer and a tokenized text in one folder: ``prepared.json``, ``tokenizer/``, ``train.bin``, ``validation.bin``.

The ``.bin`` files hold little-endian token ids; ``prepared.json`` holds the report, and sizes and hashes of the others.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from mxtrain.data.config import DataConfig
from mxtrain.data.documents import Document, Progress, megabytes
from mxtrain.data.encode import SPLITS, encode, token_dtype
from mxtrain.data.tokenizer import LoadedTokenizer, tokenizer_hash
from mxtrain.errors import ConfigError
from mxtrain.files import hash_file, reason
from mxtrain.json_toml import read_json

SUMMARY = "prepared.json"
TOKENIZER = "tokenizer"
WORDS = {"tokenizer": "tokenizer", "train": "training text", "validation": "validation text", "dtype": "token size"}
"""The parts of a data identity (``Prepared.identity``) in words"""


class DamagedText(Exception):
    """A folder does not hold what was written into it. The message says what is wrong, in a few words."""


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids. Every document is ``bos ... eos``; a tokenizer without bos or eos omits that token."""

    path: Path
    dtype: str
    """"<u2" if it holds the largest id, else "<u4\""""
    count: int
    """Number of tokens"""
    sha256: str = ""
    """SHA-256 of the file's bytes, in hexadecimal digits"""

    @property
    def size(self) -> int:
        """The size in bytes that the file must have."""
        return self.count * np.dtype(self.dtype).itemsize

    def open(self) -> np.ndarray:
        """Return the tokens as a read-only array [count]."""
        if self.count == 0:  # an empty file cannot be mapped
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, mode="r", shape=(self.count,))


@dataclass(frozen=True)
class TextReport:
    """Counts of one prepared text. A streamed dataset has a tokenizer; its files, documents and tokens count 0."""

    dataset: str
    folder: str
    vocab_size: int
    """Size of the tokenizer: smaller than requested if the text has no more pairs to merge"""
    requested_vocab_size: int
    """0 for an existing tokenizer"""
    streamed: bool = False
    files: int = 0
    """Files found, before any is dropped"""
    documents: int = 0
    """Documents kept, for training and validation together"""
    bytes: int = 0
    """UTF-8 bytes of these documents"""
    train_tokens: int = 0
    validation_documents: int = 0
    validation_tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Files or documents left out, by reason: "duplicate", "machine-made", "over the package share", ..."""
    cut: dict[str, int] = field(default_factory=dict)
    """Bytes cut from each package that exceeded its share"""
    separators: str = ""
    """Which tokens separate documents, in words; "" if none do"""

    @property
    def line(self) -> str:
        """The text in one line, with all that is left out."""
        text = "streamed" if self.streamed else f"{self.documents:,} documents, {megabytes(self.bytes)}"
        text += f"; each document {self.separators}" if self.separators else ""
        return text + (f"; left out: {self._left_out}" if self._left_out else "")

    @property
    def _left_out(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items() if count)

    def __str__(self) -> str:
        cut = ", ".join(f"{name} by {megabytes(size)}" for name, size in self.cut.items())
        rows = vars(self) | {"dropped": self._left_out, "cut": cut}
        texts = {name: f"{value:,}" if type(value) is int else value for name, value in rows.items() if value}
        return "\n".join(f"{name.replace('_', ' '):<20}  {text}" for name, text in texts.items())


@dataclass(frozen=True)
class Prepared:
    """A tokenizer and the tokenized text. Streamed datasets have no tokenized text."""

    tokenizer: Path
    """Folder with tokenizer.json and tokenizer_config.json"""
    tokenizer_sha256: str
    """See ``tokenizer_hash``"""
    train: TokenFile | None
    validation: TokenFile | None
    report: TextReport
    folder: Path | None
    """Folder in the cache; None if there is nothing to keep: an existing tokenizer and a streamed text"""

    @property
    def identity(self) -> dict[str, str]:
        """The hashes of everything that training reads. Equal identities are equal data."""
        identity = {"tokenizer": self.tokenizer_sha256}
        if self.train is not None:
            identity |= {split: getattr(self, split).sha256 for split in SPLITS} | {"dtype": self.train.dtype}
        return identity


def differences(expected: dict, actual: dict) -> str:
    """Return in words how two identities (``Prepared.identity``) differ, with the beginnings of their hashes."""
    return ", ".join(
        f"{words} {(actual.get(key) or 'none')[:12]} instead of {(expected.get(key) or 'none')[:12]}"
        for key, words in WORDS.items()
        if actual.get(key) != expected.get(key)
    )


def tokenize(
    documents: Iterable[Document],
    tokenizer: LoadedTokenizer,
    folder: Path,
    validation_share: float,
    expected_bytes: int,
    progress: Progress,
) -> tuple[dict[str, TokenFile], dict[str, int]]:
    """Write ``train.bin`` and ``validation.bin`` into ``folder``. Return them, and the counts of a ``TextReport``."""
    digests, counts = {split: sha256() for split in SPLITS}, Counter({f"{split}_tokens": 0 for split in SPLITS})
    paths = {split: folder / f"{split}.bin" for split in SPLITS}
    with paths["train"].open("wb") as train, paths["validation"].open("wb") as validation:
        for batch in encode(documents, tokenizer, validation_share, expected_bytes):
            for split, file in zip(SPLITS, (train, validation), strict=True):
                file.write(batch.content[split])  # not ``tofile``, whose error does not say that the disk is full
                digests[split].update(batch.content[split])
            counts.update(batch.counts)
            progress.tick(lambda: f"tokenized {megabytes(counts['bytes'])} of about {megabytes(expected_bytes)}")
    dtype = token_dtype(tokenizer.size)
    files = {s: TokenFile(paths[s], dtype, counts[f"{s}_tokens"], digests[s].hexdigest()) for s in SPLITS}
    return files, dict(counts)


def write_summary(folder: Path, config: DataConfig, tokenizer: str, files: dict, report: TextReport) -> None:
    """Write ``prepared.json`` into a folder that holds everything else. ``tokenizer``: its hash."""
    summary = {
        "report": asdict(report),
        "config": asdict(config),
        "tokenizer": {"path": config.tokenizer_path, "sha256": tokenizer},
        "tokens": {s: {"dtype": f.dtype, "count": f.count, "sha256": f.sha256} for s, f in files.items()},
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def load_text(folder: Path, tokenizer_path: str = "", *, reads_tokens: bool = False) -> Prepared:
    """Load a prepared text, after a check of the sizes and of the tokenizer's hash.

    Args:
        folder: the folder in the cache.
        tokenizer_path: folder of the tokenizer; "" for the one with which the text was tokenized.
        reads_tokens: also read the token files and compare their hashes.

    Raises:
        DamagedText: files are missing or damaged.
        ConfigError: the text was tokenized with another tokenizer than the one in ``tokenizer_path``.
    """
    try:
        summary = read_json(folder / SUMMARY)
        report = replace(TextReport(**summary["report"]), folder=str(folder))
        files = {split: TokenFile(folder / f"{split}.bin", **facts) for split, facts in summary["tokens"].items()}
        expected = summary["tokenizer"]["sha256"]
        path = Path(tokenizer_path or summary["tokenizer"]["path"] or folder / TOKENIZER)
        sizes = {file: int(file.size) for file in files.values()}
        if len(sizes) != (0 if report.streamed else len(SPLITS)):
            raise ValueError("a tokenized text has two token files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedText(f"{SUMMARY} is missing, damaged or of an earlier version") from error
    if tokenizer_hash(path) != expected:
        if path == folder / TOKENIZER:
            raise DamagedText("its tokenizer is damaged")
        raise ConfigError(
            f"model.hf_assets_path = {str(path)!r} is not the tokenizer of the prepared text {folder.name!r}; give "
            f"the tokenizer of SHA-256 {expected[:12]} (runs keep theirs in their folder), or leave data.prepared empty"
        )
    for file, size in sizes.items():
        try:
            if (found := file.path.stat().st_size) != size:
                raise DamagedText(f"{file.path.name} has {found:,} bytes instead of {size:,}")
            if reads_tokens and hash_file(file.path).sha256 != file.sha256:
                raise DamagedText(f"the contents of {file.path.name} have changed")
        except OSError as error:
            raise DamagedText(f"{file.path.name} cannot be read: {reason(error)}") from error
    return Prepared(path, expected, files.get("train"), files.get("validation"), report, folder)
