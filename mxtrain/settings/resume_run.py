"""``--resume RUN``: a run's own settings, read from its folder, and flags that override them."""

import os
import shlex
from pathlib import Path

from mxtrain.checkpoints.start import interrupted_after
from mxtrain.errors import ConfigError
from mxtrain.run_folder.files import CONFIG_FILE
from mxtrain.settings.read import CONFIG_FLAGS, asks_for_help, places, read_settings
from mxtrain.settings.resume_flag import FLAG, separated

_ONCE = (
    "--checkpoint.load_step=-1",
    "--checkpoint.exclude_from_loading=",
    "--checkpoint.may_change=",
    "--checkpoint.create_seed_checkpoint=false",
    "--checkpoint.load_only=false",
)
"""How one start began, which config.toml keeps, too: the next start must not begin in the same way"""


def resumed(run: str, flags: list[str]) -> tuple[str, list[str]]:
    """Return the config and TorchTitan's flags that continue the run in the folder ``run``.

    Args:
        flags: override the settings that the run had.

    Raises:
        ConfigError: ``run`` is no run's folder or holds no checkpoints, or ``flags`` name a config or a folder, or
            hold a mistake.
    """
    if not run or run.startswith("--"):
        raise ConfigError(f"{FLAG} needs the folder of a run, such as outputs/a")
    for flag in flags:
        if flag.partition("=")[0].replace("-", "_") in ("__job.dump_folder", "__job.config_file"):
            raise ConfigError(f"{flag[2:].partition('=')[0]}: {FLAG} {run} names the folder and its settings already")
    folder = Path(os.path.expanduser(run))
    config = folder / CONFIG_FILE
    if not config.is_file():
        raise ConfigError(f"{FLAG} {run}: no run has been here, {config} is missing; give the folder of a run")
    all_flags = [*_ONCE, *flags, f"--job.dump_folder={folder}"]
    if not asks_for_help(flags):
        _require_checkpoints(folder, f"{CONFIG_FLAGS[0]}={config}", all_flags)
    return str(config), all_flags


def resolved(arguments: list[str]) -> list[str]:
    """Return TorchTitan's flags for a worker's ``arguments``, which may hold ``--resume RUN``.

    Raises:
        ConfigError: as ``resumed``.
    """
    words = separated(arguments)
    if FLAG not in words:
        return arguments
    place = words.index(FLAG)
    run = "".join(words[place + 1 : place + 2])
    config, flags = resumed(run, words[:place] + words[place + 2 :])
    return [f"{CONFIG_FLAGS[0]}={config}", *flags]


def _require_checkpoints(folder: Path, config_flag: str, flags: list[str]) -> None:
    arguments = [config_flag, *flags]
    settings = read_settings(arguments)
    saved = folder / settings["checkpoint.folder"]
    if any(saved.glob("step-*")) or interrupted_after(folder, saved) is not None:
        return
    own = folder / read_settings([config_flag])["checkpoint.folder"]
    if own != saved:
        raise ConfigError(
            f"checkpoint.folder = {settings['checkpoint.folder']!r}: {saved} holds no checkpoint to resume from; the "
            f"run saves to {own}"
        )
    config = shlex.quote(str(folder / CONFIG_FILE))
    again = f"start again, in a new folder, with 'mxtrain train {config} --checkpoint.enable'"
    with places(arguments):
        if not settings["checkpoint.enable"]:
            raise ConfigError(f"checkpoint.enable = False, so {folder} holds no checkpoint to resume from; {again}")
        interval = settings["checkpoint.interval"]
        raise ConfigError(f"checkpoint.interval = {interval}: {folder} holds no checkpoint to resume from; {again}")
