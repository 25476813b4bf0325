"""``mxtrain export``: opens a run, and writes its weights as a model of Hugging Face's transformers."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torchtitan.config import TORCH_DTYPE_MAP

from mxtrain.checkpoints.folder import MANIFEST_FILE, package_versions
from mxtrain.checkpoints.run_folder import CONFIG_FILE, TOKENIZER_FOLDER, no_run
from mxtrain.conversion.schedule import set_step
from mxtrain.errors import ConfigError, require_one_of
from mxtrain.files import hash_file
from mxtrain.hugging_face.checkpoint import SavedWeights, find_checkpoint
from mxtrain.hugging_face.export import Exporter, Trained, formats
from mxtrain.hugging_face.model_config import REPORT_FILE, require_computed_alike, shape_of
from mxtrain.hugging_face.model_files import new_target
from mxtrain.nn.experts import WEIGHTS, QuantizedExperts
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.settings.fields import Settings
from mxtrain.settings.model_settings import given_in
from mxtrain.settings.read import read_settings, settings_in
from mxtrain.settings.resume import settings_before, with_own_rounding
from mxtrain.titan.converters import convert_on_meta
from mxtrain.titan.hugging_face.models import parameters
from mxtrain.titan.job_config import check_model
from mxtrain.titan.releases import engine


def export(
    run: Path,
    target: Path,
    *,
    step: int | None = None,
    format: str = "hf",
    fold_gain: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[int, str]:
    """Write a checkpoint of a run to a folder that ``transformers.AutoModelForCausalLM.from_pretrained`` reads.

    The model computes what the trained weights compute with RMSNorm in place of MXNorm, in high precision. Weights are
    read and written one after another. The folder appears under its name when it is complete.

    Args:
        target: a folder that does not exist, or is empty.
        format, fold_gain, dtype: as for ``Exporter``.

    Returns:
        The step of the checkpoint, and lines for the user.

    Raises:
        ConfigError: for a wrong argument, and a run that cannot be exported. Nothing is written then.
    """
    require_one_of("--format", format, formats())
    where = f"RUN = {str(run)!r}"
    with new_target(target, "DIR") as folder:
        saved = open_run(run, step)
        exporter = Exporter(_trained(saved, where), format, fold_gain, dtype)
        size, missing = exporter.write(folder)
        report = {
            "run": str(run.absolute()),
            "step": saved.step,
            "manifest_sha256": hash_file(saved.checkpoint / MANIFEST_FILE).sha256,
            "format": format,
            "dtype": str(exporter.dtype).removeprefix("torch."),
            "fold_gain": fold_gain,
            "notes": exporter.notes() + missing,
            "settings": saved.settings.resolved(),
            "versions": package_versions(),
        }
        (folder / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    lines = [
        f"exported    {run}, step {saved.step}, to {target} ({format}, {report['dtype']}, {size / 1e6:,.1f} MB)",
        *(f"note        {note}" for note in report["notes"]),
    ]
    return saved.step, "\n".join(lines)


@dataclass(frozen=True)
class SavedRun:
    folder: Path
    checkpoint: Path
    step: int
    casts_weights: bool
    """Whether FSDP cast weights to ``training.mixed_precision_param`` for every product"""
    coded_layers: frozenset[str]
    """The layers whose weights FSDP gathered as codes, cast from ``training.dtype``"""
    settings: Settings
    model: object
    """The engine's ``SizedModel``, with the settings of the run"""
    weights: SavedWeights


def open_run(folder: Path, step: int | None = None) -> SavedRun:
    """Find the checkpoint of ``step`` in the run's folder (None: the newest whole one), and read its settings."""
    config = folder / CONFIG_FILE
    if not os.path.isfile(config):  # False for a name that is too long, too
        raise ConfigError(f"RUN = {str(folder)!r} {no_run(folder)}")
    own = read_settings([f"--job.config_file={config}", f"--job.dump_folder={folder}"])
    checkpoint, manifest = find_checkpoint(folder, own["checkpoint.folder"], step)
    # The checkpoint's settings: the run may have resumed with others since, and this version may have other defaults.
    had = with_own_rounding(settings_before(manifest.settings, own.known, manifest.defaults), manifest.versions)
    had = Settings(own.known, {name: value for name, value in had.given.items() if value is not None}).tables()
    # This machine may lack the mode of the training. Other modes have the same codes, "fp8_merged" before merging.
    settings = settings_in(had, own.known, {"job.dump_folder": str(folder), "mxnorm.mode": "auto"})
    check_model(settings.values)
    model, weights = engine().SizedModel.of_job(settings.values), SavedWeights(checkpoint)
    # In TorchTitan 0.2.2 one process has no FSDP.
    has_fsdp = manifest.processes > 1 or not manifest.versions.get("torchtitan", "0.2.2").startswith("0.2.")
    return SavedRun(folder, checkpoint, manifest.step, has_fsdp, frozenset(manifest.codes), settings, model, weights)


def _trained(run: SavedRun, where: str) -> Trained:
    job_config = run.settings.values
    model, training = run.model, job_config.training
    require_computed_alike(model, where)
    shape = shape_of(model, given_in(job_config).get("max_seq_len", model.sizes["seq_len"]))
    found = parameters(model)
    tied = ("output.weight",) if shape.tie_word_embeddings else ()
    run.weights.require({fqn: parameter.shape for fqn, parameter in found.items()}, optional=tied)
    built = model.on_meta()
    convert_on_meta(job_config, built)
    set_step(built, max(1, run.step))  # the recipes that a schedule has for this step
    modules = {engine().saved_name(name): module for name, module in built.named_modules()}
    linears = {fqn: module for fqn, module in modules.items() if isinstance(module, torch.nn.Linear)}
    experts = {fqn: module for fqn, module in modules.items() if isinstance(module, QuantizedExperts)}
    recipes = {fqn: m.recipe if isinstance(m, QuantizedLinear) else None for fqn, m in linears.items()}
    recipes |= {f"{fqn}.{name}": module.recipe for fqn, module in experts.items() for name in WEIGHTS}
    return Trained(
        shape=shape,
        parameters={fqn: parameter for fqn, parameter in found.items() if fqn in run.weights},
        weights=run.weights,
        recipes=recipes,
        # A schedule may have returned norms to RMSNorm at this step: these gains are not folded.
        merged_norms=frozenset(fqn for fqn, m in modules.items() if isinstance(m, MXNorm) and not m.is_plain),
        weight_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param if run.casts_weights else training.dtype],
        tokenizer=run.folder / TOKENIZER_FOLDER,
        coded_layers=run.coded_layers,
    )
