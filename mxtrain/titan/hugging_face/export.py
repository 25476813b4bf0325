"""``mxtrain export``: a run's weights as a model of Hugging Face's transformers, and their loss on held-out text."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torchtitan.tools import utils

from mxtrain.checkpoints.manifest import MANIFEST_FILE
from mxtrain.data.run_data import TOKENIZER_FOLDER, read_record
from mxtrain.data.store import DamagedText, TokenFile, load_text
from mxtrain.errors import ConfigError, require_one_of
from mxtrain.files import hash_file
from mxtrain.hugging_face.export import FORMATS, Exporter, Trained
from mxtrain.hugging_face.model_config import REPORT_FILE
from mxtrain.hugging_face.model_files import new_target, require_new
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.run_folder.files import DATA_FILE
from mxtrain.settings.check import TITAN_QUANTIZING
from mxtrain.titan.hugging_face.models import parameters, require_exportable, shape_of
from mxtrain.titan.hugging_face.saved_run import SavedRun, open_run
from mxtrain.titan.job_config import resolved_settings
from mxtrain.titan.metrics import package_versions, run_facts

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


@dataclass(frozen=True)
class ExportReport:
    folder: Path
    run: Path
    step: int
    format: str
    dtype: str
    fold_gain: bool
    files: tuple[str, ...]
    bytes: int
    """Bytes of all tensors"""
    losses: Losses | None
    """None if they were not wanted, or there is no text"""
    converter: str
    """The run's converters, for people"""
    notes: tuple[str, ...] = ()
    """Lines for the user: what is missing in the export"""

    def __str__(self) -> str:
        lines = [
            f"exported    {self.run}, step {self.step}, to {self.folder} ({self.format}, {self.dtype}, "
            f"{self.bytes / 1e6:,.1f} MB)"
        ]
        if self.losses is not None:
            weights = "" if self.format == "hf" else f", {self.format} weights"
            difference = self.losses.as_exported - self.losses.as_trained
            lines += [
                f"loss        {self.losses.as_trained:.4f} as trained ({self.converter}), "
                f"{self.losses.as_exported:.4f} as exported (RMSNorm{weights}): {difference:+.4f}",
                f"            on {self.losses.tokens:,} held-out tokens of {self.losses.text}",
            ]
        return "\n".join([*lines, *(f"note        {note}" for note in self.notes)])


def export(
    run: Path,
    target: Path,
    *,
    step: int | None = None,
    format: str = "hf",
    fold_gain: bool = False,
    dtype: torch.dtype | None = None,
    loss_tokens: int = 0,
    device: str = "",
) -> ExportReport:
    """Write a checkpoint of a run to a folder that ``transformers.AutoModelForCausalLM.from_pretrained`` reads.

    The model computes what the trained weights compute with RMSNorm in place of MXNorm, in high precision. Weights are
    read and written one after another. The folder appears under its name when it is complete.

    Args:
        run: the run's folder.
        target: a folder that does not exist, or is empty.
        step: the step of the checkpoint; None takes the newest complete one.
        format, fold_gain, dtype: as for ``Exporter``.
        loss_tokens: number of held-out tokens on which to compute the loss as trained and as exported; 0 for none.
        device: where to compute the loss; "" for an accelerator if there is one.

    Raises:
        ConfigError: for a wrong argument, and a run that cannot be exported. Nothing is written then.
    """
    require_one_of("--format", format, FORMATS)
    require_new(target, "DIR")
    saved = open_run(run, step)
    exporter = Exporter(_trained(saved, f"RUN = {str(run)!r}"), format, fold_gain, dtype)
    with new_target(target, "DIR") as folder:  # before the slow losses, which are lost if it cannot be written
        losses, notes = None, []
        try:
            if loss_tokens:
                losses = held_out_losses(saved, loss_tokens, exporter.values, torch.device(device or utils.device_type))
        except NoLoss as error:
            notes.append(f"no loss is computed: {error}")
        files, size, missing = exporter.write(folder)
        facts = run_facts(saved.job_config)
        converter = f"{facts['converter']} {facts['recipe']}"
        if facts["recipe"] is None:
            converter = ", ".join(facts["converters"]) or "no converter"
        report = ExportReport(
            folder=target,
            run=run,
            step=saved.step,
            format=format,
            dtype=str(exporter.dtype).removeprefix("torch."),
            fold_gain=fold_gain,
            files=tuple(files),
            bytes=size,
            losses=losses,
            converter=converter,
            notes=(*notes, *missing),
        )
        _write_report(folder, saved, report)
    return report


def _trained(run: SavedRun, where: str) -> Trained:
    """Return the run's checkpoint as an export sees it. Raises ConfigError, beginning with ``where``, as ``export``."""
    require_exportable(run.model, run.args, where)
    shape = shape_of(run.model, run.args, run.max_seq_len)
    found = parameters(run.model, run.args)
    tied = ("output.weight",) if shape.tie_word_embeddings else ()
    run.weights.require({fqn: parameter.shape for fqn, parameter in found.items()}, optional=tied)
    for fqn in found:
        if fqn.endswith(".expert_bias") and run.weights[fqn].any():
            raise ConfigError(
                f"{where} cannot be exported: {fqn} is not zero, and transformers' Qwen3-MoE has no such bias, so it "
                "would choose other experts; train with model_args.load_balance_coeff = 0"
            )
    modules = dict(run.build(has_converters=True).named_modules())
    linears = {fqn: module for fqn, module in modules.items() if isinstance(module, torch.nn.Linear)}
    return Trained(
        shape=shape,
        parameters={fqn: parameter for fqn, parameter in found.items() if fqn in run.weights},
        weights=run.weights,
        recipes={fqn: m.recipe if isinstance(m, QuantizedLinear) else None for fqn, m in linears.items()},
        # A schedule may have returned norms to RMSNorm at this step: these gains are not folded.
        merged_norms=frozenset(fqn for fqn, m in modules.items() if isinstance(m, MXNorm) and not m.is_plain),
        weight_dtype=run.weight_dtype,
        tokenizer=run.folder / TOKENIZER_FOLDER,
    )


def _write_report(folder: Path, run: SavedRun, report: ExportReport) -> None:
    content = {
        "run": str(run.folder.absolute()),
        "step": report.step,
        "manifest_sha256": hash_file(run.checkpoint / MANIFEST_FILE).sha256,
        "format": report.format,
        "dtype": report.dtype,
        "fold_gain": report.fold_gain,
        "loss": None if report.losses is None else asdict(report.losses),
        "notes": list(report.notes),
        "settings": resolved_settings(run.job_config),
        "versions": package_versions(),
    }
    (folder / REPORT_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
        model = run.load(device, has_converters)
        if not has_converters:
            for fqn, weight in model.state_dict().items():
                if fqn in run.weights:
                    weight.copy_(exported(fqn))
        losses.append(_mean_loss(model, batches, device))
        del model  # before the next one is built
    return Losses(*losses, count, text.path.parent.name)


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


def _batches(text: TokenFile, tokens: int, seq_len: int) -> tuple[Callable[[], Iterator[torch.Tensor]], int]:
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
