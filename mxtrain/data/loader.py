"""Batches of tokenized text for one data-parallel rank, from any place in the text, and the data loader of a run.

A run keeps the identity of its data, and does not resume with other data: every checkpoint has the hashes in the state
of the loader, and the run's folder gets ``data.json`` (hashes, and the name of the prepared text) and the tokenizer.

Only this file and ``streams.py`` of ``mxtrain.data`` import PyTorch.
"""

import atexit
import json
import logging
import pickle
import re
import signal
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from mxtrain.checkpoints.run_folder import DATA_FILE, TOKENIZER_FOLDER
from mxtrain.checkpoints.storage import unpickle
from mxtrain.data.config import held_out_share
from mxtrain.data.prepared import HELD_OUT, Prepared, differences
from mxtrain.data.token_files import Tokens
from mxtrain.data.tokenizer import copy_tokenizer
from mxtrain.errors import ConfigError
from mxtrain.files import os_errors_as, read_json, replace_file
from mxtrain.launched import stop_signals
from mxtrain.ranks import gather, is_first

EXCLUDE = 'checkpoint.exclude_from_loading = ["dataloader"]'

_loaders: WeakSet[StatefulDataLoader] = WeakSet()


class TokenDataset(IterableDataset):
    """Yields one rank's samples ``({"input": tokens[:-1]}, tokens[1:])``, each tensor int64 [seq_len].

    The text is cut into non-overlapping chunks of ``seq_len + 1`` tokens. Each epoch reads all chunks in an order
    drawn from ``seed`` and the epoch's number, and the next epoch follows without a gap. So the text is one endless
    sequence of samples, which all ranks share: sample g is chunk ``g % chunks`` of epoch ``g // chunks``.

    The ranks take turns of ``batch_size`` samples, and data loader workers take whole batches in turn. Any number of
    ranks and workers therefore reads the same sequence, from sample ``start``. Workers copy the dataset, so set
    ``start`` before they start.

    Args:
        settings: has ``seq_len``, the tokens per sample, and ``local_batch_size``.
        rank: this rank, and the number of ranks that read different data.
        infinite: continue with the next epoch after the first. False stops before it, and leaves out the chunks that do
            not fill a batch on every rank, so that all ranks get the same number of batches.
        section: TOML section of the settings, for error messages.
    """

    def __init__(
        self, tokens: Tokens, settings, rank: tuple[int, int] = (0, 1), seed=0, infinite=True, section="training"
    ):
        self._seq_len, self._batch_size = seq_len, batch_size = settings.seq_len, settings.local_batch_size
        self._seed, self._infinite = seed, infinite
        self._rank, ranks = rank
        self._together = batch_size * ranks  # samples of one batch on every rank
        self.start = 0
        self.chunks = len(tokens) // (seq_len + 1)
        self._tokens = tokens
        if self.chunks < self._together:
            remedies = ", raise data.validation_share" if section == "validation" else ""
            raise ConfigError(
                f"{section}.local_batch_size = {batch_size} and {section}.seq_len = {seq_len} on {ranks} "
                f"data-parallel rank(s) need {self._together * (seq_len + 1):,} tokens of {section} text for one step, "
                f"but there are {len(tokens):,}; lower one of them{remedies}, or give more text"
            )

    @property
    def order(self) -> dict[str, int]:
        """The settings that define the sequence of samples beside the text, by name: a place in it fits no other."""
        return {"training.seq_len": self._seq_len, "data.seed": self._seed}

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        epoch, order = None, None
        for sample in self._numbers():
            now, place = divmod(sample, self.chunks)
            if now != epoch:
                epoch, order = now, np.random.default_rng([self._seed, now]).permutation(self.chunks)
            start = int(order[place]) * (self._seq_len + 1)
            window = torch.from_numpy(self._tokens[start : start + self._seq_len + 1].astype(np.int64))
            yield {"input": window[:-1]}, window[1:]

    def _numbers(self) -> Iterator[int]:
        """Yield the global numbers of the samples in this rank's batches, or in those of a loader's worker."""
        worker = get_worker_info()
        for batch in count(*(worker.id, worker.num_workers) if worker else ()):
            begin = self.start + batch * self._together
            if not self._infinite and begin + self._together > self.chunks:
                return
            begin += self._rank * self._batch_size
            yield from range(begin, begin + self._batch_size)


