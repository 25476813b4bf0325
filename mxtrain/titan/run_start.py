"""The start of a run: the same settings on all ranks, where it starts, and its settings in its folder."""

from collections.abc import Callable
from pathlib import Path

import torch

from mxtrain.checkpoints.manifest import package_versions
from mxtrain.checkpoints.start import Start, require_folder
from mxtrain.checkpoints.verified_start import verified_start
from mxtrain.config import dump_config, load_config
from mxtrain.errors import ConfigError
from mxtrain.ranks import from_first_rank, run_on_all_ranks
from mxtrain.reports import terminal
from mxtrain.run_folder.files import CONFIG_FILE
from mxtrain.settings.fields import Settings
from mxtrain.settings.known import resolved_settings
from mxtrain.settings.layout import global_batch_size
from mxtrain.settings.resume import changes, settings_before
from mxtrain.titan.engine import engine
from mxtrain.titan.hugging_face.models import MODELS, require_computed_alike

UNREADABLE = "'mxtrain export', 'eval' and 'generate' will refuse this run"


def require_same_settings(settings: Settings, resolved: dict) -> None:
    """Compare the settings of all ranks. All must call it, in a process group. ``resolved``: as in ``config.toml``.

    Every node of a run has its own launcher, and so its own command. With another learning rate or recipe on one node,
    the run would train on, and its folder would have the settings of rank 0 only. Except for the layout, settings that
    a resumed run may change freely may also differ: folders, logs, the paths of texts that have a hash.

    Raises:
        ConfigError: another setting differs on two ranks. The same error on every rank.
    """
    first = settings_before(from_first_rank(lambda: resolved), settings.known)

    def compare() -> None:
        own = settings_before(resolved, settings.known)
        processes = torch.distributed.get_world_size()
        # Ranks with different layouts would wait for one another.
        layout = [name for name in own.known if name.startswith("parallelism.") and first[name] != own[name]]
        found = [(name, first[name], own[name]) for name in layout]
        batches = (global_batch_size(each, processes) for each in (first, own))
        found += [(change.name, change.old, change.new) for change in changes(first, own, *batches)]
        if found:
            (name, theirs, ours), *more = found
            also = f"; these differ, too: {', '.join(other[0] for other in more)}" if more else ""
            raise ConfigError(
                f"{name} = {ours!r}, but {theirs!r} on rank 0: start all nodes with the same config and flags{also}"
            )

    run_on_all_ranks(compare)


def begin_run(job_config, find: Callable[[dict[str, str]], Start], found: Start | None) -> Start:
    """Return where the run starts, and tell the user. Arguments and errors as for ``verified_start``."""
    start = verified_start(Path(job_config.job.dump_folder), job_config.checkpoint, find, found)
    lines = [*start.notes, *start.changes, *other_versions(start)]
    if not job_config.checkpoint.enable:
        lines.append("no checkpoints: nothing can resume or export this run; --checkpoint.enable saves checkpoints")
    elif start.step == 0 and job_config.model.name in MODELS.values():
        try:
            require_computed_alike(engine().SizedModel.of_job(job_config), UNREADABLE)
        except ConfigError as error:
            lines.append(str(error))
    if start.step >= job_config.training.steps:
        lines.append(
            f"nothing is left to train: training.steps = {job_config.training.steps}; set it to more steps, such as "
            f"--training.steps {2 * start.step}, and the run goes on"
        )
    for line in lines:
        terminal.note(line)
    return start


def other_versions(start: Start) -> list[str]:
    """Return a line for the user if the checkpoint of a run that goes on was saved with other versions."""
    if start.step == 0:
        return []
    before, now = start.manifest.versions, package_versions()
    changed = [f"{name} {before[name]} to {now[name]}" for name in now if name in before and before[name] != now[name]]
    return [f"since this checkpoint versions have changed: {', '.join(changed)}"] if changed else []


def write_resolved_config(job_config) -> None:
    """Write the settings of a run to ``config.toml`` in its folder; a warning if the file cannot be written.

    With this file alone the same run can be started again. Where it named its own folder, it goes on to do so: the
    command that started with it resumes.
    """
    path = Path(job_config.job.dump_folder) / CONFIG_FILE
    settings = resolved_settings(job_config)
    if (name := _own_folder(path)) is not None:
        settings.setdefault("job", {})["dump_folder"] = name
    with terminal.go_on_without(path):
        dump_config(settings, path)


def _own_folder(config: Path) -> str | None:
    """Return the folder that a config names, if it lies in this folder: not in a copy of it, and it was not moved."""
    try:
        name = load_config(config)["job"]["dump_folder"]
        return name if require_folder(name).samefile(config.parent) else None
    except (ConfigError, LookupError, TypeError, OSError):  # no such file, no such setting, or a folder that is gone
        return None
