"""Streams as datasets of PyTorch: for training, for validation, and held-out documents of one stream for both."""

import logging
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial
from itertools import islice
from math import gcd

import datasets
import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import IterableDataset

from mxtrain.data.config import DataConfig, held_out_share, shares_stream
from mxtrain.data.documents import TextColumn, is_held_out
from mxtrain.errors import ConfigError, raised_as

PATIENCE_ROWS = 1000

logger = logging.getLogger(__name__)


def open_stream(path: str, hf_config: str = "", split: str = "train", section: str = "training"):
    """Open a split of the Hugging Face dataset ``path``, for example "allenai/c4", without a download of the whole.

    ``hf_config`` is the dataset's configuration, for example "en", and ``section`` the TOML section of ``path``.
    Returns the rows, a ``datasets.IterableDataset``, and their version: the commit of a dataset on the hub, or a hash
    of local files' names and times; None where it is not known.
    """
    if not path:
        raise ConfigError(
            f"{section}.dataset = 'hf' needs {section}.dataset_path: the id of a Hugging Face dataset, "
            "for example 'allenai/c4' (with data.hf_config = 'en')"
        )
    settings = f"(data.hf_config = {hf_config!r}, split {split!r})"
    with raised_as(f"{section}.dataset_path = {path!r} {settings} cannot be opened as a Hugging Face dataset"):
        builder = datasets.load_dataset_builder(path, name=hf_config or None)
        return builder.as_streaming_dataset(split=split), builder.hash


def is_on_side(row: dict, text_key: str, share: float, held_out: bool) -> bool:
    """Return whether a row of a stream is held out for validation; for ``held_out = False``, whether it is not.

    A stream has no paths, so a document's text decides. Rows without text are not held out.
    """
    text = row.get(text_key)
    return held_out == (isinstance(text, str) and is_held_out(text, share))


def hub_texts(config: DataConfig) -> Iterator[str]:
    """Yield the texts of a Hugging Face dataset on which a tokenizer is trained."""
    stream, _ = open_stream(config.path, config.hf_config, "train", config.section)
    stream = filter(partial(is_on_side, text_key=config.text_key, share=config.stream_share, held_out=False), stream)
    text_of = TextColumn(config.text_key, config.path, PATIENCE_ROWS)
    yield from stream_texts(stream, text_of, f"{config.section}.dataset_path = {config.path!r}")
    text_of.require_text()


def stream_texts(rows: Iterable, text_of: Callable[[dict], str | None], setting: str) -> Iterator[str]:
    """Yield the text of every row, or "". Errors while reading become a ConfigError that begins with ``setting``."""
    with raised_as(f"{setting} cannot be read further"):
        yield from (text_of(row) or "" for row in rows)


