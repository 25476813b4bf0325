"""The loss of a model on text that a run has held out of its training."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from mxtrain.data.run_data import TOKENIZER_FOLDER, read_record
from mxtrain.data.store import DamagedText, load_text
from mxtrain.errors import ConfigError
from mxtrain.run_folder import DATA_FILE

TOKENS_PER_FORWARD, TOKENS_PER_HEAD = 2048, 256


class NoLoss(Exception):
    """There is no held-out text, or the model does not run here. The message says why."""


class HeldOutText:
    """Sequences of a text, spread evenly over it.

    Args:
        ids: the text's tokens.
        tokens: how many tokens to predict, at most.
        seq_len: length of a sequence. A shorter text is a sequence.
    """

    def __init__(self, ids: np.ndarray, tokens: int, seq_len: int):
        self._ids = ids
        self._seq_len = min(seq_len, tokens, len(ids) - 1)
        chunks = len(ids) // (self._seq_len + 1)
        count = max(1, min(chunks, tokens // self._seq_len))
        self._starts = [i * chunks // count * (self._seq_len + 1) for i in range(count)]
        self.tokens = count * self._seq_len
        """Number of tokens that are predicted"""

    def batches(self) -> Iterator[torch.Tensor]:
        """Yield token ids, int64 [B, S + 1]."""
        size = max(1, TOKENS_PER_FORWARD // self._seq_len)
        for i in range(0, len(self._starts), size):
            rows = [self._ids[start : start + self._seq_len + 1] for start in self._starts[i : i + size]]
            yield torch.from_numpy(np.stack(rows).astype(np.int64))

    @torch.no_grad()
    def loss(self, model: torch.nn.Module, device: torch.device, head_name: str = "output") -> float:
        """Return the mean cross entropy of a model whose head has this name, in nats per token."""
        total, head, own = 0.0, torch.nn.Identity(), getattr(model, head_name)
        if type(own).forward is torch.nn.Linear.forward:
            # Logits of all tokens at once would take more memory than a small model.
            setattr(model, head_name, head)
            head = own
        for batch in self.batches():
            batch = batch.to(device)
            hidden, labels = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
            for rows, targets in zip(hidden.split(TOKENS_PER_HEAD), labels.split(TOKENS_PER_HEAD), strict=True):
                total += F.cross_entropy(head(rows).float(), targets, reduction="sum").item()
        return total / self.tokens


def held_out_ids(run: Path) -> tuple[str, np.ndarray]:
    """Return the name and the held-out tokens of the prepared text that the ``data.json`` of a run's folder names.

    Raises:
        NoLoss: the text has no held-out part, is gone or has changed.
    """
    kept = read_record(run)
    if kept is None:
        raise NoLoss(f"{DATA_FILE}, which names the run's text, cannot be read")
    name, cache = kept["prepared"], kept["cache"]
    if name is None:
        raise NoLoss("the run's text was streamed")
    try:
        text = load_text(Path(cache) / name, str(run / TOKENIZER_FOLDER), reads_tokens=True)
    except (DamagedText, ConfigError) as error:
        raise NoLoss(f"the run's text {name!r} in {cache} is gone or damaged") from error
    if text.identity != kept["identity"]:
        raise NoLoss(f"the text {name!r} in {cache} is not the run's: its hash differs")
    if text.validation is None or text.validation.count < 2:
        reasons = "it was streamed, is short, or data.validation_share is 0"
        raise NoLoss(f"no part of the run's text {name!r} is held out: {reasons}")
    return name, text.validation.open()
