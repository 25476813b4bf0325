"""A run that goes on: ``--resume RUN``, and how its settings compare with those of its checkpoint."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pydantic_core import to_jsonable_python

from mxtrain.checkpoints.run_folder import CONFIG_FILE, PROCESSES, SETTING_CHANGES, no_run
from mxtrain.checkpoints.start import Start, find_start, interrupted_after
from mxtrain.data.config import DATASETS
from mxtrain.errors import ConfigError
from mxtrain.formats.parse import parse_gemms
from mxtrain.settings.fields import Field, Settings, flat
from mxtrain.settings.machine import global_batch_size
from mxtrain.settings.mxnorm_section import quantizing_among
from mxtrain.settings.read import asks_for_help, read_settings
from mxtrain.settings.types import Resume

FLAG = "--resume"
BATCH = "training.global_batch_size"
ROUNDING, OLD_RCEIL, TILES = "mxnorm.scale_rounding", "rceil_0_18", "mxnorm.weight_tiles"

_ONCE = (
    "--checkpoint.load_step=-1",
    "--checkpoint.exclude_from_loading=",
    "--checkpoint.may_change=",
    "--checkpoint.create_seed_checkpoint=false",
    "--checkpoint.load_only=false",
)
"""How one start began, which config.toml keeps, too: the next start must not begin in the same way"""


class SettingChange(NamedTuple):
    """A setting that differs between a run so far and its continuation."""

    name: str
    old: object
    new: object
    is_refused: bool = False
    """Whether the change makes another experiment"""


def separated(arguments: list[str]) -> list[str]:
    """Return ``arguments`` with ``--resume=RUN`` as two words."""
    return [part for word in arguments for part in (word.split("=", 1) if word.startswith(f"{FLAG}=") else [word])]


def resolved(arguments: list[str]) -> list[str]:
    """Return TorchTitan's flags for a worker's ``arguments``, which may hold ``--resume RUN``."""
    words = separated(arguments)
    if FLAG not in words:
        return arguments
    place = words.index(FLAG)
    config, flags = resumed("".join(words[place + 1 : place + 2]), words[:place] + words[place + 2 :])
    return [f"--job.config_file={config}", *flags]


def resumed(run: str, flags: list[str]) -> tuple[str, list[str]]:
    """Return the config and TorchTitan's flags that continue the run in the folder ``run``."""
    if not run or run.startswith("--"):
        raise ConfigError(f"{FLAG} needs the folder of a run; write {FLAG} outputs/NAME")
    for flag in flags:
        if flag.partition("=")[0].replace("-", "_") in ("__job.dump_folder", "__job.config_file"):
            raise ConfigError(f"{flag[2:].partition('=')[0]} is already set by {FLAG} {run}; leave the flag out")
    folder = Path(os.path.expanduser(run))
    config = folder / CONFIG_FILE
    if not config.is_file():
        raise ConfigError(f"{FLAG} {run!r} {no_run(folder)}")
    all_flags = [*_ONCE, *flags, f"--job.dump_folder={folder}"]
    if not asks_for_help(flags):
        settings = read_settings([f"--job.config_file={config}", *all_flags])
        saved = folder / settings["checkpoint.folder"]
        if not any(saved.glob("step-*")) and interrupted_after(folder) is None:
            name, so = ("checkpoint.interval", ":") if settings["checkpoint.enable"] else ("checkpoint.enable", ", so")
            raise ConfigError(
                f"{name} = {settings[name]}{so} {saved} holds no checkpoint to resume from; start again, in a new "
                f"folder, with 'mxtrain train {shlex.quote(str(config))} --checkpoint.enable'"
            )
    return str(config), all_flags


def checked_start(folder: Path, settings: Settings, processes: int) -> Start:
    """Return where a run with these settings starts in ``folder``, and what changes since then.

    Arguments as for ``find_start``.
    """
    checkpoint = settings.values.checkpoint
    start = find_start(folder, checkpoint, processes)
    kept = []
    if start.step and settings[ROUNDING] in (None, "rceil") and ROUNDING not in (checkpoint.may_change or []):
        before = with_own_rounding(settings_before(start.manifest.settings, settings.known), start.manifest.versions)
        if before[ROUNDING] == OLD_RCEIL and _rounds(settings):
            start = replace(start, settings={ROUNDING: OLD_RCEIL})
            kept = [f"{ROUNDING} stays {OLD_RCEIL!r}, as before; --checkpoint.may_change {ROUNDING} allows another"]
    recorded = check_resume(start, settings.replaced(start.settings), processes)
    if start.step and checkpoint.exclude_from_loading:
        parts = " and ".join(checkpoint.exclude_from_loading)
        recorded.append(
            f"checkpoint.exclude_from_loading: step {start.step + 1} begins without the checkpoint's {parts}"
        )
    return replace(start, notes=(*start.notes, *kept), changes=tuple(recorded))


