"""A tokenizer and a tokenized text in one folder: ``prepared.json``, ``tokenizer/``, ``train.bin``, ``validation.bin``.

The ``.bin`` files hold little-endian token ids; ``prepared.json`` holds the report, and sizes and hashes of the others.
A long text goes on in the shards ``train.1.bin``, ``validation.1.bin`` and so on, each with a hash of its own. Of text
that was tokenized before (see ``tokenized.py``) the folder holds links.
"""

import json
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from mxtrain.data.config import DataConfig
from mxtrain.data.documents import Document, Progress, megabytes
from mxtrain.data.encode import SPLITS, encode, token_dtype
from mxtrain.data.token_file import TokenFile, facts_beside, remember
from mxtrain.data.tokenizer import LoadedTokenizer, tokenizer_hash
from mxtrain.errors import ConfigError
from mxtrain.files import reason, replace_file
from mxtrain.json_toml import read_json

SUMMARY = "prepared.json"
TOKENIZER = "tokenizer"
PROGRESS = "progress.json"
"""In an unfinished folder: what stands in its whole shards. Everything before them, such as the tokenizer, is there"""
WORDS = {"tokenizer": "tokenizer", "train": "training text", "validation": "validation text", "dtype": "token size"}
"""The parts of a data identity (``Prepared.identity``) in words"""


SHARD_BYTES = 1 << 28
"""A shard of the training text ends with the batch of documents that reaches this size, and so does validation's"""
SHARDS_AT_START = 16
"""A start reads the shards of a text of up to so many for their hashes, and prepares a damaged text again. Those of a
longer one are read for their hashes before their first use."""

ABANDONED_SECONDS = 3600.0
"""Without a write for so long, a process of another machine has ended"""


class DamagedText(Exception):
    """A folder does not hold what was written into it. The message says what is wrong, in a few words."""


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
    formats: dict[str, int] = field(default_factory=dict)
    """Number of files by the format in which they were read"""
    separators: str = ""
    """Which tokens separate documents, in words, or that they were tokenized before; "" if none do"""

    @property
    def line(self) -> str:
        """The text in one line, with all that is left out."""
        tokens = f"{self.train_tokens + self.validation_tokens:,} tokens"  # where documents do not show
        text = "streamed" if self.streamed else f"{self.documents:,} documents" if self.documents else tokens
        text += f", {megabytes(self.bytes)}" if self.bytes else ""
        text += f"; files: {_in_words(self.formats)}" if self.formats else ""
        text += f"; each document {self.separators}" if self.separators else ""
        return text + (f"; left out: {_in_words(self.dropped)}" if any(self.dropped.values()) else "")

    def __str__(self) -> str:
        cut = ", ".join(f"{name} by {megabytes(size)}" for name, size in self.cut.items())
        rows = vars(self) | {"dropped": _in_words(self.dropped), "cut": cut, "formats": _in_words(self.formats)}
        texts = {name: f"{value:,}" if type(value) is int else value for name, value in rows.items() if value}
        return "\n".join(f"{name.replace('_', ' '):<20}  {text}" for name, text in texts.items())


def _in_words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


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
    """Write ``train.bin``, ``validation.bin`` and their further shards into ``folder``, after those that are there.

    Returns the files by split, and the counts of a ``TextReport``.
    """
    dtype = token_dtype(tokenizer.size)
    shards, counts = _written(folder)
    if shards["train"]:
        progress.say(f"going on after {len(shards['train'])} shard(s), {megabytes(counts['bytes'])}")

    def contents() -> Iterator[dict[str, bytes]]:
        for batch in encode(documents, tokenizer, validation_share, expected_bytes, counts["batches"]):
            counts.update(batch.counts, batches=1)
            yield batch.content
            progress.tick(lambda: f"tokenized {megabytes(counts['bytes'])} of about {megabytes(expected_bytes)}")

    rest = contents()
    while not shards["train"] or shards["train"][-1].size >= SHARD_BYTES:
        for split, file in _write_shards(folder, len(shards["train"]), dtype, rest).items():
            shards[split].append(file)
        if shards["train"][-1].size >= SHARD_BYTES:
            facts = {split: _facts(files) for split, files in shards.items()}
            content = {"machine": socket.gethostname(), "counts": counts, "tokens": facts}
            replace_file(folder / PROGRESS, json.dumps(content).encode())
    del counts["batches"]
    return {split: TokenFile.of(files) for split, files in shards.items()}, dict(counts)


def goes_on(folder: Path) -> bool:
    """Return whether a folder is unfinished, has whole shards, and no process of another machine may be writing it.

    Nor may one of this machine: the caller has a lock.
    """
    with suppress(OSError, ConfigError):
        machine = read_json(folder / PROGRESS).get("machine")
        last_write = max(path.stat().st_mtime for path in folder.iterdir())
        return machine == socket.gethostname() or time.time() - last_write > ABANDONED_SECONDS
    return False


