"""The loss of a saved run's weights on held-out text: as trained, and as a plain model in high precision."""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.tools.logging import logger

from mxtrain.conversion.schedule import set_step
from mxtrain.data.prepared_text import DamagedText, load_text
from mxtrain.data.token_store import TokenFile
from mxtrain.errors import ConfigError
from mxtrain.run_folder.files import DATA_FILE
from mxtrain.settings.check import TITAN_QUANTIZING
from mxtrain.titan.data.run_data import TOKENIZER_FOLDER, read_record
from mxtrain.titan.hugging_face.saved_run import SavedRun

TOKENS_PER_FORWARD, TOKENS_PER_HEAD = 2048, 256


class NoLoss(Exception):
    """There is no held-out text, or the converters of the run do not run here. The message says why."""


@dataclass(frozen=True)
class Losses:
    """Mean cross entropy, in nats per token."""

    as_trained: float
    """With the run's converters"""
    as_exported: float
    """With plain norms and linears, and weights in the dtype of the export"""
    tokens: int
    """Number of tokens predicted"""
    text: str
    """Name of the prepared text, whose held-out part was read"""


def held_out_losses(
    run: SavedRun, tokens: int, exported: Callable[[str], torch.Tensor], device: torch.device
) -> Losses:
    """Compute the loss of the run's weights as trained and as exported, on the same held-out tokens.

    Both compute in fp32, but for the operands that the converters round: the difference is that of the converters.

    Args:
        tokens: how many tokens to predict, at most; whole sequences of the run's length.
        exported: FQN of a parameter -> the values that the exported model multiplies in its place.
        device: holds one model at a time, fp32.

    Raises:
        NoLoss: the run's text has no held-out part, is gone or has changed; or TorchTitan quantized the run.
    """
    if theirs := [name for name in run.job_config.model.converters if name.startswith(TITAN_QUANTIZING)]:
        raise NoLoss(f"it would need TorchTitan's converter {theirs[0]!r}, which runs in training only")
    text = _held_out_text(run.folder)
    batches, count = _batches(text, tokens, run.job_config.training.seq_len)
    losses = []
    for has_converters in (True, False):
        model = load_model(run, device, has_converters)
        if not has_converters:
            _load(model, run, exported)
        losses.append(_mean_loss(model, batches, device))
        del model  # before the next one is built
    return Losses(*losses, count, text.path.parent.name)


def convert(run: SavedRun, model: torch.nn.Module) -> None:
    """Apply mxtrain's converters of the run to its model, as the trainer does. TorchTitan's own need their devices."""
    one_process = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "world_size"), 1)
    job_config = copy.deepcopy(run.job_config)
    job_config.model.converters = [n for n in job_config.model.converters if not n.startswith(TITAN_QUANTIZING)]
    job_config.mxnorm.diagnostics.every = 0  # they need the trainer
    # No gradients are computed here, so the converters' warnings of rounding in the backward mean nothing.
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        build_model_converters(job_config, ParallelDims(**one_process)).convert(model)
    finally:
        logger.setLevel(level)
    set_step(model, max(1, run.step))  # the recipes that a schedule has for this step


def load_model(run: SavedRun, device: torch.device, has_converters: bool) -> torch.nn.Module:
    """Build the run's model in fp32, with its converters or without, and load its weights."""
    model = run.build()
    if has_converters:
        convert(run, model)
    with torch.no_grad():
        model.init_weights(buffer_device=device)  # computes the buffers, and nothing for parameters without memory
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    if run.is_tied:
        model.output.weight = model.tok_embeddings.weight
    run.weights.load_into({fqn: weight for fqn, weight in model.state_dict().items() if fqn in run.weights})
    return model.eval()


def _load(model: torch.nn.Module, run: SavedRun, exported: Callable[[str], torch.Tensor]) -> None:
    """Replace the weights of a model without converters by the exported ones, one after another."""
    for fqn, weight in model.state_dict().items():
        if fqn in run.weights:
            weight.copy_(exported(fqn))


def _held_out_text(folder: Path) -> TokenFile:
    """Return the held-out tokens of the text that ``data.json`` names."""
    kept = read_record(folder)
    if kept is None:
        raise NoLoss(f"{DATA_FILE}, which names the run's text, cannot be read")
    name, cache = kept["prepared"], kept["cache"]
    if name is None:
        raise NoLoss("the run's text was streamed")
    try:
        prepared = load_text(Path(cache) / name, str(folder / TOKENIZER_FOLDER), reads_tokens=True)
    except (DamagedText, ConfigError) as error:
        raise NoLoss(f"the run's text {name!r} in {cache} is gone or damaged") from error
    if prepared.report.streamed:
        raise NoLoss("the run's text was streamed")
    if prepared.identity != kept["identity"]:
        raise NoLoss(f"the text {name!r} in {cache} is not the run's: its hash differs")
    if prepared.validation is None or prepared.validation.count < 2:
        raise NoLoss(f"no part of the run's text {name!r} is held out: it is short, or data.validation_share is 0")
    return prepared.validation


def _batches(text: TokenFile, tokens: int, seq_len: int) -> tuple[Callable, int]:
    """Return a function that yields batches, int64 [B, S + 1], and the number of tokens that they predict.

    The sequences are spread evenly over the text. A text shorter than a sequence is a sequence.
    """
    ids = text.open()
    seq_len = min(seq_len, tokens, len(ids) - 1)
    chunks = len(ids) // (seq_len + 1)
    count = max(1, min(chunks, tokens // seq_len))
    starts = [i * chunks // count * (seq_len + 1) for i in range(count)]
    per_batch = max(1, TOKENS_PER_FORWARD // seq_len)

    def batches():
        for i in range(0, count, per_batch):
            rows = [ids[start : start + seq_len + 1].astype(np.int64) for start in starts[i : i + per_batch]]
            yield torch.from_numpy(np.stack(rows))

    return batches, count * seq_len


@torch.no_grad()
def _mean_loss(model: torch.nn.Module, batches: Callable, device: torch.device) -> float:
    total = count = 0
    head = model.output
    if type(head) is torch.nn.Linear:
        model.output = torch.nn.Identity()  # logits of all tokens at once would take more memory than a small model
    else:
        head = torch.nn.Identity()
    for batch in batches():
        batch = batch.to(device)
        hidden, labels = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        for rows, targets in zip(hidden.split(TOKENS_PER_HEAD), labels.split(TOKENS_PER_HEAD), strict=True):
            total += F.cross_entropy(head(rows).float(), targets, reduction="sum").item()
        count += len(labels)
    return total / count
