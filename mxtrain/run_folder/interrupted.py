"""A run that was killed before its first checkpoint: it has nothing to resume from, and may begin again."""

import math
from pathlib import Path

from mxtrain.json_toml import parse, read_toml
from mxtrain.run_folder.checkpoints import SAVING
from mxtrain.run_folder.files import CONFIG_FILE, METRICS_FILE
from mxtrain.run_folder.titan_defaults import CHECKPOINT_FOLDER, CHECKPOINT_INTERVAL, STEPS


def interrupted_after(folder: Path, checkpoints: Path) -> int | None:
    """Return the last step of a run that a kill ended before its first checkpoint was complete, else None.

    A run without ``checkpoint.enable``, a finished run and a run that must have saved are results, and none of these.
    A seed checkpoint, ``step-0``, is where a run starts, and says nothing.

    Args:
        folder: the run's folder.
        checkpoints: where the run that starts looks for checkpoints, and finds none.
    """
    try:
        config = read_toml(folder / CONFIG_FILE)
        first, last = _first_and_last_step((folder / METRICS_FILE).read_text(encoding="utf-8"))
        checkpoint, steps = config.get("checkpoint", {}), config.get("training", {}).get("steps", STEPS)
        # To its own folder, which may be another than ``checkpoints``.
        own = (folder / checkpoint.get("folder", CHECKPOINT_FOLDER)).glob("step-*")
        if not checkpoint.get("enable") or checkpoint.get("load_only") or any(path.name != "step-0" for path in own):
            return None
        was_saving = (checkpoints / SAVING).is_dir()
        interval = checkpoint.get("interval", CHECKPOINT_INTERVAL)
        # A run that goes on from another run's step logs its own steps only.
        first_saved = math.ceil(first / interval) * interval
        is_early = last < steps and last <= first_saved
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError):
        return None  # not the files of a run of ours, or damaged
    return last if was_saving or is_early else None


def _first_and_last_step(metrics: str) -> tuple[int, int]:
    rows = metrics[: metrics.rfind("\n") + 1].splitlines()  # without a row that the kill has cut
    # Without a row, a kill came before the first one of a run that had emptied the file to begin again.
    return (parse(rows[0])["step"], parse(rows[-1])["step"]) if rows else (0, 0)
