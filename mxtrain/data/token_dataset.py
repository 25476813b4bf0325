"""Batches of a token file for one data-parallel rank, in an order that can be resumed anywhere.

Kept apart from the rest of ``mxtrain.data``, which does without PyTorch.
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
    """Samples ``({"input": tokens[:-1]}, tokens[1:])``, int64 [seq_len] each, of one rank's share of a token file.

    The file is cut into chunks of ``seq_len + 1`` tokens that do not overlap. An epoch reads them in an order drawn
    from ``seed`` and the epoch's number, ``batch_size * dp_world_size`` at a time: a global batch, of which each
    rank takes ``batch_size`` neighbours. The chunks that do not fill a global batch are left to other epochs (a
    different remainder each time), so every rank sees the same number of batches. Data loader workers take whole
    batches in turn, which makes the order independent of their number.

    The position is one number, of samples that this worker has yielded; ``state_dict`` and ``load_state_dict`` carry
    it between runs. A new iteration starts at the beginning unless a state was loaded just before.

    Args:
        tokens: the token file.
        seq_len: tokens of a sample.
        batch_size: samples of a local batch.
        dp_rank, dp_world_size: this rank's place among those that read different data.
        seed: of the order.
        infinite: go on with the next epoch at the end of one; False ends there.
        section: TOML section of seq_len and batch_size, for error messages.

    Raises:
        ConfigError: too little text for one batch per rank, or (when iterated) a loaded state of other data.
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
        if self.batches_per_epoch == 0:
            need = batch_size * dp_world_size * (seq_len + 1)
            held_out = " or raise data.validation_share" if section == "validation" else ""
            raise ConfigError(
                f"{section}.local_batch_size = {batch_size} and {section}.seq_len = {seq_len} on {dp_world_size} "
                f"data-parallel rank(s) need {need:,} tokens of {section} text for one step; there are "
                f"{tokens.count:,}. Lower them, supply more text{held_out}"
            )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        if not self._resuming:
            self._position = 0
        self._resuming = False
        return self._samples()

    def _samples(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        tokens = self.tokens.open()
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
            self._position += 1  # before the yield: a state taken after a batch points at the next
            yield {"input": window[:-1]}, window[1:]

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.chunks)

    def _log_epoch(self, epoch: int) -> None:
        logger.warning(
            f"Epoch {epoch} of the training text is over ({self.tokens.count:,} tokens); "
            f"epoch {epoch + 1} reads it again, in another order"
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
                f"the checkpoint's place in the training text does not fit this run ({'; '.join(differing)}); "
                'set checkpoint.exclude_from_loading = ["dataloader"] to start the text from its beginning'
            )
        self._position = state["position"]
        self._resuming = True
