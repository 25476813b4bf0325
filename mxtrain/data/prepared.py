"""Builds the tokenizer and the tokenized text of a DataConfig, once: later calls load the result from the cache.

A folder of the cache holds ``prepared.json`` (the report, and hashes), ``tokenizer/``, and ``tokens/``, a dataset of
the library ``datasets``. Each of its rows has the tokens of a batch of documents: for training in the column "train",
for validation in the column "validation". Of token files the folder holds links.
"""

import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from hashlib import sha256
from heapq import heappop, heappush
from operator import itemgetter
from pathlib import Path

import numpy as np

from mxtrain.data.config import DATASETS, DataConfig
from mxtrain.data.documents import SPLITS, LocalFiles, fraction
from mxtrain.data.python_source import PythonSource
from mxtrain.data.token_files import PART_BYTES, Tokens, link_tokens, open_parts, token_dtype
from mxtrain.data.tokenizer import (
    SAMPLE_BYTES,
    LoadedTokenizer,
    load_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)
from mxtrain.errors import ConfigError, one_line, require_one_of
from mxtrain.files import BUILDING, new_folder, read_json, reason
from mxtrain.launched import end_with_parent

Source = PythonSource | LocalFiles

# Increase this when the same config and files give different tokens, or a folder of the cache has other contents.
CACHE_VERSION = 10

SUMMARY, TOKENIZER, TOKENS = "prepared.json", "tokenizer", "tokens"
HELD_OUT = "held_out"
"""In the identity of a run's data: share of a stream's documents that training does not read"""
WORDS = {"tokenizer": "tokenizer", "train": "training text", "validation": "validation text", "dtype": "token size"}
WORDS |= {HELD_OUT: "share of documents held out for validation"}
"""The parts of a data identity (``Prepared.identity``) in words"""

BATCH_CHARACTERS = 2_000_000
"""Text of a row: much work beside a row's costs, and little memory"""
ROWS_IN_MEMORY = 8
"""Rows that a process collects before it writes them"""


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
    separators: str = ""
    """Which tokens separate documents, in words, or that they were tokenized before; "" if none do"""

    @property
    def line(self) -> str:
        """The text in one line, with all that is left out."""
        tokens = f"{self.train_tokens + self.validation_tokens:,} tokens"  # where documents do not show
        text = "streamed" if self.streamed else f"{self.documents:,} documents" if self.documents else tokens
        text += f", {_megabytes(self.bytes)}" if self.bytes else ""
        text += f"; each document {self.separators}" if self.separators else ""
        return text + (f"; left out: {_in_words(self.dropped)}" if any(self.dropped.values()) else "")

    def __str__(self) -> str:
        rows = vars(self) | {"dropped": _in_words(self.dropped)}
        texts = {name: f"{value:,}" if type(value) is int else value for name, value in rows.items() if value}
        return "\n".join(f"{name.replace('_', ' '):<20}  {text}" for name, text in texts.items())


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _in_words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


@dataclass(frozen=True)
class Prepared:
    """A tokenizer and the tokenized text. Streamed datasets have no tokenized text."""

    tokenizer: Path
    """Folder with tokenizer.json and tokenizer_config.json"""
    tokenizer_sha256: str
    """See ``tokenizer_hash``"""
    train: Tokens | None
    validation: Tokens | None
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
        f"{words} {str(actual.get(key, 'none')):.12} instead of {str(expected.get(key, 'none')):.12}"
        for key, words in WORDS.items()
        if actual.get(key) != expected.get(key)
    )


