"""Reads batches from a token file for one data-parallel rank, and resumes at any batch.

Only this file of ``mxtrain.data`` imports PyTorch.
"""

import logging
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from mxtrain.data.token_store import TokenFile
from mxtrain.errors import ConfigError

logger = logging.getLogger(__name__)


class TokenDataset(IterableDataset):
    """Yields one rank's samples ``({"input": tokens[:-1]}, tokens[1:])``, each tensor int64 [seq_len].

    The token file is cut into non-overlapping chunks of ``seq_len + 1`` tokens. Each epoch reads the chunks in an
    order drawn from ``seed`` and the epoch's number. A global batch is ``batch_size * dp_world_size`` consecutive
    chunks of this order; each rank takes ``batch_size`` consecutive chunks of the global batch. Chunks that do not
    fill the last global batch are skipped in that epoch, so every rank gets the same number of batches. Each epoch
    skips different chunks. Data loader workers take whole batches in turn, so the order does not depend on their
    number.

    The state is the number of samples that this worker has yielded. A new iteration starts at the beginning, unless
    ``load_state_dict`` was called just before.

    Args:
        tokens: the token file.
        seq_len: tokens per sample.
        batch_size: samples per local batch.
        dp_rank, dp_world_size: this rank, and the number of ranks that read different data.
        seed: seed of the order.
        infinite: continue with the next epoch after the first; False stops there.
        section: TOML section of seq_len and batch_size, for error messages.

    Raises:
        ConfigError: the text is too short for one batch per rank, or ``load_state_dict`` gets a state of other data.
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
        self.chunks = tokens.count // (seq_len + 1)
        self.batches_per_epoch = self.chunks // (batch_size * dp_world_size)
        self._position = 0
        self._resuming = False
        self._mapped: np.ndarray | None = None
        if self.batches_per_epoch == 0:
            need = batch_size * dp_world_size * (seq_len + 1)
            remedies = ", raise data.validation_share" if section == "validation" else ""
            raise ConfigError(
                f"{section}.local_batch_size = {batch_size} and {section}.seq_len = {seq_len} on {dp_world_size} "
                f"data-parallel rank(s) need {need:,} tokens of {section} text for one step, but there are "
                f"{tokens.count:,}: lower them{remedies} or supply more text"
            )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        if not self._resuming:
            self._position = 0
        self._resuming = False
        return self._samples()

    def _samples(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        if self._mapped is None:  # kept: the file may be removed from the cache before the next iteration
            self._mapped = self.tokens.open()
        tokens = self._mapped
        epoch, order = None, None
        while True:
            batch, sample = divmod(self._position, self.batch_size)
            now, batch = divmod(first + batch * step, self.batches_per_epoch)
            if now != epoch:
                if now > 0 and not self.infinite:
                    return
                if epoch is not None and first == 0 and self.dp_rank == 0:
                    self._log_epoch(now)
                epoch, order = now, self._order(now)
            chunk = order[(batch * self.dp_world_size + self.dp_rank) * self.batch_size + sample]
            start = int(chunk) * (self.seq_len + 1)
            window = torch.from_numpy(tokens[start : start + self.seq_len + 1].astype(np.int64))
            self._position += 1  # before the yield, so that a state taken after a batch points to the next one
            yield {"input": window[:-1]}, window[1:]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.chunks)

    def _log_epoch(self, epoch: int) -> None:
        logger.warning(
            f"Epoch {epoch} of the training text is complete ({self.tokens.count:,} tokens); "
            f"epoch {epoch + 1} reads the text again in another order"
        )

    def _identity(self) -> dict[str, int]:
        names = ("seq_len", "batch_size", "dp_world_size", "seed")
        return {"tokens": self.tokens.count, **{name: getattr(self, name) for name in names}}

    def state_dict(self) -> dict:
        return {"position": self._position, "data": self._identity()}

    def load_state_dict(self, state: dict) -> None:
        differing = [
            f"{name} was {old}, is {new}"
            for (name, new), old in zip(self._identity().items(), state["data"].values(), strict=True)
            if old != new
        ]
        if differing:
            raise ConfigError(
                f"the checkpoint's position in the training text does not fit this run ({'; '.join(differing)}); "
                'set checkpoint.exclude_from_loading = ["dataloader"] to start at the beginning of the text'
            )
        self._position = state["position"]
        self._resuming = True
