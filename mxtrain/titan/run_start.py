"""The start of a run: the same settings and checkpoint on all ranks, and the run's settings in its folder."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from mxtrain.checkpoints import terminal
from mxtrain.checkpoints.folder import MANIFEST_FILE, DamagedCheckpoint, check_hashes, clear_leftovers, package_versions
from mxtrain.checkpoints.run_folder import CONFIG_FILE, lock_owner
from mxtrain.checkpoints.start import Start, interrupted_after, require_folder
from mxtrain.config import dump_config, load_config
from mxtrain.errors import ConfigError
from mxtrain.files import hash_file
from mxtrain.hugging_face.model_config import MODELS, require_computed_alike
from mxtrain.ranks import LATE_SECONDS, from_first_rank, is_first_of_node, run_on_all_ranks
from mxtrain.settings.fields import Settings
from mxtrain.settings.machine import global_batch_size
from mxtrain.settings.resume import changes, settings_before
from mxtrain.titan.releases import engine


def require_same_settings(settings: Settings) -> None:
    """Compare the settings of all ranks. All must call it, in a process group.

    Every node of a run has its own launcher, and so its own command. With another learning rate or recipe on one node,
    the run would train on, and its folder would have the settings of rank 0 only. Except for the layout, settings that
    a resumed run may change freely may also differ: folders, logs, the paths of texts that have a hash.

    Raises:
        ConfigError: another setting differs on two ranks. The same error on every rank.
    """
    first = settings_before(from_first_rank(settings.resolved), settings.known)

    def compare() -> None:
        own = settings_before(settings.resolved(), settings.known)
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
                f"{name} = {ours!r}, but {theirs!r} on rank 0; start all nodes with the same config and flags{also}"
            )

    run_on_all_ranks(compare)


def begin_run(job_config, find: Callable[[], Start], found: Start | None) -> Start:
    """Return where the run starts, and tell the user. All ranks must call it, after torch.distributed has started.

    Args:
        find: where the run starts.
        found: what ``find`` has returned already, on the first rank of every node.

    Raises:
        ConfigError: as ``find``; nodes see different folders; with ``checkpoint.verify``, a file of the checkpoint has
            other content than was saved. The same on every rank.
    """
    folder, checkpoint = Path(job_config.job.dump_folder), job_config.checkpoint
    start = _same_on_all_nodes(folder, checkpoint, find, found)
    if checkpoint.verify and start.checkpoint:
        run_on_all_ranks(lambda: _verify(start))

    def clear() -> list[str]:
        last = interrupted_after(folder) if checkpoint.enable and start.step == 0 else None
        clear_leftovers(folder / checkpoint.folder)
        ended = f"the run in this folder ended near step {last}, before its first checkpoint: it begins again"
        return [] if last is None else [ended]

    lines = [*from_first_rank(clear), *start.notes, *start.changes, *other_versions(start)]
    if checkpoint.verify and start.checkpoint and not any(file.sha256 for file in start.manifest.files.values()):
        lines.append(f"checkpoint.verify: {start.checkpoint} was saved without hashes, so only sizes are compared")
    if not job_config.checkpoint.enable:
        lines.append("no checkpoints: nothing can resume or export this run; --checkpoint.enable saves checkpoints")
    elif start.step == 0 and job_config.model.name in MODELS:
        try:
            refused = "'mxtrain export', 'eval' and 'generate' will refuse this run"
            require_computed_alike(engine().SizedModel.of_job(job_config), refused)
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


def _same_on_all_nodes(folder: Path, checkpoint, find: Callable[[], Start], found: Start | None) -> Start:
    """Return where rank 0 finds that the run starts.

    A network file system may show a node late what another one has written, so all look again for a minute.
    """

    def look() -> dict:
        start = found or find()
        name, sha256 = "no checkpoint", None
        if start.checkpoint is not None:
            name, sha256 = start.checkpoint.name, hash_file(start.checkpoint / MANIFEST_FILE).sha256
        # A node that does not see rank 0's lock would save its parts of checkpoints elsewhere.
        lock = lock_owner(folder) if checkpoint.enable else None
        return {"start": start.to_json(), "name": name, "sha256": sha256, "lock": lock}

    for pause in LATE_SECONDS:
        time.sleep(pause)
        ranks = run_on_all_ranks(look if is_first_of_node() else None)
        first, *others = (rank for rank in ranks if rank["result"])
        seen = {key: first["result"][key] for key in ("name", "sha256", "lock")}
        other = next((node for node in others if not seen.items() <= node["result"].items()), None)
        if other is None:
            return Start.from_json(first["result"]["start"])
        found = None
    raise ConfigError(
        f"job.dump_folder = {str(folder)!r} is not the same on all nodes: node {first['node']} would start from "
        f"{first['result']['name']} and node {other['node']} from {other['result']['name']}; all nodes must see the "
        "same files there and in checkpoint.initial_load_path"
    )


def _verify(start: Start) -> None:
    """Compare this rank's share of the files of the checkpoint with their hashes."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        check_hashes(start.checkpoint, start.manifest, sorted(start.manifest.files)[rank::ranks])
    except DamagedCheckpoint as error:
        raise ConfigError(
            f"checkpoint.verify: {start.checkpoint} cannot be loaded: {error}; name another checkpoint with "
            "checkpoint.load_step, or move this one away"
        ) from error


def other_versions(start: Start) -> list[str]:
    """Return a line for the user if the checkpoint of a run that goes on was saved with other versions."""
    if start.step == 0:
        return []
    before, now = start.manifest.versions, package_versions()
    changed = [f"{name} {before[name]} to {now[name]}" for name in now if name in before and before[name] != now[name]]
    return [f"since this checkpoint versions have changed: {', '.join(changed)}"] if changed else []


def write_resolved_config(folder: Path, settings: Settings) -> None:
    """Write the settings of a run to ``config.toml`` in its folder; a warning if the file cannot be written.

    With this file alone the same run can be started again. Where it named its own folder, it goes on to do so: the
    command that started with it resumes.
    """
    path, tables = folder / CONFIG_FILE, settings.resolved()
    if (name := _own_folder(path)) is not None:
        tables.setdefault("job", {})["dump_folder"] = name
    with terminal.go_on_without(path):
        dump_config(tables, path)


def _own_folder(config: Path) -> str | None:
    """Return the folder that a config names, if it lies in this folder: not in a copy of it, and it was not moved."""
    try:
        name = load_config(config)["job"]["dump_folder"]
        return name if require_folder(name).samefile(config.parent) else None
    except (ConfigError, LookupError, TypeError, OSError):  # no such file, no such setting, or a folder that is gone
        return None