class Loader(StatefulDataLoader):
    """A data loader with the batches and workers of ``settings``, the section of training or of validation.

    Its workers ignore stop signals, and end with this process. Without an end of ours they would live until the loader
    is collected, which at the end of a process is too late: Python then sends SIGTERM to them and waits for ever.
    """

    def __init__(self, dataset: IterableDataset, settings, **options):
        options = asdict(settings.dataloader) | options
        if not options["num_workers"]:  # PyTorch refuses these without workers
            options |= {"persistent_workers": False, "prefetch_factor": None}
        # With a generator of its own, because every iteration draws a number: a resumed run has one iteration more of
        # the training text, and does not repeat the validations before it.
        own = {"batch_size": settings.local_batch_size, "generator": torch.Generator()}
        super().__init__(dataset, worker_init_fn=ignore_stop_signals, **own, **options)
        _loaders.add(self)


class RunData:
    """The data of a run. Only rank 0 writes it into the run's folder.

    Every method that writes raises ConfigError if the folder cannot be written.
    """

    def __init__(self, job_config, prepared: Prepared):
        share, folder = held_out_share(job_config), prepared.folder
        self.prepared = prepared
        self.record = {
            "identity": prepared.identity | ({HELD_OUT: share} if share else {}),
            "prepared": folder.name if folder else None,
            "cache": str(folder.parent) if folder else None,
        }
        """What ``data.json`` and checkpoints hold, as a JSON value"""
        self._starts_anew = "dataloader" in job_config.checkpoint.exclude_from_loading
        """Whether the loader starts at the beginning of its text in a resumed run, too"""
        self._job, self._folder = job_config, Path(job_config.job.dump_folder)

    def keep(self) -> None:
        """Write ``data.json`` and the tokenizer, unless a checkpoint will be loaded, whose data is compared first.

        A loader that starts anew loads no such state.
        """
        checkpoint = self._job.checkpoint
        found = (self._folder / checkpoint.folder).glob("step-*")
        # Step 0 holds initial weights only.
        if checkpoint.enable and any(re.fullmatch(r"step-[1-9]\d*", path.name) for path in found):
            if not self._starts_anew:
                return
            if kept := _read_record(self._folder):
                self.require_same(kept)
        elif checkpoint.enable and checkpoint.initial_load_path:
            self._warn_of_another_tokenizer(Path(checkpoint.initial_load_path))
        self._write(self.record)
        self._copy_tokenizer()

    def _warn_of_another_tokenizer(self, checkpoint: Path) -> None:
        """Log a warning if a new run starts with weights that were trained with another tokenizer."""
        run = checkpoint.absolute().parent.parent  # RUN/checkpoint/step-N
        kept = _read_record(run)
        if kept and checkpoint.name != "step-0" and kept["identity"]["tokenizer"] != self.prepared.tokenizer_sha256:
            logging.getLogger(__name__).warning(
                f"checkpoint.initial_load_path = {str(checkpoint)!r} has weights that were trained with another "
                f"tokenizer; set model.hf_assets_path = {str(run / TOKENIZER_FOLDER)!r} to use their tokenizer"
            )

    def go_on(self, kept: dict) -> None:
        """Write ``data.json`` and the tokenizer, after a checkpoint has shown that its ``record`` is the same data."""
        self.require_same(kept)
        if is_first():
            self._write((_read_record(self._folder) or {}) | self.record)
            self._copy_tokenizer()

    def _copy_tokenizer(self) -> None:
        with os_errors_as(f"job.dump_folder = {str(self._folder)!r} cannot be written"):
            copy_tokenizer(self.prepared.tokenizer, self._folder / TOKENIZER_FOLDER)

    def keep_facts(self, **facts: str) -> None:
        """Add to ``data.json`` the hash of the validation tokens, or the version of a training stream."""
        if kept := _read_record(self._folder):
            self._write(kept | facts)

    def _write(self, content: dict) -> None:
        with os_errors_as(f"job.dump_folder = {str(self._folder)!r} cannot be written"):
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / DATA_FILE, (json.dumps(content, indent=2) + "\n").encode())

    def require_same(self, kept: dict) -> None:
        """Raise ConfigError if this run would go on with other data than the ``record`` of the run so far.

        A loader that starts at the beginning of its text (see EXCLUDE) may read another text, but needs the tokenizer.
        """
        before, after = kept["identity"], self.record["identity"]
        dataset, name, needed = self._job.training.dataset, kept["prepared"], before["tokenizer"]
        if self._starts_anew:
            before, after = {"tokenizer": needed}, {"tokenizer": after["tokenizer"]}
        if before == after:
            return
        own, ways = name.rpartition("-")[0] if name else dataset, []
        if own == dataset and before.get(HELD_OUT) != after.get(HELD_OUT):
            ways.append("set [validation] and data.validation_share as before")
        elif name:
            settings = "" if own == dataset else f"training.dataset = {own!r} and "
            ways.append(f"set {settings}data.prepared = {str(Path(kept['cache'], name))!r} to go on with the run's own")
        tokenizer = f"model.hf_assets_path = {str(self._folder / TOKENIZER_FOLDER)!r}, the run's own tokenizer, and "
        tokenizer = "" if after["tokenizer"] == needed else tokenizer
        ways.append(f"set {tokenizer}{EXCLUDE} to start at the beginning of the new text")
        raise ConfigError(
            f"training.dataset = {dataset!r} gives other data than the run so far "
            f"({differences(before, after)}); {', or '.join(ways)}"
        )


