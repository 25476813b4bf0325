"""A run that was killed before its first checkpoint: it has nothing to resume from, and may begin again."""

import json
from pathlib import Path

import tomli

from mxtrain.run_folder.checkpoints import SAVING
from mxtrain.run_folder.files import CONFIG_FILE, METRICS_FILE

# TorchTitan's defaults, which config.toml leaves out.
INTERVAL, STEPS, FOLDER = 500, 10_000, "checkpoint"


def interrupted_after(folder: Path, checkpoints: Path) -> int | None:
    """Return the last step of a run that a kill ended before its first checkpoint was complete, else None.

    A run without ``checkpoint.enable``, a finished run and a run that must have saved are results, and none of these.

    Args:
        folder: the run's folder.
        checkpoints: where the run that starts looks for checkpoints, and finds none.
    """
    try:
        config = tomli.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        rows = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        last = _last_step(rows)
        checkpoint, steps = config.get("checkpoint", {}), config.get("training", {}).get("steps", STEPS)
        # To its own folder, which may be another than ``checkpoints``.
        has_saved = any((folder / checkpoint.get("folder", FOLDER)).glob("step-*"))
        if not checkpoint.get("enable") or checkpoint.get("load_only") or has_saved:
            return None
        was_saving = (checkpoints / SAVING).is_dir()
        is_early = last < steps and last <= checkpoint.get("interval", INTERVAL)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # not the files of a run of ours, or damaged
    return last if was_saving or is_early else None


def _last_step(rows: list[str]) -> int:
    try:
        return json.loads(rows[-1])["step"]
    except json.JSONDecodeError:  # the kill has cut the row
        return json.loads(rows[-2])["step"]
