"""Turns documents into tokens on all cores: processes take batches of documents, and the results keep their order.

With the threads of ``tokenizers`` alone, all cores would wait for one while it reads text and packs ids.
"""

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from mxtrain.data.documents import Document
from mxtrain.data.tokenizer import LoadedTokenizer
from mxtrain.errors import ConfigError
from mxtrain.launched import end_with_parent

SPLITS = ("train", "validation")

# Text per task: much work beside a task's costs, and little memory.
BATCH_CHARACTERS = 2_000_000
WAITING_TASKS = 2
"""Batches per process that are read ahead"""


class Encoded(NamedTuple):
    """A batch of documents."""

    content: dict[str, bytes]
    """Split -> its documents' token ids, each ``bos ... eos``"""
    counts: Counter[str]
    """Counts of a ``TextReport``"""


def token_dtype(vocabulary: int) -> str:
    """Return the narrowest type that holds the largest id."""
    return "<u2" if vocabulary <= 1 << 16 else "<u4"


def encode(
    documents: Iterable[Document],
    tokenizer: LoadedTokenizer,
    validation_share: float,
    expected_bytes: int,
    skip: int = 0,
) -> Iterator[Encoded]:
    """Yield all documents in batches, after the first ``skip`` batches. Raises ConfigError if a process dies."""
    processes = min(len(os.sched_getaffinity(0)), expected_bytes // BATCH_CHARACTERS)
    work, batches = partial(_encode, tokenizer, validation_share), islice(_batches(documents), skip, None)
    yield from map(work, batches) if processes < 2 else _on_processes(processes, work, batches)


def _on_processes(processes: int, work: Callable, batches: Iterable[list[Document]]) -> Iterator[Encoded]:
    # Forked: a user's script that calls ``prepare`` need not guard its main module, and nothing is imported again.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, context, initializer=_start, initargs=(work, os.getpid()))
    waiting = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_work, batch))
            if len(waiting) > WAITING_TASKS * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ConfigError(
            "a process that tokenizes text was killed, perhaps for lack of memory: prepare the text again, with more "
            "memory or on fewer cores (taskset -c 0-3)"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start(work: Callable, parent: int) -> None:
    global _work_of_process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to this process, too: the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are not in a forked process
    _work_of_process = work


def _work(batch: list[Document]) -> Encoded:
    return _work_of_process(batch)


def _encode(tokenizer: LoadedTokenizer, validation_share: float, batch: list[Document]) -> Encoded:
    before, after = ([] if token is None else [token] for token in (tokenizer.bos_id, tokenizer.eos_id))
    texts = [document.text for document in batch if isinstance(document.text, str)]
    encodings = iter(tokenizer.encoder.encode_batch_fast(texts, add_special_tokens=False))
    dtype, parts, counts = token_dtype(tokenizer.size), {split: [] for split in SPLITS}, Counter()
    for document in batch:
        held_out = document.is_held_out(validation_share)
        split, ids = SPLITS[held_out], document.text
        if isinstance(ids, str):
            ids = before + next(encodings).ids + after
        parts[split].append(np.array(ids, dtype).tobytes())
        counts.update({"documents": 1, "validation_documents": int(held_out), f"{split}_tokens": len(ids)})
        counts["bytes"] += document.size
    return Encoded({split: b"".join(contents) for split, contents in parts.items()}, counts)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
