"""Which runs a comparison consists of: every variant with every learning rate and seed."""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mxtrain.analysis.pairing import PAIRING_SETTINGS, unpaired
from mxtrain.config import load_config
from mxtrain.errors import ConfigError
from mxtrain.run_folder.comparison import PairedRun
from mxtrain.settings.fields import Settings
from mxtrain.settings.layout import global_batch_size
from mxtrain.settings.machine import Machine
from mxtrain.settings.read import CONFIG_FLAGS, places, read_settings
from mxtrain.settings.resume import BATCH

OWN_SETTINGS = ("job.dump_folder", "job.config_file", "debug.seed")
"""Settings that the comparison itself gives every run"""

LONGEST_NAME = 200
"""Bytes in a run's name, of which a file system allows 255: files beside the run's folder have longer names"""


@dataclass(frozen=True)
class Variant:
    name: str
    config: str
    flags: list[str]


def variant_of(words: str) -> Variant:
    """Read ``[NAME=]CONFIG [FLAGS]``, which is one word of the command line.

    Without NAME, the name is that of the config file, followed by the flags.

    Raises ConfigError if CONFIG is missing, or a quote is not closed.
    """
    try:
        first, *flags = shlex.split(words) or [""]
    except ValueError as error:
        raise ConfigError(f"VARIANT = {words!r} cannot be split into words: {error}") from error
    name, equals, config = first.partition("=")
    if not equals or not re.fullmatch(r"[\w.+-]+", name) or Path(first).is_file():
        name, config = "", first
    if not config or config.startswith("-"):
        raise ConfigError(f"VARIANT = {words!r} names no config: write CONFIG, or '[NAME=]CONFIG FLAGS' in quotes")
    path = Path(config)
    stem = path.resolve().parent.name if path.stem == "config" else path.stem  # a run's folder holds config.toml
    name = name or re.sub(r"[^\w.+-]+", "-", "-".join([stem, *(flag.lstrip("-") for flag in flags)]))
    return Variant(name, config, flags)


