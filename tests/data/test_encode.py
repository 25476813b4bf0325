"""Tokenizing on several processes, which this machine need not have cores for."""

import os
import signal
import time

import pytest

from mxtrain.data import encode as encode_module
from mxtrain.data.documents import Document, Progress
from mxtrain.data.encode import WAITING_TASKS, encode
from mxtrain.data.tokenizer import load_tokenizer, train_tokenizer
from mxtrain.errors import ConfigError

BATCH = 2000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, prose):
    folder = tmp_path_factory.mktemp("encode") / "tokenizer"
    train_tokenizer([prose(0)], 300, folder, Progress(lambda line: None))
    return load_tokenizer(folder)


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    monkeypatch.setattr(encode_module, "BATCH_CHARACTERS", BATCH)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})


def documents(prose, count=60):
    for i in range(count):
        yield Document(f"doc{i}", prose(i, 40) * (1 + i % 7))


def test_processes_give_what_one_gives(tokenizer, prose):
    alone, together = (list(encode(documents(prose), tokenizer, 0.3, size)) for size in (0, 3 * BATCH))
    assert alone == together and len(alone) > 5 * WAITING_TASKS
    assert all(len({len(batch.content[split]) for batch in alone}) > 5 for split in ("train", "validation"))


def test_few_batches_are_read_ahead(tokenizer, prose):
    read = []
    batches = encode((read.append(d) or d for d in documents(prose, 10_000)), tokenizer, 0.3, 3 * BATCH)
    next(batches)
    assert sum(len(d.text) for d in read) < (WAITING_TASKS * 3 + 2) * BATCH * 2
    batches.close()


class Killed(str):
    """A text whose process is killed, as for lack of memory."""

    def encode(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Unreadable(str):
    def encode(self):
        raise RuntimeError("a bug")


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [(Killed, ConfigError, "a process that tokenizes text was killed"), (Unreadable, RuntimeError, "^a bug$")],
)
def test_a_failing_process_is_one_error_and_none_is_left(tokenizer, prose, kind, error, message):
    texts = [*documents(prose, 20), Document("bad", kind("text " * 500)), *documents(prose, 20)]
    before = _children()  # of earlier tests
    with pytest.raises(error, match=message):
        list(encode(texts, tokenizer, 0.0, 3 * BATCH))
    assert set(_children()) <= set(before)


def test_the_processes_of_a_killed_one_end(tokenizer, prose):
    """It would otherwise leave one per core, which hold its memory."""
    reading, writing = os.pipe()
    if not (parent := os.fork()):
        batches = encode(documents(prose, 10_000), tokenizer, 0.0, 3 * BATCH)
        next(batches)
        os.write(writing, " ".join(map(str, _children())).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    workers = os.read(reading, 1000).split()
    os.waitpid(parent, 0)
    assert len(workers) == 3
    end = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{int(worker)}") and not _is_zombie(int(worker)) for worker in workers):
        assert time.monotonic() < end
        time.sleep(0.05)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(child) for child in file.read().split() if not _is_zombie(int(child))]


def _is_zombie(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
