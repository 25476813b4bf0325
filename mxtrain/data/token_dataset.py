"""Reads batches from a token file for one data-parallel rank, from any place in the text, and ends loader workers.

Only this file and ``streams.py`` of ``mxtrain.data`` import PyTorch.
"""

import atexit
import logging
import signal
from collections.abc import Iterator
from itertools import count
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from mxtrain.data.store import TokenFile
from mxtrain.errors import ConfigError
from mxtrain.launched import stop_signals

logger = logging.getLogger(__name__)

_loaders: WeakSet[StatefulDataLoader] = WeakSet()


class TokenDataset(IterableDataset):
    """Yields one rank's samples ``({"input": tokens[:-1]}, tokens[1:])``, each tensor int64 [seq_len].

    The token file is cut into non-overlapping chunks of ``seq_len + 1`` tokens. Each epoch reads all chunks in an order
    drawn from ``seed`` and the epoch's number, and the next epoch follows without a gap. So the text is one endless
    sequence of samples, which all ranks share: sample g is chunk ``g % chunks`` of epoch ``g // chunks``.

    The ranks take turns of ``batch_size`` samples. Any number of ranks therefore reads the same sequence, and a step
    that takes N samples over all ranks and microbatches takes the next N. Data loader workers take whole batches in
    turn, so the order does not depend on their number.

    An iteration starts at sample ``start`` of the sequence, which any number of ranks may have reached. Data loader
    workers copy the dataset, so set ``start`` before they start.

    Args:
        tokens: the token file.
        seq_len: tokens per sample.
        batch_size: samples per local batch.
        dp_rank, dp_world_size: this rank, and the number of ranks that read different data.
        seed: seed of the order.
        infinite: continue with the next epoch after the first. False stops before it, and leaves out the chunks that do
            not fill a batch on every rank, so that all ranks get the same number of batches.
        section: TOML section of seq_len and batch_size, for error messages.

    Raises:
        ConfigError: the text is too short for one batch per rank.
    """

    def __init__(
        self,
        tokens: TokenFile,
        seq_len: int,
        batch_size: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        seed: int = 0,
        infinite: bool = True,
        section: str = "training",
    ):
        self.tokens = tokens
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self.seed = seed
        self.infinite = infinite
        self.start = 0
        self.chunks = tokens.count // (seq_len + 1)
        # Opened now, for all iterations and worker processes: the file may be removed from the cache.
        self._mapped = tokens.open()
        if self.chunks < batch_size * dp_world_size:
            need = batch_size * dp_world_size * (seq_len + 1)
            remedies = ", raise data.validation_share" if section == "validation" else ""
            raise ConfigError(
                f"{section}.local_batch_size = {batch_size} and {section}.seq_len = {seq_len} on {dp_world_size} "
                f"data-parallel rank(s) need {need:,} tokens of {section} text for one step, but there are "
                f"{tokens.count:,}: lower them{remedies} or supply more text"
            )

    @property
    def order(self) -> dict[str, int]:
        """The settings that define the sequence of samples beside the text, by name: a place in it fits no other."""
        return {"training.seq_len": self.seq_len, "data.seed": self.seed}

    def require_order(self, before: dict[str, int], otherwise: str) -> None:
        """Raise ConfigError if a position was reached in another ``order``. ``otherwise`` ends the message."""
        for name, value in self.order.items():
            if value != before[name]:
                raise ConfigError(
                    f"{name} = {value}, but was {before[name]} in the run so far, whose position in the training text "
                    f"has no meaning in another order: set it to {before[name]}, or {otherwise}"
                )

    def samples(self, batches: int) -> int:
        """Return how many samples of an epoch all ranks read in their first ``batches`` batches; -1 for all batches."""
        together = self.batch_size * self.dp_world_size
        available = self.chunks // together
        return together * (available if batches < 0 else min(batches, available))

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        epoch, order = None, None
        for sample in self._numbers(first, step):
            now, place = divmod(sample, self.chunks)
            if now != epoch:
                if epoch is not None and first == 0 and self.dp_rank == 0:
                    self._log_epoch(now)
                epoch, order = now, self._order(now)
            start = int(order[place]) * (self.seq_len + 1)
            window = torch.from_numpy(self._mapped[start : start + self.seq_len + 1].astype(np.int64))
            yield {"input": window[:-1]}, window[1:]

    def _numbers(self, first: int, step: int) -> Iterator[int]:
        """Yield the global numbers of the samples in this rank's batches ``first``, ``first + step``, ..."""
        together = self.batch_size * self.dp_world_size  # samples of one batch on every rank
        for batch in count(first, step):
            if not self.infinite and self.start + (batch + 1) * together > self.chunks:
                return
            begin = self.start + batch * together + self.dp_rank * self.batch_size
            yield from range(begin, begin + self.batch_size)

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.chunks)

    def _log_epoch(self, epoch: int) -> None:
        logger.warning(
            f"Epoch {epoch} of the training text is complete ({self.tokens.count:,} tokens); "
            f"epoch {epoch + 1} reads the text again in another order"
        )


def ignore_stop_signals(worker: int) -> None:
    """For data loader workers, which get the signal too if it goes to a whole group: their reader decides."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


def end_workers_at_exit(loader: StatefulDataLoader) -> None:
    """Let workers that ignore stop signals end when this process does.

    A loader that is not read to its end has workers until it is collected, which at the end of a process is too late:
    Python then sends SIGTERM to them and waits for ever.
    """
    _loaders.add(loader)


@atexit.register  # after PyTorch and multiprocessing registered theirs, so it runs before these
def _end_workers() -> None:
    for loader in list(_loaders):
        # Without workers there is an iterator that has no such method, or none.
        if hasattr(loader._iterator, "_shutdown_workers"):
            loader._iterator._shutdown_workers()
