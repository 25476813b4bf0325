"""``mxtrain export``: writes a run's weights as a model of Hugging Face's transformers."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torchtitan.tools import utils

from mxtrain.checkpoints.manifest import MANIFEST_FILE
from mxtrain.data.tokenizer import FILES as TOKENIZER_FILES
from mxtrain.data.tokenizer import copy_tokenizer, load_tokenizer
from mxtrain.errors import ConfigError, require_one_of
from mxtrain.files import hash_file
from mxtrain.hugging_face.formats import Format, RunFacts
from mxtrain.hugging_face.gain import fold, folded_norm, norm_before
from mxtrain.hugging_face.model_config import CONFIG_FILE, GENERATION_FILE, REPORT_FILE, config_json, read_generation
from mxtrain.hugging_face.registry import FORMATS
from mxtrain.hugging_face.safetensors_files import ShardWriter, shard_size
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.titan.data.run_data import TOKENIZER_FOLDER
from mxtrain.titan.hugging_face.held_out_loss import Losses, NoLoss, convert, held_out_losses
from mxtrain.titan.hugging_face.names import Names, require_exact, require_supported, shape_of
from mxtrain.titan.hugging_face.saved_run import SavedRun, open_run
from mxtrain.titan.hugging_face.target_folder import new_target, require_new
from mxtrain.titan.parse import resolved_settings
from mxtrain.titan.reports.facts import package_versions, run_facts

LAST_NORM, HEAD = "norm", "output.weight"


@dataclass(frozen=True)
class ExportReport:
    folder: Path
    run: Path
    step: int
    format: str
    dtype: torch.dtype
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
            f"exported    {self.run}, step {self.step}, to {self.folder} ({self.format}, {_name(self.dtype)}, "
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
        format: one of ``FORMATS``.
        fold_gain: fold the gains of norms that feed only linears into these, and write gains of one.
        dtype: of all tensors in high precision; None takes fp32 for "hf" and bf16 for the other formats.
        loss_tokens: number of held-out tokens on which to compute the loss as trained and as exported; 0 for none.
        device: where to compute the loss; "" for an accelerator if there is one.

    Raises:
        ConfigError: for a wrong argument, and a run that cannot be exported. Nothing is written then.
    """
    require_one_of("--format", format, FORMATS)
    require_new(target, "DIR")
    saved = open_run(run, step)
    where = f"RUN = {str(run)!r}"
    require_supported(saved.model, where)
    require_exact(saved.model, saved.args, where)
    saved.weights.require(saved.build(), saved.is_tied)
    _require_no_expert_bias(saved, where)
    writer = _Export(saved, format, fold_gain, dtype)
    with new_target(target, "DIR") as folder:  # before the slow losses, which are lost if it cannot be written
        losses, missing = _losses(saved, loss_tokens, writer.values, device)
        files, notes = writer.write(folder)
        report = ExportReport(
            folder=target,
            run=run,
            step=saved.step,
            format=format,
            dtype=writer.dtype,
            fold_gain=fold_gain,
            files=tuple(files),
            bytes=writer.bytes,
            losses=losses,
            converter=_converter(saved),
            notes=(*missing, *notes),
        )
        _write_report(folder, saved, report)
    return report


class _Export:
    """Writes one export into a folder."""

    def __init__(self, run: SavedRun, format: str, fold_gain: bool, dtype: torch.dtype | None):
        self._run = run
        self._parameters = [fqn for fqn in run.build().state_dict() if fqn in run.weights]
        self._names = Names(run.model, run.args)
        self._facts = _facts(run, self._names)
        self._format: Format = FORMATS[format](self._facts, dtype)
        if fold_gain and self._format.as_trained:
            raise ConfigError(
                f"--fold-gain does not go with --format = {format!r}, which folds the gains that training folded and "
                "leaves the others: leave it out"
            )
        self._fold_gain = fold_gain
        self._generation = read_generation(run.folder / TOKENIZER_FOLDER)
        self.dtype = self._format.dtype
        self.bytes = 0

    def values(self, fqn: str) -> torch.Tensor:
        """Return what the exported model multiplies in place of a parameter, rows in TorchTitan's order."""
        return self._format.values(fqn, self._weight(fqn))

    def write(self, folder: Path) -> tuple[list[str], list[str]]:
        """Write all files. Return their names, and a line for the user if the tokenizer is missing."""
        bytes_of_model = sum(torch.Size(shape).numel() for shape in self._facts.shapes.values()) * self.dtype.itemsize
        writer = ShardWriter(folder, shard_size(bytes_of_model))
        for fqn in self._parameters:
            for name, tensor in self._tensors(fqn):
                writer.add(name, tensor)
        files = writer.finish()
        self.bytes = writer.total_bytes
        ids, notes = _copy_tokenizer(self._run.folder / TOKENIZER_FOLDER, folder)
        generation = ids | self._generation
        shape = shape_of(self._run.model, self._run.args, self._run.max_seq_len)
        config = config_json(shape, _name(self.dtype), generation) | self._format.config()
        texts = {CONFIG_FILE: _json(config), GENERATION_FILE: _json(generation)}
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        return [*files, *texts], notes

    def _tensors(self, fqn: str) -> Iterator[tuple[str, torch.Tensor]]:
        if not self._facts.names[fqn]:
            return
        weight = self._weight(fqn)
        if len(self._facts.names[fqn]) > 1:  # experts, whose rows stay in order
            for name, part in self._names.to_hf(fqn, weight).items():
                yield from self._format.tensors(fqn, name, part, lambda rows: rows).items()
        else:
            order = self._names.row_order(fqn, weight)
            yield from self._format.tensors(fqn, self._facts.names[fqn][0], weight, order).items()

    def _weight(self, fqn: str) -> torch.Tensor:
        """Return a parameter in fp32, with the gain before it folded, or ones for a gain that is folded elsewhere."""
        if (norm := self._folded_norm(fqn)) is not None and self._folds(norm):
            return torch.ones(self._facts.shapes[fqn])
        weight = self._read(fqn)
        if (norm := self._norm_before(fqn)) is not None and self._folds(norm):
            weight = fold(weight, self._read(f"{norm}.weight"))
        return weight.float()

    # The last gain is folded only for a run that quantizes its head, and so has an MXNorm before it.

    def _norm_before(self, fqn: str) -> str | None:
        return LAST_NORM if fqn == HEAD else norm_before(fqn)

    def _folded_norm(self, fqn: str) -> str | None:
        return LAST_NORM if fqn == f"{LAST_NORM}.weight" else folded_norm(fqn)

    def _read(self, fqn: str) -> torch.Tensor:
        weight = self._run.weights[fqn]
        return weight.to(self._facts.weight_dtype) if self._format.as_trained else weight

    def _folds(self, norm: str) -> bool:
        if norm == LAST_NORM and (self._run.is_tied or not self._format.as_trained):
            return False  # a weight that is the embedding's, too, cannot hold a gain
        return self._fold_gain or (self._format.as_trained and norm in self._facts.merged_norms)