def prepare(
    config: DataConfig,
    progress: Callable[[str], None] = print,
    stream: Callable[[], Iterable[str]] | None = None,
) -> Prepared:
    """Load the tokenizer and the tokenized text of ``config`` from the cache, or build them first.

    The cache key is a hash of the config and of the files' paths, sizes and times, so edited files are built again.
    With ``config.prepared`` exactly that text is loaded and no source is read.

    ``progress`` is called with a line at every stage of a build. ``stream`` returns the texts on which to train a
    tokenizer, and is required if ``config.dataset`` is not in DATASETS. Streamed text is not tokenized here.
    """
    if stream is None:
        require_one_of(f"{config.section}.dataset", config.dataset, DATASETS)
        if config.dataset == "hf":
            from mxtrain.data.streams import hub_texts  # which needs PyTorch

            stream = partial(hub_texts, config)
    tokenizer = _existing_tokenizer(config) if config.tokenizer_path else None
    if config.prepared:
        prepared = load_text(_chosen_folder(config), config.tokenizer_path)
        if prepared.report.dataset != config.dataset:
            raise ConfigError(
                f"data.prepared = {config.prepared!r} is a text of {config.section}.dataset = "
                f"{prepared.report.dataset!r}, not {config.dataset!r}; set {config.section}.dataset to that "
                "name, or leave data.prepared empty"
            )
        return prepared
    if stream and tokenizer:  # nothing to build
        path = Path(config.tokenizer_path)
        report = TextReport(config.dataset, str(path), tokenizer.size, 0, True, separators=tokenizer.separators)
        return Prepared(path, tokenizer_hash(path), None, None, report, None)
    source = None
    if not stream:
        size = tokenizer.size if tokenizer else 0
        source = PythonSource(config) if config.dataset == "python" else LocalFiles(config, size)
    folder = config.cache_path() / _key(config, source, tokenizer)
    if not (folder / SUMMARY).exists():
        _build_or_wait(config, source, stream, folder, progress)
    return load_text(folder, config.tokenizer_path)


def check_source(config: DataConfig) -> None:
    """Raise ConfigError for what ``prepare`` would find before it reads a text: of tokenizers, names and formats."""
    size = _existing_tokenizer(config).size if config.tokenizer_path else 0
    if config.prepared:
        _chosen_folder(config)
    elif config.dataset == "files":
        LocalFiles(config, size)


def load_text(folder: Path, tokenizer_path: str = "") -> Prepared:
    """Load the prepared text in ``folder``.

    ``tokenizer_path`` is the folder of the tokenizer; "" stands for the one with which the text was tokenized.
    """
    try:
        summary = read_json(folder / SUMMARY)
        report = TextReport(**summary["report"] | {"folder": str(folder)})
        tokens, rows = {}, _rows(folder) if (folder / TOKENS).exists() else None
        for split, facts in summary["tokens"].items():
            tokens[split] = open_parts(folder, facts) if rows is None else _column(rows, split, **facts)
        expected, path = summary["tokenizer"]["sha256"], Path(tokenizer_path or summary["tokenizer"]["path"])
        path = path if path.name else folder / TOKENIZER
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"the prepared text {str(folder)!r} cannot be read ({one_line(error)})"
        raise ConfigError(f"{problem}; remove the folder, and the next start prepares the text again") from error
    if tokenizer_hash(path) != expected:
        raise ConfigError(
            f"model.hf_assets_path = {str(path)!r} is not the tokenizer of the prepared text {folder.name!r}; give "
            f"the tokenizer of SHA-256 {expected[:12]} (runs keep theirs in their folder), or leave data.prepared empty"
        )
    return Prepared(path, expected, tokens.get("train"), tokens.get("validation"), report, folder)


def _existing_tokenizer(config: DataConfig) -> LoadedTokenizer:
    tokenizer = load_tokenizer(Path(config.tokenizer_path))
    if not (tokenizer.separators or config.unseparated or config.prepared):
        raise ConfigError(
            f"model.hf_assets_path = {config.tokenizer_path!r} has neither a bos nor an eos token, so nothing would "
            "separate documents: name one in tokenizer_config.json, or set data.unseparated = true"
        )
    return tokenizer


def _chosen_folder(config: DataConfig) -> Path:
    is_path = os.sep in config.prepared
    folder = Path(os.path.expanduser(config.prepared)).absolute() if is_path else config.cache_path() / config.prepared
    if not folder.is_dir():
        raise ConfigError(
            f"data.prepared = {config.prepared!r} names {str(folder)!r}, which does not exist; leave it empty to "
            "prepare the text from its source"
        )
    return folder


def _key(config: DataConfig, source: Source | None, tokenizer: LoadedTokenizer | None) -> str:
    facts = {
        "version": CACHE_VERSION,
        "config": config.identity(),
        # Special tokens may stand in files that the hash leaves out.
        "tokenizer": tokenizer and [tokenizer_hash(Path(config.tokenizer_path)), tokenizer.bos_id, tokenizer.eos_id],
        "listing": source.listing if source else None,
    }
    return f"{config.dataset}-{sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]}"