class Stream(IterableDataset):
    """Yields one rank's samples ``({"input": tokens[:-1]}, tokens[1:])`` of a stream, each tensor int64 [seq_len].

    The rows are dealt to lanes, of which a run begins with one per rank. The documents of a lane, each with bos and
    eos, follow each other without a gap. Lanes and ranks take turns: sample g of all ranks is the next one of lane
    ``g % lanes``, and rank ``g % ranks`` gets it. The lanes stay in a resumed run, so any number of ranks goes on with
    the same samples. Ranks that share a lane all read its documents. It resumes where it stopped in every pass over the
    text, in worker processes, too, each of which reads a part of its rank's lane.

    Args:
        rows: a ``Dataset`` or an ``IterableDataset`` of the library ``datasets``.
        tokenizer: its ``encode(text, add_bos=True, add_eos=True)`` returns the ids of a document.
        rank: this data-parallel rank, and the number of ranks that read different data.
        keeps: whether a row is read; None: all are. Not ``rows.filter``: ``datasets`` 4 resumes it behind the Arrow
            table in which it was, and the rest of the table is lost.
    """

    def __init__(
        self, rows, text_of, tokenizer, seq_len: int, rank: tuple[int, int], infinite: bool, name="hf", keeps=None
    ):
        self.seq_len, self.name, self.infinite = seq_len, name, infinite
        self._rows, self._text_of, self._tokenizer, self._keeps = rows, text_of, tokenizer, keeps
        self._rank, self._ranks = rank
        self._samples = 0
        """Number of samples that all ranks have read, when each has as many as this one"""
        self._count, self._lanes = self._ranks, {}
        """Number of lanes, and those of this rank"""

    def lane(self, number: int) -> "_Lane":
        if number not in self._lanes:
            rows = deepcopy(self._rows) if self._lanes else self._rows  # ``datasets`` keeps positions in shared parts
            self._lanes[number] = _Lane(self, split_dataset_by_node(rows, number, self._count))
        return self._lanes[number]

    def ids(self, row) -> list[int]:
        is_kept = self._keeps is None or self._keeps(row)
        return self._tokenizer.encode(self._text_of(row) or "", add_bos=True, add_eos=True) if is_kept else []

    def __iter__(self):
        windows = {}
        while True:
            place, number = divmod(self._samples + self._rank, self._count)
            lane = self.lane(number)
            if number not in windows:
                windows[number] = iter(lane)
            while lane.samples <= place:  # those before are of other ranks
                if (window := next(windows[number], None)) is None:
                    return
            self._samples += self._ranks
            yield {"input": window[:-1]}, window[1:]

    def state_dict(self) -> dict:
        lanes = {number: lane.state_dict() for number, lane in self._lanes.items()}
        return {"samples": self._samples, "count": self._count, "read": lanes}

    def load_state_dict(self, *states: dict) -> None:
        """Go on after a run whose ranks had these states."""
        self._samples, self._count, self._lanes = states[0]["samples"], states[0]["count"], {}
        first, step = self._samples + self._rank, gcd(self._count, self._ranks)
        for number, lane in (item for state in states for item in state["read"].items()):
            if (number - first) % step == 0:  # else only other ranks read it
                self.lane(number).load_state_dict(lane)