def _read_record(folder: Path) -> dict | None:
    """Return what ``data.json`` in a run's folder holds (see ``RunData``), or None if it is missing or damaged."""
    try:
        kept = read_json(folder / DATA_FILE)
        return kept if kept["identity"]["tokenizer"] and {"prepared", "cache"} <= kept.keys() else None
    except (OSError, ValueError, LookupError, TypeError):
        return None  # the checkpoint has the hashes, too


class RunLoader(Loader):
    """The loader of training text, a TokenDataset or a Stream, whose state fits any layout of processes.

    The state names the data, and has the same keys and values on all ranks. For tokenized text it is one number, the
    samples that all ranks have read. So a run may resume with other numbers of ranks and workers, and with another
    local batch size: it reads the samples that the uninterrupted run would have read. So does a stream without workers,
    whose state has those of all ranks.
    Batches count when the consumer gets them, not when a worker has prepared them.
    """

    def __init__(self, dataset, rank: tuple[int, int], training, data: RunData):
        super().__init__(dataset, training)
        self._rank, self._ranks = rank
        self._name, self._data = training.dataset, data
        self._samples = 0
        self._is_stream = not isinstance(dataset, TokenDataset)

    def __iter__(self):
        if not self._is_stream:
            self.dataset.start = self._samples
            self._iterator = None  # workers of an earlier iteration, if they persist, start elsewhere
        for batch in super().__iter__():
            self._samples += self.batch_size * self._ranks  # before the yield: the consumer has this batch
            yield batch

    def state_dict(self) -> dict:
        """Return the state. All ranks must call it at about the same time."""
        data, streams = dict(self._data.record), b""
        if self._is_stream:
            # One value instead of a key per rank: with more ranks than before, DCP would look for missing keys.
            own = super().state_dict() if self.num_workers else self.dataset.state_dict()
            state = {"workers": self.num_workers, "state": own}
            states = dict(gather((self._rank, pickle.dumps(state))))
            streams = pickle.dumps([states[rank] for rank in sorted(states)])
        else:
            data["order"] = self.dataset.order
        return {"samples": self._samples, "data": json.dumps(data), "streams": streams}

    def load_state_dict(self, state: dict) -> None:
        kept = json.loads(state["data"])
        self._data.go_on(kept)
        if self._is_stream:
            self._load_streams(unpickle(state["streams"], "the streams' states", {}))
        else:
            for name, value in self.dataset.order.items():
                if value != (before := kept["order"][name]):
                    raise ConfigError(
                        f"{name} = {value} gives the text another order than {before}, the value of the run so far, "
                        f"so its position is lost; set it to {before}, or set {EXCLUDE} to start at the beginning of "
                        "the text"
                    )
        self._samples = state["samples"]

    def _load_streams(self, contents: list[bytes]) -> None:
        streams = [unpickle(content, "the stream's state", {}) for content in contents]
        workers, ranks = streams[0]["workers"], len(streams)
        if workers != self.num_workers or (workers and ranks != self._ranks):
            raise ConfigError(
                f"training.dataset = {self._name!r} is a stream, in which every loader worker has a position. The run "
                f"so far had training.dataloader.num_workers = {workers} on {ranks} data-parallel rank(s), and this "
                f"run has {self.num_workers} on {self._ranks}; start the same numbers (without workers, ranks may "
                f"differ), or set {EXCLUDE} to start at the beginning of the text"
            )
        if workers:
            super().load_state_dict(streams[self._rank]["state"])
        else:
            self.dataset.load_state_dict(*(stream["state"] for stream in streams))


def ignore_stop_signals(worker: int) -> None:
    """For data loader workers, which get the signal too if it goes to a whole group: their reader decides."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


@atexit.register  # after PyTorch and multiprocessing registered theirs, so it runs before these
def _end_workers() -> None:
    for loader in list(_loaders):
        # Without workers there is an iterator that has no such method, or none.
        if hasattr(loader._iterator, "_shutdown_workers"):
            loader._iterator._shutdown_workers()