def check_resume(start: Start, settings: Settings, processes: int) -> list[str]:
    """Compare a run's settings with those of the checkpoint that it resumes from, if it does not start at step 0.

    Returns one line for the user for every setting, and number of processes, that changes.
    """
    if start.step == 0:
        return []
    manifest = start.manifest
    before = settings_before(manifest.settings, settings.known, manifest.defaults)
    before = with_own_rounding(before, manifest.versions)
    batch = global_batch_size(before, manifest.processes)
    found = changes(before, settings, batch, global_batch_size(settings, processes))
    may_change = settings["checkpoint.may_change"] or []
    for name, old, new, _ in found:
        loads_states = "optimizer" not in settings["checkpoint.exclude_from_loading"]
        if name == "optimizer.name" and "Muon" in (old, new) and loads_states:
            raise ConfigError(
                f"{name} = {new!r}, but {start.checkpoint} has the states of {old!r}; set it to {old!r}, or start with "
                f"new states: --checkpoint.may_change {name} --checkpoint.exclude_from_loading optimizer"
            )
    if refused := [change for change in found if change.is_refused and change.name not in may_change]:
        raise _refusal(refused, may_change, start.checkpoint)
    step = f"at step {start.step + 1}"
    lines = [f"{change.name}{SETTING_CHANGES}{change.old!r} to {change.new!r} {step}" for change in found]
    if processes != manifest.processes:
        lines.append(f"{PROCESSES}{SETTING_CHANGES}{manifest.processes} to {processes} {step}")
    return lines


def with_own_rounding(settings: Settings, versions: Mapping[str, str | None]) -> Settings:
    """Return a run's settings with the rule by which it rounded scales, and with its tiles.

    Until 0.1.0, "rceil", also the default, was what "rceil_0_18" is now, and ``weight_tiles`` was NVFP4's alone, whose
    recipes all have tiles.

    Args:
        versions: of packages, as the run kept them.
    """
    if (versions.get("mxtrain") or "0.1.0") != "0.1.0" or not _rounds(settings):
        return settings
    own = {ROUNDING: OLD_RCEIL} if settings[ROUNDING] in (None, "rceil") else {}
    return settings.replaced(own | ({TILES: None} if settings[TILES] else {}))


def _rounds(settings: Settings) -> bool:
    """Whether a job has scales that ``ROUNDING`` is for, in the recipes of its schedule, too."""
    scheduled = [entry["recipe"] for entry in settings["mxnorm.schedule"] if "recipe" in entry]
    specs = [settings["mxnorm.recipe"], *settings["mxnorm.recipes"].values(), *scheduled]
    try:
        gemms = [gemm for spec in specs for gemm in parse_gemms("mxnorm.recipe", spec).values()]
    except ConfigError:
        return False
    has_scales = any(gemm.format is not None and gemm.has("scale_rounding") for gemm in gemms)
    return has_scales and bool(quantizing_among(settings["model.converters"]))


def _refusal(refused: list[SettingChange], may_change: list[str], checkpoint: Path) -> ConfigError:
    """The error for changes that ``may_change`` does not name."""
    first, *others = refused
    names = ",".join([*may_change, *(change.name for change in refused)])
    also = f"; these differ, too: {', '.join(f'{c.name} ({c.old!r} -> {c.new!r})' for c in others)}" if others else ""
    trained, back = f"with {first.old!r}", f"set it to {first.old!r}"
    if first.old is None:
        trained, back = "without it", "leave it unset"
    in_effect = " in effect" if first.name == BATCH else ""
    return ConfigError(
        f"{first.name} = {first.new!r}{in_effect}, but {checkpoint} was trained {trained}; {back}, or allow the change "
        f"with --checkpoint.may_change {names}{also}"
    )


def settings_before(
    tables: Mapping, known: Mapping[str, Field], defaults: Mapping[str, object] = MappingProxyType({})
) -> Settings:
    """Return the settings of a run so far from the nested tables that it kept, and from the defaults that it had.

    Defaults have full names; of other settings the run had those of this version. A setting that this version does not
    know is left out. A value that this version refuses stays as it is.
    """
    had = {**defaults, **dict(flat(tables, known))}
    return Settings(known, {name: _as_checked(known[name], value) for name, value in had.items() if name in known})


def kept_defaults(known: Mapping[str, Field]) -> dict[str, object]:
    """Return the defaults of all settings but those of a user's own module, by full name, as JSON values.

    Those that a resumed run may change freely are among them: the number of sequences per step follows from some.
    """
    return {name: to_jsonable_python(field.default) for name, field in known.items() if field.resume is not None}


def changes(before: Settings, now: Settings, batch_before: int, batch_now: int) -> list[SettingChange]:
    """Return every setting that differs, in the order of the tables, except those whose change has no effect.

    A setting of the user's own module is reported.

    Args:
        batch_before, batch_now: sequences per step, over all processes and microbatches.
    """
    found = []
    for name, field in now.known.items():
        old, new = before[name], now[name]
        if name == BATCH:
            old, new = batch_before, batch_now
        rule = _rule_of_data(before, now) if field.resume is Resume.DATA else field.resume
        # Of several names in a table that match a layer, the last one counts.
        is_same = old == new and (not isinstance(old, dict) or list(old) == list(new))
        if rule is not Resume.FREE and not is_same:
            found.append(SettingChange(name, old, new, rule is Resume.REFUSED))
    return found


def _rule_of_data(before: Settings, now: Settings) -> Resume:
    """The rule for settings that say which text is read."""
    if "dataloader" in now["checkpoint.exclude_from_loading"]:
        return Resume.APPLIED  # the user asks for the beginning of a text
    # The same text may lie elsewhere, and the data loader compares hashes. A stream has none.
    hashed = set(DATASETS) - {"hf"}
    is_hashed = all(s["data.prepared"] or s["training.dataset"] in hashed for s in (before, now))
    return Resume.FREE if is_hashed else Resume.REFUSED


def _as_checked(field: Field, value: object) -> object:
    try:
        return field.checked(value)
    except ConfigError:
        return value
