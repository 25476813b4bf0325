"""Builds the tokenizer and the tokenized text of a DataConfig, once: later calls load the result from the cache."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from mxtrain.data.cache_folders import courtesy_lock, new_folder
from mxtrain.data.config import DATASETS, DataConfig
from mxtrain.data.documents import OVER_LIMIT, Source, fraction, is_held_out
from mxtrain.data.hub import hold_out, open_stream, stream_texts
from mxtrain.data.local_files import LocalFiles
from mxtrain.data.prepared_text import SUMMARY, TOKENIZER, DamagedText, Prepared, load_text, write_summary
from mxtrain.data.progress import Progress, one_line
from mxtrain.data.python_source import PythonSource
from mxtrain.data.text_report import TextReport
from mxtrain.data.token_store import tokenize
from mxtrain.data.tokenizer import SAMPLE_BYTES, LoadedTokenizer, load_tokenizer, tokenizer_hash, train_tokenizer
from mxtrain.errors import ConfigError, require_one_of

logger = logging.getLogger(__name__)

# Increase this when the same config and files give different tokens, or a folder of the cache has other contents.
CACHE_VERSION = 5


def prepare(
    config: DataConfig,
    progress: Callable[[str], None] = print,
    stream: Callable[[], Iterable[str]] | None = None,
    *,
    reads_tokens: bool = True,
) -> Prepared:
    """Load the tokenizer and the tokenized text of ``config`` from the cache, or build them first.

    The cache key is a hash of the config and of the files' paths, sizes and times, so edited files are built again.
    ``Prepared.identity`` depends on the contents alone. An interrupted build is never used as a result. Tokens in the
    cache are read and hashed, about 1 GB a second, and a damaged result is built again, with a warning. With
    ``config.prepared`` exactly that text is loaded and no source is read.

    Args:
        config: the text and the tokenizer.
        progress: called with a line every few seconds during a build, and not called when loading.
        stream: returns the texts on which to train a tokenizer; required if ``config.dataset`` is not in DATASETS.
            Streamed text is not tokenized here.
        reads_tokens: False leaves the tokens unread, where another process on this machine has just read them.

    Raises:
        ConfigError: the text or the tokenizer is missing, unreadable or empty, or the cache cannot be written.
    """
    if stream is None:
        require_one_of(config.setting("dataset"), config.dataset, DATASETS)
        if config.dataset == "hf":
            stream = partial(_hub_texts, config)
    tokenizer = _existing_tokenizer(config) if config.tokenizer_path else None
    if config.prepared:
        return _chosen(config, reads_tokens)
    source = None
    if stream is None:
        source = PythonSource(config) if config.dataset == "python" else LocalFiles(config)
    elif tokenizer:
        path, separators = config.tokenizer_path, tokenizer.separators
        report = TextReport(config.dataset, path, tokenizer.size, 0, streamed=True, separators=separators)
        return Prepared(Path(path), tokenizer_hash(Path(path)), None, None, report, None)
    folder = config.cache_root() / _key(config, source, tokenizer)
    prepared, _ = _in_cache(config, folder, reads_tokens)
    if prepared is None:
        prepared = _build_or_wait(config, source, stream, folder, Progress(progress))
    _note_use(folder)
    return prepared


def _chosen(config: DataConfig, reads_tokens: bool) -> Prepared:
    """Load the text that ``config.prepared`` names."""
    setting = f"data.prepared = {config.prepared!r}"
    is_path = os.sep in config.prepared
    folder = Path(os.path.expanduser(config.prepared)).absolute() if is_path else config.cache_path() / config.prepared
    if not folder.is_dir():
        raise ConfigError(
            f"{setting}: there is no folder {str(folder)!r}; 'mxtrain cache' lists the prepared texts, and an empty "
            "value prepares the text from its source"
        )
    try:
        prepared = load_text(folder, config.tokenizer_path, reads_tokens=reads_tokens)
    except DamagedText as error:
        raise ConfigError(
            f"{setting} is damaged ({error}); leave data.prepared empty to prepare the text again from its source"
        ) from error
    if prepared.report.dataset != config.dataset:
        raise ConfigError(
            f"{setting} is a text of {config.section}.dataset = {prepared.report.dataset!r}, not {config.dataset!r}; "
            "set the dataset to that name, or leave data.prepared empty"
        )
    _note_use(folder)
    return prepared


def _in_cache(config: DataConfig, folder: Path, reads_tokens: bool = True) -> tuple[Prepared | None, str]:
    """Return the text in ``folder``, or None and the damage: "" if there is no folder."""
    if not folder.exists():
        return None, ""
    try:
        return load_text(folder, config.tokenizer_path, reads_tokens=reads_tokens), ""
    except DamagedText as error:
        return None, str(error)


def _note_use(folder: Path) -> None:
    """Set the time of the last use, which ``mxtrain cache`` shows."""
    with suppress(OSError):  # a cache that others own
        os.utime(folder / SUMMARY)


def _hub_texts(config: DataConfig) -> Iterator[str]:
    stream = open_stream(config.path, config.hf_config, "train", config.section).rows
    stream = hold_out(stream, config.text_key, config.stream_share, held_out=False)
    return stream_texts(stream, config.text_key, config.path, config.section)


def _existing_tokenizer(config: DataConfig) -> LoadedTokenizer:
    tokenizer = load_tokenizer(Path(config.tokenizer_path))
    if not (tokenizer.separators or config.unseparated or config.prepared):
        raise ConfigError(
            f"model.hf_assets_path = {config.tokenizer_path!r} has neither a bos nor an eos token, so nothing would "
            "separate documents: name one in tokenizer_config.json, or set data.unseparated = true"
        )
    return tokenizer


def _key(config: DataConfig, source: Source | None, tokenizer: LoadedTokenizer | None = None) -> str:
    facts = {
        "version": CACHE_VERSION,
        "config": config.identity(),
        "tokenizer": tokenizer_hash(Path(config.tokenizer_path)) if config.tokenizer_path else None,
        "listing": source.listing if source else None,
    }
    if corrections := [*(source.corrections if source else ()), *(tokenizer.corrections if tokenizer else ())]:
        facts["corrections"] = corrections
    return f"{config.dataset}-{sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]}"


def _build_or_wait(
    config: DataConfig,
    source: Source | None,
    stream: Callable[[], Iterable[str]] | None,
    folder: Path,
    progress: Progress,
) -> Prepared:
    with courtesy_lock(folder, progress):
        prepared, damage = _in_cache(config, folder)
        if prepared is None:
            if damage:
                logger.warning(f"the prepared text {folder} is damaged ({damage}) and is prepared again")
            progress.say(f"preparing dataset {config.dataset!r} in {folder}")
            _build(config, source, stream, folder, progress)
            progress.say(f"prepared dataset {config.dataset!r}")
            prepared = load_text(folder, config.tokenizer_path)
    return prepared


def _build(
    config: DataConfig,
    source: Source | None,
    stream: Callable[[], Iterable[str]] | None,
    folder: Path,
    progress: Progress,
) -> None:
    try:
        with new_folder(folder, lambda existing: _in_cache(config, existing)[0] is not None) as building:
            _build_in(building, config, source, stream, progress)
    except OSError as error:  # sources raise ConfigError, so this is about the cache
        raise ConfigError(
            f"data.cache_dir = {config.cache_dir!r}: cannot write {str(folder)!r} ({error.strerror or one_line(error)})"
            "; make room, or set data.cache_dir or $MXTRAIN_CACHE to a folder that can be written"
        ) from error


def _build_in(
    building: Path,
    config: DataConfig,
    source: Source | None,
    stream: Callable[[], Iterable[str]] | None,
    progress: Progress,
) -> None:
    if source:
        source.scan(progress)
    if not config.tokenizer_path:
        texts = _training_texts(config, source) if source else stream()
        train_tokenizer(_not_empty(texts, config, source), config.vocab_size, building / TOKENIZER, progress)
    tokenizer_folder = Path(config.tokenizer_path or building / TOKENIZER)
    tokenizer = load_tokenizer(tokenizer_folder)
    report = TextReport(
        dataset=config.dataset,
        folder="",
        vocab_size=tokenizer.size,
        requested_vocab_size=0 if config.tokenizer_path else config.vocab_size,
        streamed=source is None,
        separators=tokenizer.separators,
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
            where = f"{config.setting('path')} = {config.path!r}"
            raise ConfigError(f"{where} holds no text{_within_limit(config, source)}")
    write_summary(building, config, tokenizer_hash(tokenizer_folder), files, report)


def _training_texts(config: DataConfig, source: Source) -> Iterator[str]:
    """Yield the training texts, thinned by hash to about SAMPLE_BYTES."""
    share = min(1.0, SAMPLE_BYTES / max(1, source.text_bytes))
    for document in source.documents():
        held_out = is_held_out(document.file or document.key, config.validation_share)
        if not held_out and fraction(document.key, "tokenizer") < share:
            yield document.text


def _not_empty(texts: Iterable[str], config: DataConfig, source: Source | None) -> Iterator[str]:
    empty = True
    for text in texts:
        empty = empty and not text.strip()
        yield text
    if empty:
        where = f" ({config.setting('path')} = {config.path!r})" if config.path else ""
        raise ConfigError(
            f"{config.setting('dataset')} = {config.dataset!r}{where} holds no text to train a tokenizer on"
            f"{_within_limit(config, source)}"
        )


def _within_limit(config: DataConfig, source: Source | None) -> str:
    """The limit on the text in words, if it has left any out."""
    is_limited = source and any(reason.startswith(OVER_LIMIT) for reason in source.dropped)
    return f" within data.max_bytes = {config.max_bytes}" if is_limited else ""
