"""Builds the tokenizer and the tokenized text of a DataConfig, once: later calls load the result from the cache."""

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from hashlib import sha256
from heapq import heappop, heappush
from operator import itemgetter
from pathlib import Path

from mxtrain.data.config import DATASETS, DataConfig
from mxtrain.data.documents import OVER_LIMIT, Progress, Source, fraction, hub_texts, megabytes, one_line, open_stream
from mxtrain.data.local_files import LocalFiles
from mxtrain.data.python_source import PythonSource
from mxtrain.data.store import (
    PROGRESS,
    SUMMARY,
    TOKENIZER,
    DamagedText,
    Prepared,
    TextReport,
    goes_on,
    load_text,
    remember_files,
    tokenize,
    write_summary,
)
from mxtrain.data.tokenized import link_tokens
from mxtrain.data.tokenizer import (
    SAMPLE_BYTES,
    LoadedTokenizer,
    NoText,
    load_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)
from mxtrain.errors import ConfigError, require_one_of
from mxtrain.files import new_folder

logger = logging.getLogger(__name__)

# Increase this when the same config and files give different tokens, or a folder of the cache has other contents.
CACHE_VERSION = 9


def prepare(
    config: DataConfig,
    progress: Callable[[str], None] = print,
    stream: Callable[[], Iterable[str]] | None = None,
    *,
    reads_tokens: bool = True,
) -> Prepared:
    """Load the tokenizer and the tokenized text of ``config`` from the cache, or build them first.

    The cache key is a hash of the config and of the files' paths, sizes and times, so edited files are built again.
    Each machine reads tokens in the cache once for their hash, about 1 GB a second, and builds a damaged text again,
    with a warning. Shards of a long text are read when they are first used (see ``store.SHARDS_AT_START``).
    With ``config.prepared`` exactly that text is loaded and no source is read.

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
        require_one_of(f"{config.section}.dataset", config.dataset, DATASETS)
        if config.dataset == "hf":
            stream = partial(hub_texts, config)
    tokenizer = _existing_tokenizer(config) if config.tokenizer_path else None
    size = tokenizer.size if tokenizer else 0
    if config.prepared:
        prepared = _chosen(config, reads_tokens)
    elif stream and tokenizer:  # nothing to build
        path = Path(config.tokenizer_path)
        report = TextReport(config.dataset, str(path), tokenizer.size, 0, True, separators=tokenizer.separators)
        return Prepared(path, tokenizer_hash(path), None, None, report, None)
    else:
        source = None if stream else PythonSource(config) if config.dataset == "python" else LocalFiles(config, size)
        folder = config.cache_path() / _key(config, source, tokenizer)
        prepared, _ = _in_cache(config, folder, reads_tokens)
        prepared = prepared or _build_or_wait(config, source or stream, folder, Progress(progress))
    with suppress(OSError):  # a cache that others own
        os.utime(prepared.folder / SUMMARY)  # the last use, for ``mxtrain cache``
    return prepared


def check_source(config: DataConfig) -> None:
    """Raise ConfigError for what ``prepare`` would find before it reads a text: of tokenizers, names and formats."""
    size = _existing_tokenizer(config).size if config.tokenizer_path else 0
    if config.prepared:
        _chosen_folder(config)
    elif config.dataset == "files":
        LocalFiles(config, size)
    elif config.dataset == "hf" and not config.path:
        open_stream(config.path, section=config.section)


def _existing_tokenizer(config: DataConfig) -> LoadedTokenizer:
    tokenizer = load_tokenizer(Path(config.tokenizer_path))
    if not (tokenizer.separators or config.unseparated or config.prepared):
        raise ConfigError(
            f"model.hf_assets_path = {config.tokenizer_path!r} has neither a bos nor an eos token, so nothing would "
            "separate documents: name one in tokenizer_config.json, or set data.unseparated = true"
        )
    return tokenizer


def _chosen_folder(config: DataConfig) -> Path:
    """Return the folder of the text that ``config.prepared`` names."""
    is_path = os.sep in config.prepared
    folder = Path(os.path.expanduser(config.prepared)).absolute() if is_path else config.cache_path() / config.prepared
    if not folder.is_dir():
        raise ConfigError(
            f"data.prepared = {config.prepared!r}: there is no folder {str(folder)!r}; 'mxtrain cache' lists the "
            "prepared texts, and an empty value prepares the text from its source"
        )
    return folder


def _chosen(config: DataConfig, reads_tokens: bool) -> Prepared:
    """Load the text that ``config.prepared`` names."""
    setting, folder = f"data.prepared = {config.prepared!r}", _chosen_folder(config)
    prepared, damage = _in_cache(config, folder, reads_tokens)
    if prepared is None:
        raise ConfigError(
            f"{setting} is damaged ({damage}); leave data.prepared empty to prepare the text again from its source"
        )
    if prepared.report.dataset != config.dataset:
        raise ConfigError(
            f"{setting} is a text of {config.section}.dataset = {prepared.report.dataset!r}, not {config.dataset!r}; "
            "set the dataset to that name, or leave data.prepared empty"
        )
    return prepared


def _in_cache(config: DataConfig, folder: Path, reads_tokens: bool = True) -> tuple[Prepared | None, str]:
    """Return the text in ``folder``, or None and the damage: "" if there is no folder."""
    try:
        return load_text(folder, config.tokenizer_path, reads_tokens=reads_tokens), ""
    except DamagedText as error:
        return None, str(error) if folder.exists() else ""


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
    config: DataConfig, text: Source | Callable[[], Iterable[str]], folder: Path, progress: Progress
) -> Prepared:
    """Build ``folder`` from a source, or a tokenizer from streamed texts, unless another process has just done so."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _courtesy_lock(folder, progress) as is_alone:
            prepared, damage = _in_cache(config, folder)
            if prepared is not None:
                return prepared
            if damage:
                logger.warning(f"the prepared text {folder} is damaged ({damage}) and is prepared again")
            progress.say(f"preparing dataset {config.dataset!r} in {folder}")
            may_go_on = goes_on if is_alone else lambda unfinished: False
            with new_folder(folder, lambda existing: _in_cache(config, existing)[0] is not None, may_go_on) as building:
                _build(building, config, text, progress)
            progress.say(f"prepared dataset {config.dataset!r}")
            prepared = load_text(folder, config.tokenizer_path)
            remember_files(prepared)
            return prepared
    except OSError as error:  # sources raise ConfigError, so this is about the cache
        raise ConfigError(
            f"data.cache_dir = {config.cache_dir!r}: cannot write {str(folder)!r} "
            f"({error.strerror or one_line(error)}); make room, or set data.cache_dir or $MXTRAIN_CACHE to a "
            "folder that can be written"
        ) from error


