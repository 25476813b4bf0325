"""The argument RUN of ``mxtrain generate`` and ``mxtrain eval``: a run, or a model in Hugging Face's format."""

import os
import shlex
import shutil
import sys
from pathlib import Path

from mxtrain.checkpoints.folder import Checkpoints
from mxtrain.checkpoints.manifest import MANIFEST_FILE
from mxtrain.config import load_config
from mxtrain.errors import ConfigError
from mxtrain.files import hash_file, reason
from mxtrain.hugging_face.model_config import CONFIG_FILE as MODEL_FILE
from mxtrain.hugging_face.model_config import REPORT_FILE
from mxtrain.json_toml import read_json
from mxtrain.run_folder.files import CONFIG_FILE

EXPORTED = "exported"


def model_folder(source: Path, step: int | None) -> Path:
    """Return a folder that transformers reads: ``source`` itself, or an export of the run in ``source``.

    A run is exported to RUN/exported/step-N, in fp32. Such an export of the same checkpoint is used again: it names the
    hash of the checkpoint's manifest.

    Args:
        source: the argument RUN.
        step: of the run's checkpoint; None takes the newest.

    Raises:
        ConfigError: ``source`` is neither of the two or cannot be exported, a step of a model is asked for, or
            something else is where the export belongs.
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
    saved = Checkpoints(source / _checkpoint_folder(source / CONFIG_FILE))
    step = max(saved.whole, default=None) if step is None else step
    if step not in saved.whole:
        from mxtrain.titan.hugging_face.saved_run import open_run

        open_run(source, step)  # says which steps there are, before anything is removed
    exported = source / EXPORTED / f"step-{step}"
    if _is_of(exported, saved.path(step)):
        return exported
    _export(source, exported, step)
    return exported


def _checkpoint_folder(config: Path) -> str:
    """Return the setting ``checkpoint.folder`` of a run."""
    table = load_config(config).get("checkpoint", {})
    if not isinstance(table, dict):
        raise ConfigError(f"checkpoint = {table!r} in {config} is not a table; write [checkpoint]")
    folder = table.get("folder", "checkpoint")
    if not isinstance(folder, str):
        raise ConfigError(f"checkpoint.folder = {folder!r} in {config} is not a string; give the name of a folder")
    return folder


def _is_of(exported: Path, checkpoint: Path) -> bool:
    """Return whether ``exported`` holds the weights of the checkpoint that is there now, as ``_export`` writes them."""
    expected = {"format": "hf", "dtype": "float32", "fold_gain": False}
    try:
        kept = read_json(exported / REPORT_FILE)
        expected["manifest_sha256"] = hash_file(checkpoint / MANIFEST_FILE).sha256
        return all(kept[name] == value for name, value in expected.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False  # no export, or of another version


def _export(run: Path, target: Path, step: int) -> None:
    from mxtrain.titan.hugging_face.export import export

    if target.exists() and not (target / REPORT_FILE).is_file():
        raise ConfigError(
            f"RUN = {str(run)!r}: {target}, where its export belongs, is no export ({REPORT_FILE} is missing): move it "
            "elsewhere"
        )
    if not os.access(target.parent if target.parent.exists() else run, os.W_OK):
        raise ConfigError(
            f"RUN = {str(run)!r} cannot be written, and its export belongs there: write it elsewhere with 'mxtrain "
            f"export {shlex.quote(str(run))} DIR', then give DIR as RUN"
        )
    try:
        if target.exists():  # an export of a checkpoint that was replaced, or of another kind
            shutil.rmtree(target)
    except OSError as error:
        raise ConfigError(f"RUN = {str(run)!r}: {target} cannot be removed: {reason(error)}") from error
    print(f"mxtrain: exporting step {step} to {target}", file=sys.stderr)
    export(run, target, step=step)
