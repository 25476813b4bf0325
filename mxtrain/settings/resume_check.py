"""Whether a run may resume with its present settings, and what changes since the checkpoint from which it goes on."""

import json
from pathlib import Path

from mxtrain.config import load_config
from mxtrain.errors import ConfigError
from mxtrain.run_folder.files import CONFIG_FILE, FACTS_FILE
from mxtrain.run_folder.manifest import DamagedCheckpoint, read_manifest
from mxtrain.settings.machine import global_batch_size
from mxtrain.settings.resume_changes import changes, report, require_allowed, settings_before
from mxtrain.settings.values import Settings


def check_resume(folder: Path, step: int, settings: Settings, processes: int) -> list[str]:
    """Compare a run's settings with those of the checkpoint that it resumes from.

    Args:
        folder: the run's folder.
        step: number of steps that are done; 0 for a run that does not resume, where nothing is compared.
        settings: of the run's continuation.
        processes: their number in its continuation.

    Returns:
        One line for every setting that changes, for the user.

    Raises:
        ConfigError: for a change that ``checkpoint.may_change`` would have to name.
    """
    checkpoint = folder / settings["checkpoint.folder"] / f"step-{step}"
    kept = _kept(folder, checkpoint) if step > 0 else None
    if kept is None:
        return []
    tables, processes_before = kept
    before = settings_before(tables, settings.known)
    batch_before = None if processes_before is None else global_batch_size(before, processes_before)
    found = changes(before, settings, batch_before, global_batch_size(settings, processes))
    require_allowed(found, settings["checkpoint.may_change"] or [], checkpoint)
    return report(found, step + 1)


def _kept(folder: Path, checkpoint: Path) -> tuple[dict, int | None] | None:
    """The settings and the number of processes of the run so far; None if nothing says them.

    A checkpoint of an older version has no manifest, but its run has files with both.
    """
    try:
        manifest = read_manifest(checkpoint)
        return manifest.settings, manifest.processes
    except DamagedCheckpoint:
        pass
    try:
        return load_config(folder / CONFIG_FILE), _processes(folder / FACTS_FILE)
    except ConfigError:
        return None


def _processes(facts: Path) -> int | None:
    try:
        number = json.loads(facts.read_text(encoding="utf-8"))["world_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return number if type(number) is int else None