def _build_or_wait(
    config: DataConfig, source: Source | None, stream: Callable | None, folder: Path, progress: Callable[[str], None]
) -> None:
    """Build ``folder``, unless another process has just done so."""
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{folder}.lock").touch()  # ``filelock`` waits for ever for a file that cannot be made
        progress(f"preparing dataset {config.dataset!r} in {folder}, or waiting for another process")
        with FileLock(f"{folder}.lock"):
            if not (folder / SUMMARY).exists():
                for left in folder.parent.glob(f"{folder.name}{BUILDING}-*"):  # by a killed process
                    shutil.rmtree(left, ignore_errors=True)
                with new_folder(folder, lambda existing: (existing / SUMMARY).exists()) as building:
                    _build(building, config, source, stream, progress)
                progress(f"prepared dataset {config.dataset!r}")
    except OSError as error:  # sources raise ConfigError, so this is about the cache
        raise ConfigError(
            f"data.cache_dir = {config.cache_dir!r}: cannot write {str(folder)!r} ({reason(error)}); make room, or "
            "set data.cache_dir or $MXTRAIN_CACHE to a folder that can be written"
        ) from error


def _build(
    folder: Path, config: DataConfig, source: Source | None, stream: Callable | None, progress: Callable[[str], None]
) -> None:
    """Write the tokenizer and, unless the text is streamed, the tokens into ``folder``."""
    facts, counts = {}, {}
    if source and source.token_files:  # first, because it refuses ids without a tokenizer
        facts, counts = link_tokens(source, folder, config)
    elif not config.tokenizer_path:
        texts = _training_texts(config, source) if source else stream()
        train_tokenizer(texts, config.vocab_size, folder / TOKENIZER, progress)
    path = Path(config.tokenizer_path or folder / TOKENIZER)
    tokenizer = load_tokenizer(path)
    if source and not facts:
        facts, counts = _tokenize(folder, config, source, path, progress)
    if source:
        counts |= {"files": len(source.listing), "dropped": dict(source.dropped)}
    report = TextReport(
        dataset=config.dataset,
        folder="",
        vocab_size=tokenizer.size,
        requested_vocab_size=0 if config.tokenizer_path else config.vocab_size,
        streamed=source is None,
        separators="is tokenized already" if source and source.has_ids else tokenizer.separators,
        **counts,
    )
    summary = {
        "report": asdict(report),
        "config": asdict(config),
        "tokenizer": {"path": config.tokenizer_path, "sha256": tokenizer_hash(path)},
        "tokens": facts,
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def _training_texts(config: DataConfig, source: Source) -> list[str]:
    """Return the training texts with the smallest hashes, in order: those that fit into SAMPLE_BYTES, at least one."""
    kept, size = [], 0
    for number, document in enumerate(source.documents()):
        if not document.is_held_out(config.validation_share):
            heappush(kept, (-fraction(document.key, "tokenizer"), number, document))
            size += document.size
        while size > SAMPLE_BYTES and len(kept) > 1:
            size -= heappop(kept)[-1].size
    return [document.text for *_, document in sorted(kept, key=itemgetter(1))]


def _tokenize(
    folder: Path, config: DataConfig, source: Source, tokenizer: Path, progress: Callable[[str], None]
) -> tuple[dict[str, dict], dict[str, int]]:
    """Write the tokens into ``folder``. Return their dtypes and hashes by split, and the counts of a ``TextReport``."""
    import datasets
    import pyarrow as pa
    from datasets.exceptions import DatasetGenerationError

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    counts, dtype = Counter(), token_dtype(load_tokenizer(tokenizer).size)
    ids = pa.list_(pa.from_numpy_dtype(dtype))
    read = {"texts": pa.list_(pa.string()), "ids": pa.list_(ids), "is_held_out": pa.list_(pa.bool_())}
    try:
        texts = datasets.Dataset.from_generator(
            partial(_batches, source, config, counts),
            features=datasets.Features.from_arrow_schema(pa.schema(read)),
            cache_dir=str(folder / "text"),
            writer_batch_size=ROWS_IN_MEMORY,
        )
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None
    processes = min(len(os.sched_getaffinity(0)), len(texts))
    progress(f"tokenizing {_megabytes(counts['bytes'])} of text in {processes} process(es)")
    if processes > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are not in a forked process
    _of_process.cache_clear()  # the tokenizer's files may have changed
    environment = os.environ
    rows = texts.map(
        partial(_encode, str(tokenizer), os.getpid()),
        num_proc=processes if processes > 1 else None,
        remove_columns=list(read),
        features=datasets.Features.from_arrow_schema(pa.schema(dict.fromkeys(SPLITS, ids))),
        writer_batch_size=ROWS_IN_MEMORY,
        new_fingerprint=folder.name,
    )
    # After several processes, datasets leaves a copy here. Older references would miss its changes.
    os.environ = environment  # noqa: B003
    rows.save_to_disk(folder / TOKENS)
    shutil.rmtree(folder / "text")
    rows = _rows(folder)
    ends = _ends_of_parts(rows, np.dtype(dtype).itemsize)
    tokens = {split: _column(rows, split, dtype).hashed(ends[split]) for split in SPLITS}
    counts.update({f"{split}_tokens": len(tokens[split]) for split in SPLITS})
    return {split: {"dtype": dtype, "sha256": tokens[split].sha256} for split in SPLITS}, dict(counts)


def _batches(source: Source, config: DataConfig, counts: Counter) -> Iterator[dict]:
    """Yield rows of documents: texts, or None and token ids. ``counts`` gets the counts of a ``TextReport``."""
    row, size = {"texts": [], "ids": [], "is_held_out": []}, 0
    for document in source.documents():
        is_text, is_held_out = isinstance(document.text, str), document.is_held_out(config.validation_share)
        row["texts"].append(document.text if is_text else None)
        row["ids"].append([] if is_text else document.text)
        row["is_held_out"].append(is_held_out)
        counts.update(documents=1, validation_documents=int(is_held_out), bytes=document.size)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield row
            row, size = {name: [] for name in row}, 0
    if not counts["documents"]:
        where = f" ({config.section}.dataset_path = {config.path!r})" if config.path else ""
        limit = f" within data.max_bytes = {config.max_bytes}" if config.max_bytes else ""
        raise ConfigError(f"{config.section}.dataset = {config.dataset!r}{where} holds no text{limit}")
    if size:
        yield row


def _encode(tokenizer: str, parent: int, row: dict) -> dict[str, np.ndarray]:
    """Return the tokens of a row of ``_batches``, each text ``bos ... eos``, by split."""
    loaded = _of_process(tokenizer, parent, os.getpid())
    before, after = ([] if token is None else [token] for token in (loaded.bos_id, loaded.eos_id))
    texts = [text for text in row["texts"] if text is not None]
    encodings = iter(loaded.encoder.encode_batch_fast(texts, add_special_tokens=False))
    tokens = {split: [] for split in SPLITS}
    for text, ids, is_held_out in zip(row["texts"], row["ids"], row["is_held_out"], strict=True):
        tokens[SPLITS[is_held_out]] += ids if text is None else [*before, *next(encodings).ids, *after]
    return {split: np.array(ids, token_dtype(loaded.size)) for split, ids in tokens.items()}


@cache
def _of_process(tokenizer: str, parent: int, process: int) -> LoadedTokenizer:
    """Load a tokenizer once in each process, which ends with its parent."""
    if process != parent:
        end_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to this process, too: the parent decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return load_tokenizer(Path(tokenizer))


def _rows(folder: Path):
    from datasets import load_from_disk

    return load_from_disk(folder / TOKENS)


def _column(rows, split: str, dtype: str, sha256: str = "") -> Tokens:
    return Tokens([chunk.flatten() for chunk in rows.data.column(split).chunks], dtype, sha256)


def _ends_of_parts(rows, itemsize: int) -> dict[str, list[int]]:
    """Return where the parts of the text end, by split: after the row with which training has PART_BYTES."""
    from pyarrow.compute import list_value_length

    lengths = {s: np.concatenate([list_value_length(c) for c in rows.data.column(s).chunks]) for s in SPLITS}
    size, last = 0, []
    for row, count in enumerate(lengths["train"].tolist()):
        size += count * itemsize
        if size >= PART_BYTES:
            size, last = 0, [*last, row]
    return {split: [*np.cumsum(lengths[split])[last].tolist(), int(lengths[split].sum())] for split in SPLITS}