def _written(folder: Path) -> tuple[dict[str, list[TokenFile]], Counter[str]]:
    """Return an unfinished folder's shards by split, and their counts. A damaged one has no shards."""
    try:
        kept = read_json(folder / PROGRESS)
        shards = {split: _shards(folder, split, kept["tokens"][split]) for split in SPLITS}
        if all(file.is_intact() for files in shards.values() for file in files):
            return shards, Counter(kept["counts"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {split: [] for split in SPLITS}, Counter({f"{split}_tokens": 0 for split in SPLITS})


def _write_shards(folder: Path, number: int, dtype: str, contents: Iterator[dict]) -> dict[str, TokenFile]:
    """Write one shard of each split, and return them."""
    paths = {split: folder / (f"{split}.{number}.bin" if number else f"{split}.bin") for split in SPLITS}
    sizes, digests = Counter(), {split: sha256() for split in SPLITS}
    with paths["train"].open("wb") as train, paths["validation"].open("wb") as validation:
        for content in contents:
            for split, file in zip(SPLITS, (train, validation), strict=True):
                file.write(content[split])  # not ``tofile``, whose error does not say that the disk is full
                digests[split].update(content[split])
                sizes[split] += len(content[split])
            if sizes["train"] >= SHARD_BYTES:
                break
    item = np.dtype(dtype).itemsize
    return {s: TokenFile(paths[s], dtype, sizes[s] // item, digests[s].hexdigest()) for s in SPLITS}


def write_summary(folder: Path, config: DataConfig, tokenizer: str, files: dict, report: TextReport) -> None:
    """Write ``prepared.json`` into a folder that holds everything else. ``tokenizer``: its hash."""
    summary = {
        "report": asdict(report),
        "config": asdict(config),
        "tokenizer": {"path": config.tokenizer_path, "sha256": tokenizer},
        "tokens": {s: _facts(file.files) | {"count": file.count, "sha256": file.sha256} for s, file in files.items()},
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (folder / PROGRESS).unlink(missing_ok=True)


def _facts(files: Sequence[TokenFile]) -> dict:
    shards = [{"name": f.path.name, "start": f.start, "count": f.count, "sha256": f.sha256} for f in files]
    return {"dtype": files[0].dtype, "shards": shards}


def _shards(folder: Path, split: str, facts: dict) -> list[TokenFile]:
    """Return the shards that ``_facts`` describe."""
    whole = facts | {"name": f"{split}.bin"}  # of an earlier version
    return [
        TokenFile(folder / shard["name"], facts["dtype"], shard["count"], shard["sha256"], shard.get("start", 0))
        for shard in facts.get("shards", [whole])
    ]


def load_text(folder: Path, tokenizer_path: str = "", *, reads_tokens: bool = False, again: bool = False) -> Prepared:
    """Load a prepared text, after a check of the sizes and of the tokenizer's hash.

    Args:
        folder: the folder in the cache.
        tokenizer_path: folder of the tokenizer; "" for the one with which the text was tokenized.
        reads_tokens: also compare the hashes of up to SHARDS_AT_START shards that this machine has not read yet.
        again: compare the hashes of all shards.

    Raises:
        DamagedText: files are missing or damaged.
        ConfigError: the text was tokenized with another tokenizer than the one in ``tokenizer_path``.
    """
    try:
        summary = read_json(folder / SUMMARY)
        report = replace(TextReport(**summary["report"]), folder=str(folder))
        files = {split: TokenFile.of(_shards(folder, split, facts)) for split, facts in summary["tokens"].items()}
        # The hash of an earlier version's shards was that of all their bytes.
        files = {split: replace(file, sha256=summary["tokens"][split]["sha256"]) for split, file in files.items()}
        expected = summary["tokenizer"]["sha256"]
        path = Path(tokenizer_path or summary["tokenizer"]["path"] or folder / TOKENIZER)
        ends = {part: int(part.span[1]) for file in files.values() for part in file.files}
        if len(files) != (0 if report.streamed else len(SPLITS)):
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
    known = facts_beside(folder)
    is_short = files and len(files["train"].files) <= SHARDS_AT_START
    for file, end in ends.items():
        try:
            size = file.path.stat().st_size
            if size < end or (size > end and not file.path.is_symlink()):
                raise DamagedText(f"{file.path.name} has {size:,} bytes instead of {end:,}")
            if again or (reads_tokens and is_short and file.fact not in known):
                if not file.is_intact():
                    raise DamagedText(f"the contents of {file.path.name} have changed")
                remember(folder, [file.fact])
        except OSError as error:
            raise DamagedText(f"{file.path.name} cannot be read: {reason(error)}") from error
    return Prepared(path, expected, files.get("train"), files.get("validation"), report, folder)


def remember_files(prepared: Prepared) -> None:
    """Remember that a text that this process has just written is intact."""
    files = [file for split in (prepared.train, prepared.validation) if split for file in split.files]
    remember(prepared.folder, [file.fact for file in files])
