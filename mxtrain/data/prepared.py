"""Builds the tokenizer and the tokenized text of a DataConfig, once: later calls load the result from the cache."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from mxtrain.data.config import DATASETS, DataConfig
from mxtrain.data.documents import Source, fraction, is_held_out
from mxtrain.data.hub import open_stream, stream_texts
from mxtrain.data.local_files import LocalFiles
from mxtrain.data.progress import Progress
from mxtrain.data.python_source import PythonSource
from mxtrain.data.text_report import TextReport
from mxtrain.data.token_store import TokenFile, tokenize
from mxtrain.data.tokenizer import SAMPLE_BYTES, load_tokenizer, require_tokenizer, tokenizer_hash, train_tokenizer
from mxtrain.errors import ConfigError, require_one_of

# Increase this when the same config and files give different tokens, so that old results are not used.
CACHE_VERSION = 1

SUMMARY = "prepared.json"

WAIT_SECONDS = 10.0
"""Interval between progress lines while another process builds"""

HEAD_START_SECONDS = 10.0
"""Local ranks above 0 wait this long for local rank 0 to start building, because launchers show its output"""


@dataclass(frozen=True)
class Prepared:
    """A tokenizer and the tokenized text. Streamed datasets have no tokenized text."""

    tokenizer: Path
    """Folder with tokenizer.json and tokenizer_config.json"""

    train: TokenFile | None
    validation: TokenFile | None
    report: TextReport


def prepare(
    config: DataConfig,
    progress: Callable[[str], None] = print,
    stream: Callable[[], Iterable[str]] | None = None,
) -> Prepared:
    """Load the tokenizer and the tokenized text of ``config`` from the cache, or build them first.

    The cache key is a hash of the config and of the files' paths, sizes and times, so edited files are built again.
    One process builds, under a lock; the others wait and load. Under torchrun local rank 0 builds. An interrupted
    build is never used as a result.

    Args:
        config: the text and the tokenizer.
        progress: called with a line every few seconds during a build, and not called when loading.
        stream: returns the texts on which to train a tokenizer; required if ``config.dataset`` is not in DATASETS.
            Streamed text is not tokenized here.

    Raises:
        ConfigError: the text or the tokenizer is missing, unreadable or empty.
    """
    if stream is None:
        require_one_of(f"{config.section}.dataset", config.dataset, DATASETS)
        if config.dataset == "hf":
            stream = partial(_hub_texts, config)
    if config.tokenizer_path:
        require_tokenizer(Path(config.tokenizer_path))
    source = None
    if stream is None:
        source = PythonSource(config) if config.dataset == "python" else LocalFiles(config)
    elif config.tokenizer_path:
        return _existing_tokenizer(config)
    folder = config.cache_root() / _key(config, source)
    if not folder.exists():
        lines = Progress(progress)
        with _exclusive(folder, lines):
            if not folder.exists():
                lines.say(f"preparing dataset {config.dataset!r} in {folder}")
                _build(config, source, stream, folder, lines)
                lines.say(f"prepared dataset {config.dataset!r}")
    return _load(config, folder)


def _hub_texts(config: DataConfig) -> Iterator[str]:
    stream = open_stream(config.path, config.hf_config, "train", config.section)
    return stream_texts(stream, config.text_key, config.path)


def _existing_tokenizer(config: DataConfig) -> Prepared:
    size = load_tokenizer(Path(config.tokenizer_path)).size
    report = TextReport(config.dataset, config.tokenizer_path, size, requested_vocab_size=0, streamed=True)
    return Prepared(Path(config.tokenizer_path), None, None, report)


def _key(config: DataConfig, source: Source | None) -> str:
    facts = {
        "version": CACHE_VERSION,
        "config": config.identity(),
        "tokenizer": tokenizer_hash(Path(config.tokenizer_path)) if config.tokenizer_path else None,
        "listing": source.listing if source else None,
    }
    return f"{config.dataset}-{sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]}"


@contextmanager
def _exclusive(folder: Path, progress: Progress) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(f"{folder}.lock")
    if os.environ.get("LOCAL_RANK", "0") != "0":
        deadline = time.monotonic() + HEAD_START_SECONDS
        while time.monotonic() < deadline and not (folder.exists() or os.path.exists(lock.lock_file)):
            time.sleep(0.1)
    waiting = 0.0
    while True:
        try:
            lock.acquire(timeout=WAIT_SECONDS if waiting else 0)
            break
        except Timeout:
            progress.say(f"another process is preparing {folder}; waiting" + (f", {waiting:.0f} s" if waiting else ""))
            waiting += WAIT_SECONDS
    try:
        yield
    finally:
        lock.release()


def _build(
    config: DataConfig,
    source: Source | None,
    stream: Callable[[], Iterable[str]] | None,
    folder: Path,
    progress: Progress,
) -> None:
    """Build in a folder next to ``folder``, then rename, so that ``folder`` is complete once it exists."""
    building = folder.with_name(folder.name + ".building")
    shutil.rmtree(building, ignore_errors=True)  # left by a killed build; we hold the lock
    building.mkdir()
    try:
        summary = _build_in(building, config, source, stream, progress)
        summary["report"]["folder"] = str(folder)
        (building / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building)
        raise


def _build_in(
    building: Path,
    config: DataConfig,
    source: Source | None,
    stream: Callable[[], Iterable[str]] | None,
    progress: Progress,
) -> dict:
    if source:
        source.scan(progress)
    if not config.tokenizer_path:
        texts = _training_texts(config, source) if source else stream()
        train_tokenizer(_not_empty(texts, config), config.vocab_size, building / "tokenizer", progress)
    tokenizer = load_tokenizer(Path(config.tokenizer_path or building / "tokenizer"))
    report = TextReport(
        dataset=config.dataset,
        folder="",
        vocab_size=tokenizer.size,
        requested_vocab_size=0 if config.tokenizer_path else config.vocab_size,
        streamed=source is None,
    )
    files = {}
    if source:
        files, tallies = tokenize(
            source.documents(), tokenizer, building, config.validation_share, source.text_bytes, progress
        )
        train, validation = tallies["train"], tallies["validation"]
        report = replace(
            report,
            files=len(source.listing),
            documents=train.documents + validation.documents,
            bytes=train.bytes + validation.bytes,
            train_tokens=train.tokens,
            validation_documents=validation.documents,
            validation_tokens=validation.tokens,
            dropped=dict(source.dropped),
            cut=source.cut,
        )
        if not report.documents:
            raise ConfigError(f"{config.section}.dataset_path = {config.path!r} holds no text")
    return {
        "report": asdict(report),
        "config": asdict(config),
        "tokens": {split: {"dtype": file.dtype, "count": file.count} for split, file in files.items()},
    }


def _training_texts(config: DataConfig, source: Source) -> Iterator[str]:
    """Yield the training texts, thinned by hash to about SAMPLE_BYTES."""
    share = min(1.0, SAMPLE_BYTES / max(1, source.text_bytes))
    for document in source.documents():
        if not is_held_out(document.key, config.validation_share) and fraction(document.key, "tokenizer") < share:
            yield document.text


def _not_empty(texts: Iterable[str], config: DataConfig) -> Iterator[str]:
    empty = True
    for text in texts:
        empty = empty and not text.strip()
        yield text
    if empty:
        where = f" ({config.section}.dataset_path = {config.path!r})" if config.path else ""
        raise ConfigError(f"{config.section}.dataset = {config.dataset!r}{where} holds no text to train a tokenizer on")


def _load(config: DataConfig, folder: Path) -> Prepared:
    summary = json.loads((folder / SUMMARY).read_text())
    tokens = {split: TokenFile(folder / f"{split}.bin", **facts) for split, facts in summary["tokens"].items()}
    tokenizer = Path(config.tokenizer_path) if config.tokenizer_path else folder / "tokenizer"
    return Prepared(tokenizer, tokens.get("train"), tokens.get("validation"), TextReport(**summary["report"]))