class _Lane:
    """A part of a stream's rows. Yields sequences of tokens, int64 [seq_len + 1]."""

    def __init__(self, stream: Stream, rows):
        self._stream, self.rows, self._size = stream, rows, stream.seq_len + 1
        self.samples = 0
        """Number of sequences read"""
        self._tokens: list[int] = []
        self._row = 0
        """The next row of a ``Dataset``; an ``IterableDataset`` knows its own position"""
        self._resumed: dict | None = None
        """The state from which no document has been read yet: ``datasets`` would name the beginning"""

    def __iter__(self):
        read = None
        while True:
            self._resumed, rows = None, self.rows
            if isinstance(rows, Dataset):  # which cannot skip all rows
                rows = rows.skip(self._row) if self._row < len(rows) else ()
            for row in rows:
                self._tokens.extend(self._stream.ids(row))
                self._row += 1
                while len(self._tokens) >= self._size:
                    window = torch.tensor(self._tokens[: self._size])
                    self._tokens = self._tokens[self._size :]
                    self.samples += 1
                    yield window
            if not self._stream.infinite:
                logger.warning(f"Dataset {self._stream.name} has run out of data")
                return
            if read == (read := (self.samples, len(self._tokens))):
                raise ConfigError(f"dataset {self._stream.name!r} has too little text; take more, or fewer ranks")
            logger.warning(f"Dataset {self._stream.name} is being re-looped")
            self._row = 0
            if not isinstance(self.rows, Dataset):
                self.rows.set_epoch(self.rows.epoch + 1)

    def state_dict(self) -> dict:
        # A copy of the tokens: the list grows while another thread sends the state.
        state = {"samples": self.samples, "token_buffer": list(self._tokens)}
        if isinstance(self.rows, Dataset):
            return state | {"sample_idx": self._row}
        return state | {"data": self._resumed or self.rows.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.samples, self._tokens = state["samples"], list(state["token_buffer"])
        if isinstance(self.rows, Dataset):
            self._row = state["sample_idx"]
            return
        self._resumed = state["data"]
        self.rows.load_state_dict(self._resumed)
        # ``datasets`` drops the state of another epoch. ``set_epoch`` would set that of all workers.
        self.rows._epoch = self._resumed["epoch"]


class FirstSequences(IterableDataset):
    """The first ``count`` sequences of a stream, which is read once: every validation is of the same text, and of a
    stream with few held-out documents all are downloaded.

    A stream with fewer sequences is repeated, so that all ranks have as many. No worker process may read it, which
    would end with what it has read. ``source`` begins the ConfigError of a stream without a sequence.
    """

    def __init__(self, stream: Stream, count: int, source: str, note: Callable[[str], None]):
        self._stream, self._count, self._source, self._note = stream, count, source, note
        self._sequences = []

    def __iter__(self):
        if not self._sequences:
            self._note("reading the documents of the stream for validation")
        while len(self._sequences) < self._count:
            before = len(self._sequences)
            self._sequences += islice(self._stream, self._count - before)
            if len(self._sequences) == before:
                raise ConfigError(
                    f"{self._source} less text than one sequence of validation.seq_len = {self._stream.seq_len} per "
                    "data-parallel rank; take more text, or lower validation.seq_len"
                )
        return iter(self._sequences)


def training_stream(job_config, tokenizer, rank: tuple[int, int]) -> tuple[Stream, str | None]:
    """Return one rank's part of the training stream, without the documents held out for validation, and its version."""
    path = job_config.training.dataset_path or ""
    return _open(job_config, "training", path, "train", held_out_share(job_config), tokenizer, rank, infinite=True)


def validation_stream(
    job_config, tokenizer, rank: tuple[int, int], note: Callable[[str], None]
) -> Stream | FirstSequences:
    """Return one rank's part of the documents held out of the training stream, or of another stream's validation split.

    ``note`` is called with a line when the documents are read.
    """
    training, settings, share = job_config.training, job_config.validation, job_config.data.validation_share
    path = settings.dataset_path or (training.dataset_path if training.dataset == "hf" else "") or ""
    is_held_out, to_the_end = shares_stream(job_config), settings.steps == -1
    if to_the_end and (is_held_out or rank[1] > 1):
        raise ConfigError(
            "validation.steps = -1 reads validation.dataset = 'hf' to its end, which ranks reach at different steps; "
            "set validation.steps to a positive number"
        )
    if is_held_out and share == 0:
        raise ConfigError(
            f"data.validation_share = 0 leaves no document of training.dataset_path = {path!r} for validation; raise "
            "it, or set validation.dataset"
        )
    split = ("train", share) if is_held_out else ("validation", 0.0)
    infinite = not (is_held_out or to_the_end)
    stream, _ = _open(job_config, "validation", path, *split, tokenizer, rank, infinite)
    if not is_held_out and (to_the_end or settings.dataloader.num_workers):
        return stream
    # Without workers, the stream would go on where the last validation ended.
    source = f"data.validation_share = {share} holds out" if is_held_out else f"the split at {path!r} has"
    return FirstSequences(stream, settings.steps * settings.local_batch_size, source, note)


def _open(
    job_config, section: str, path: str, split: str, share: float, tokenizer, rank: tuple[int, int], infinite: bool
) -> tuple[Stream, str | None]:
    """Return one rank's part of a stream, and the stream's version.

    A share above 0 is held out of training, and is all of validation, which is then read without worker processes.
    """
    data, settings, is_validation = job_config.data, getattr(job_config, section), section == "validation"
    rows, version = open_stream(path, data.hf_config or "", split, section)
    keeps = partial(is_on_side, text_key=data.text_key, share=share, held_out=is_validation) if share else None
    text_of = TextColumn(data.text_key, path, PATIENCE_ROWS)
    stream = Stream(rows, text_of, tokenizer, settings.seq_len, rank, infinite, keeps=keeps)
    # Every worker reads files of its own. An endless loop over a stream without any would never end.
    workers, files = settings.dataloader.num_workers, stream.lane(rank[0]).rows.num_shards
    if workers > files and not (is_validation and share):
        raise ConfigError(
            f"{section}.dataloader.num_workers = {workers} is more than the {files} file(s) of this stream that a "
            f"data-parallel rank reads; allowed is 0 to {files}"
        )
    return stream, version