@contextmanager
def _courtesy_lock(folder: Path, progress: Progress) -> Iterator[bool]:
    """Hold a lock beside ``folder``, which saves other processes the work. Yields False where locks do not work.

    The lock is not needed: the first process that gives its new folder the name wins. ``filelock`` would wait for ever
    where a lock cannot be made, or for a process that was killed on another machine.
    """
    path, is_held = f"{folder}.lock", False
    with ExitStack() as stack:
        with suppress(OSError):  # no locks here; or the folder cannot be written, which the caller will find out
            while not is_held:
                file = stack.enter_context(open(path, "w"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    progress.say(f"another process is preparing {folder}; waiting")
                    fcntl.flock(file, fcntl.LOCK_EX)
                # The process that held it has removed the file, and a third one may have made a new one.
                is_held = os.path.exists(path) and os.path.samestat(os.fstat(file.fileno()), os.stat(path))
        try:
            yield is_held
        finally:
            with suppress(OSError):
                os.unlink(path)


def _build(folder: Path, config: DataConfig, text: Source | Callable[[], Iterable[str]], progress: Progress) -> None:
    """Write the tokenizer and, unless the text is streamed, the tokens into ``folder``."""
    source = None if callable(text) else text
    if source:
        source.scan(progress)
    files, counts = {}, {}
    if source and source.token_files:  # first, because it refuses ids without a tokenizer
        files, counts = link_tokens(source, folder, config, progress)
    elif not config.tokenizer_path and not (folder / PROGRESS).exists():
        texts = _training_texts(config, source, progress) if source else text()
        try:
            train_tokenizer(texts, config.vocab_size, folder / TOKENIZER, progress)
        except NoText:
            raise _no_text(config, source, " to train a tokenizer on") from None
    tokenizer_folder = Path(config.tokenizer_path or folder / TOKENIZER)
    tokenizer = load_tokenizer(tokenizer_folder)
    if source and not files:
        documents, share = source.documents(), config.validation_share
        files, counts = tokenize(documents, tokenizer, folder, share, source.text_bytes, progress)
        if not counts.get("documents"):
            raise _no_text(config, source)
    if source:
        counts |= {"files": len(source.listing), "dropped": dict(source.dropped), "cut": source.cut}
        counts["formats"] = dict(source.formats)
    report = TextReport(
        dataset=config.dataset,
        folder="",
        vocab_size=tokenizer.size,
        requested_vocab_size=0 if config.tokenizer_path else config.vocab_size,
        streamed=source is None,
        separators="is tokenized already" if source and source.has_ids else tokenizer.separators,
        **counts,
    )
    write_summary(folder, config, tokenizer_hash(tokenizer_folder), files, report)


def _training_texts(config: DataConfig, source: Source, progress: Progress) -> list[str]:
    """Return the training texts with the smallest hashes, in order: those that fit into SAMPLE_BYTES, at least one."""
    kept, size, read = [], 0, 0
    for number, document in enumerate(source.documents()):
        read += document.size
        progress.tick(lambda: f"looked for a sample for the tokenizer in {megabytes(read)} of text")  # noqa: B023
        if not document.is_held_out(config.validation_share):
            heappush(kept, (-fraction(document.key, "tokenizer"), number, document))
            size += document.size
        while size > SAMPLE_BYTES and len(kept) > 1:
            size -= heappop(kept)[-1].size
    return [document.text for *_, document in sorted(kept, key=itemgetter(1))]


def _no_text(config: DataConfig, source: Source | None, purpose: str = "") -> ConfigError:
    where = f" ({config.section}.dataset_path = {config.path!r})" if config.path else ""
    is_limited = source and any(reason.startswith(OVER_LIMIT) for reason in source.dropped)
    limit = f" within data.max_bytes = {config.max_bytes}" if is_limited else ""
    return ConfigError(f"{config.section}.dataset = {config.dataset!r}{where} holds no text{purpose}{limit}")