def planned(variants: list[str], seeds: int, rates: list[str], flags: list[str]) -> dict[str, PairedRun]:
    """Return the runs by name, seed after seed: after the first ones, every variant has a result.

    Args:
        variants: see ``variant_of``.
        seeds: number of seeds: 0, 1, ...
        rates: learning rates; empty for that of each config.
        flags: for every run; those of a variant override them.

    Raises:
        ConfigError: for two variants of one name, a name that is too long for a folder, a flag that the comparison
            sets itself, and every mistake in the settings that shows without PyTorch.
    """
    found = [variant_of(words) for words in variants]
    names = [variant.name for variant in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two variants have the name {twice[0]!r}: write NAME=CONFIG to name them")
    own = (*OWN_SETTINGS, *(["optimizer.lr"] if rates else []))
    for variant in found:
        for flag in [*flags, *variant.flags]:
            if flag.partition("=")[0].removeprefix("--").replace("-", "_") in own:
                raise ConfigError(f"{flag.partition('=')[0]}: 'mxtrain compare' sets it for every run")
    runs = {}
    for seed in range(seeds):
        for rate in rates or [None]:
            for variant in found:
                run = _run(variant, seed, rate, flags)
                if run.name in runs:
                    raise ConfigError(f"two runs have the name {run.name!r}: write NAME=CONFIG with other names")
                runs[run.name] = run
    for run in runs.values():
        settings_of(run)
    return runs


def _run(variant: Variant, seed: int, rate: str | None, flags: list[str]) -> PairedRun:
    arguments = [variant.config, *flags, *variant.flags, *([f"--optimizer.lr={rate}"] if rate else [])]
    name = f"{variant.name}{f'-lr{rate}' if rate else ''}-seed{seed}"
    if (length := len(name.encode())) > LONGEST_NAME:
        raise ConfigError(
            f"the folder's name {name[:40]!r}... has {length} bytes, and at most {LONGEST_NAME} are allowed: "
            "write NAME=CONFIG with a short NAME"
        )
    arguments.append(f"--debug.seed={seed}")
    return PairedRun(name, variant.name, arguments, _hash(variant.config), directory=os.getcwd())


def planned_again(earlier: dict[str, PairedRun]) -> dict[str, PairedRun]:
    """Return the runs of a comparison that was begun before, with their configs as they are now.

    Raises ConfigError if a config cannot be read.
    """
    runs = {}
    for name, run in earlier.items():
        with _in_directory_of(run):
            runs[name] = replace(run, config_sha256=_hash(run.arguments[0]))
    return runs


@contextmanager
def _in_directory_of(run: PairedRun) -> Iterator[None]:
    here = os.getcwd()
    os.chdir(run.working_directory)
    try:
        yield
    finally:
        os.chdir(here)


def gone_directories(runs: dict[str, PairedRun]) -> list[str]:
    """Return a line for each directory that unfinished runs were planned in and that is gone."""
    directories = dict.fromkeys(run.directory for run in runs.values() if run.status != 0 and run.directory)
    return [
        f"{directory}, where the comparison was begun, is gone: relative paths start from the current directory"
        for directory in directories
        if not os.path.isdir(directory)
    ]


def _hash(config: str) -> str:
    content = json.dumps(load_config(config), sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def settings_of(run: PairedRun, machine: Machine | None = None) -> Settings:
    """Return the settings of a run. Raises ConfigError for a mistake, and for what the machine does not allow."""
    config, *flags = run.arguments
    arguments = [f"{CONFIG_FLAGS[0]}={config}", *flags]
    with _in_directory_of(run), places(arguments):
        settings = read_settings(arguments)
        from mxtrain.titan.check_job import check_job, check_names  # takes seconds

        if machine is None:
            check_names(settings.values)
        else:
            check_job(settings, machine)
    return settings


def check_machine_of(runs: dict[str, PairedRun], has_gpus: bool) -> None:
    """Raise ConfigError if an unfinished run could not start on this machine with its number of processes."""
    for run in {run.variant: run for run in runs.values() if run.status != 0}.values():
        try:
            settings_of(run, Machine(run.gpus, has_gpus))
        except ConfigError as error:
            raise ConfigError(f"{run.name}: {error}") from None


def joined(earlier: dict[str, PairedRun], plan: dict[str, PairedRun], where: str) -> dict[str, PairedRun]:
    """Return the runs of a comparison that was begun before, with what is planned now: more seeds, rates or variants.

    Args:
        where: the option that names the folder, for the error.

    Raises ConfigError if a run of the same name had other settings.
    """
    for name, run in plan.items():
        before = earlier.get(name, run)
        if before.arguments != run.arguments:
            what = f"was begun with other flags ({shlex.join(before.arguments)})"
        elif before.config_sha256 != run.config_sha256:
            what = f"was begun before {run.arguments[0]} changed"
        else:
            continue
        raise ConfigError(f"{where}: its run {name} {what}; choose another folder")
    before = {name: earlier.get(name, run) for name, run in plan.items()}
    again = {
        name: replace(run, status=before[name].status, directory=before[name].directory or run.directory)
        for name, run in plan.items()
    }
    return {**earlier, **again}


def unpaired_settings(runs: dict[str, PairedRun]) -> list[str]:
    """Return a line for each setting in which variants differ, or runs of one variant, and paired runs must not."""
    first_of = {(run.variant, run.gpus): run for run in reversed(runs.values())}
    return unpaired((run.variant, _paired_settings(run)) for run in reversed(first_of.values()))


def _paired_settings(run: PairedRun) -> dict[str, object]:
    settings = settings_of(run)
    # With defaults, but for [model_args], whose defaults are the flavor's.
    found = {name: settings[name] for name in PAIRING_SETTINGS} | settings.given
    # Unset, it follows from the layout: tensor parallelism leaves fewer processes that read different text.
    return found | {BATCH: global_batch_size(settings, run.gpus)}
