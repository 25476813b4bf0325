"""Where a run starts, and what its user should know about that."""

from pathlib import Path

import torch

from mxtrain.reports import terminal
from mxtrain.run_folder.files import SETTING_CHANGES
from mxtrain.run_folder.manifest import read_manifest
from mxtrain.run_folder.start import CheckpointSettings, Start
from mxtrain.settings.resume import check_resume
from mxtrain.titan.checkpoint.verified_start import verified_start
from mxtrain.titan.metrics import package_versions
from mxtrain.titan.parse import settings_of
from mxtrain.titan.without_effect import without_effect


def begin_run(job_config) -> tuple[Start, list[str]]:
    """Return where the run starts and which settings have changed since then, and tell the user.

    Raises:
        ConfigError: as ``verified_start`` and ``check_resume``.
    """
    start = verified_start(Path(job_config.job.dump_folder), CheckpointSettings.of(job_config.checkpoint))
    changes = check_resume(start, settings_of(job_config), torch.distributed.get_world_size())
    excluded = excluded_parts(start, job_config.checkpoint.exclude_from_loading)
    for line in (*start.notes, *changes, *excluded, *other_versions(start)):
        terminal.note(line)
    if start.step >= job_config.training.steps:
        terminal.note(
            f"nothing is left to train: training.steps = {job_config.training.steps}; set it to more steps, such as "
            f"--training.steps {2 * start.step}, and the run goes on"
        )
    for line in without_effect(job_config):
        terminal.note(line)
    return start, [*(line for line in changes if SETTING_CHANGES in line), *excluded]


def excluded_parts(start: Start, names: list[str]) -> list[str]:
    """Return a line for the user if a run that goes on leaves parts of its checkpoint out."""
    if start.step == 0 or not names:
        return []
    parts = " and ".join(names)
    return [f"checkpoint.exclude_from_loading: step {start.step + 1} begins without the checkpoint's {parts}"]


def other_versions(start: Start) -> list[str]:
    """Return a line for the user if the checkpoint of a run that goes on was saved with other versions."""
    if start.step == 0:
        return []
    before, now = read_manifest(start.checkpoint).versions, package_versions()
    changed = [f"{name} {before[name]} to {now[name]}" for name in now if name in before and before[name] != now[name]]
    return [f"since this checkpoint versions have changed: {', '.join(changed)}"] if changed else []