def _facts(run: SavedRun, names: Names) -> RunFacts:
    model = run.build()
    parameters = model.state_dict()
    convert(run, model)
    modules = dict(model.named_modules())
    return RunFacts(
        recipes={
            fqn: module.recipe if isinstance(module, QuantizedLinear) else None
            for fqn, module in modules.items()
            if isinstance(module, torch.nn.Linear)
        },
        # A schedule may have returned norms to RMSNorm at this step: these gains are not folded.
        merged_norms=frozenset(
            fqn for fqn, module in modules.items() if isinstance(module, MXNorm) and not module.is_plain
        ),
        names={fqn: tuple(names.to_hf(fqn, weight)) for fqn, weight in parameters.items()},
        shapes={fqn: tuple(weight.shape) for fqn, weight in parameters.items()},
        weight_dtype=run.weight_dtype,
    )


def _require_no_expert_bias(run: SavedRun, where: str) -> None:
    """transformers' Qwen3-MoE chooses experts without the bias with which TorchTitan balances their load."""
    for fqn in run.build().state_dict():
        if fqn.endswith(".expert_bias") and run.weights[fqn].any():
            raise ConfigError(
                f"{where} cannot be exported: {fqn} is not zero, and transformers' Qwen3-MoE has no such bias, so it "
                "would choose other experts; train with model_args.load_balance_coeff = 0"
            )


def _losses(
    run: SavedRun, tokens: int, exported: Callable[[str], torch.Tensor], device: str
) -> tuple[Losses | None, list[str]]:
    """Return the losses, and a line for the user if they cannot be computed."""
    if not tokens:
        return None, []
    try:
        return held_out_losses(run, tokens, exported, torch.device(device or utils.device_type)), []
    except NoLoss as error:
        return None, [f"no loss is computed: {error}"]


def _copy_tokenizer(source: Path, folder: Path) -> tuple[dict[str, int], list[str]]:
    """Copy the tokenizer. Return the ids of its bos and eos tokens, and a line for the user if it is missing."""
    if not (source / TOKENIZER_FILES[0]).is_file():
        return {}, [f"the export has no tokenizer: {source / TOKENIZER_FILES[0]} is missing"]
    tokenizer = load_tokenizer(source)
    copy_tokenizer(source, folder)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return {name: value for name, value in ids.items() if value is not None}, []


def _write_report(folder: Path, run: SavedRun, report: ExportReport) -> None:
    content = {
        "run": str(run.folder.absolute()),
        "step": report.step,
        "manifest_sha256": hash_file(run.checkpoint / MANIFEST_FILE).sha256,
        "format": report.format,
        "dtype": _name(report.dtype),
        "fold_gain": report.fold_gain,
        "loss": None if report.losses is None else asdict(report.losses),
        "notes": list(report.notes),
        "settings": resolved_settings(run.job_config),
        "versions": package_versions(),
    }
    (folder / REPORT_FILE).write_text(_json(content), encoding="utf-8")


def _converter(run: SavedRun) -> str:
    facts = run_facts(run.job_config)
    if facts["recipe"] is None:
        return ", ".join(facts["converters"]) or "no converter"
    return f"{facts['converter']} {facts['recipe']}"


def _json(content: dict) -> str:
    return json.dumps(content, indent=2) + "\n"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
