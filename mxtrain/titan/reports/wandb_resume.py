"""Continues the wandb run of a resumed run.

``run.json`` keeps the id of the wandb run. A resumed run starts wandb with this id and resume = "allow", so that a
server appends to the run. Offline, every start makes a local folder with the same id, and ``wandb sync`` of all of
them uploads one run: wandb 0.31 goes by their start times, asks the server for the last step and appends. A first part
that is uploaded last would replace all others, so a run stays offline until its earlier parts are uploaded.

wandb's history only grows. A server that has step 10 drops what is logged for step 6 later, and ``wandb sync`` would
give it the number 11. So steps that wandb has are not sent again: it keeps their first values. ``metrics.jsonl`` has
the values of the run as it went on.
"""

import glob
import os
import shlex
from pathlib import Path
from typing import NamedTuple

from mxtrain.analysis.metrics_file import read_metrics
from mxtrain.errors import ConfigError
from mxtrain.json_toml import read_json
from mxtrain.run_folder.files import FACTS_FILE, METRICS_FILE

USERS_CHOICES = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM")
"""Variables by which the user decides which wandb run continues"""


class EarlierRun(NamedTuple):
    """The wandb run of a run so far."""

    id: str
    last_step: int
    """The last logged step"""


def earlier_run(folder: Path) -> EarlierRun | None:
    """Return the wandb run of the run in ``folder``. None if it has none, or none whose files can be read."""
    try:
        run_id = read_json(folder / FACTS_FILE)["wandb"]["id"]
        last_step = max(row["step"] for row in read_metrics(folder / METRICS_FILE))
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
    return EarlierRun(run_id, last_step) if isinstance(run_id, str) and run_id else None


def chosen_by_user() -> bool:
    """Whether the user decides which wandb run continues."""
    return any(os.environ.get(name) for name in USERS_CHOICES)


def sync_command(folder: Path, run_id: str) -> str | None:
    """Return the command that uploads all local folders of a wandb run, in their order. None if all are uploaded.

    Args:
        folder: of the training run.
    """
    files = folder.glob(f"**/offline-run-*/run-{glob.escape(run_id)}.wandb")
    places = [file.resolve().parent for file in files if not file.with_name(f"{file.name}.synced").exists()]
    words = [shlex.quote(str(place)) for place in sorted(places, key=lambda place: place.name)]  # begins with the time
    return f"wandb sync {' '.join(words)}" if words else None
