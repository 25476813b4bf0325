"""The argument RUN of ``mxtrain generate`` and ``mxtrain eval``: a run, or a model in Hugging Face's format."""

import json
import shutil
import sys
from pathlib import Path

from mxtrain.config import load_config
from mxtrain.errors import ConfigError
from mxtrain.run_folder.checkpoints import Checkpoints
from mxtrain.run_folder.files import CONFIG_FILE, reason
from mxtrain.run_folder.manifest import MANIFEST_FILE, hash_file

MODEL_FILE = "config.json"
EXPORT_FILE = "mxtrain.json"  # mxtrain.titan.export.REPORT_FILE, whose module imports TorchTitan
EXPORTED = "exported"


def model_folder(source: Path, step: int | None) -> Path:
    """Return a folder that transformers reads: ``source`` itself, or an export of the run in ``source``.

    A run is exported to RUN/exported/step-N, in the dtype of its parameters. An export of the same checkpoint is used
    again: the manifests of both have the same hash.

    Args:
        source: the argument RUN.
        step: of the run's checkpoint; None takes the newest.

    Raises:
        ConfigError: ``source`` is neither of the two or cannot be exported, or a step of a model is asked for.
    """
    where = f"RUN = {str(source)!r}"
    if not source.is_dir():
        raise ConfigError(f"{where} is not a folder" if source.exists() else f"{where} does not exist")
    if (source / MODEL_FILE).is_file():
        if step is not None:
            raise ConfigError(f"--step = {step}: {where} is a Hugging Face model, which has no steps")
        return source
    if not (source / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{where} is neither a run ({CONFIG_FILE} is missing) nor a Hugging Face model ({MODEL_FILE} is missing)"
        )
    saved = Checkpoints(source / load_config(source / CONFIG_FILE).get("checkpoint", {}).get("folder", "checkpoint"))
    step = max(saved.whole, default=None) if step is None else step
    exported = source / EXPORTED / f"step-{step}"
    if step in saved.whole and _is_of(exported, saved.path(step)):
        return exported
    _export(source, exported, step)
    return exported


def _is_of(exported: Path, checkpoint: Path) -> bool:
    """Return whether ``exported`` was written from the checkpoint that is there now."""
    try:
        kept = json.loads((exported / EXPORT_FILE).read_text(encoding="utf-8"))["manifest_sha256"]
        return kept == hash_file(checkpoint / MANIFEST_FILE).sha256
    except (OSError, ValueError, KeyError, TypeError):
        return False  # no export, or of another version; or no manifest


def _export(run: Path, target: Path, step: int | None) -> None:
    from mxtrain.titan.export import export

    try:
        if target.is_dir():  # of a checkpoint that was replaced
            shutil.rmtree(target)
    except OSError as error:
        raise ConfigError(f"RUN = {str(run)!r}: {target} cannot be removed: {reason(error)}") from error
    if step is not None:
        print(f"mxtrain: exporting step {step} to {target}", file=sys.stderr)
    export(run, target, step=step)
