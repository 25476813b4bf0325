"""Which runs a comparison consists of: every variant with every learning rate and seed."""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from mxtrain.analysis.comparison import PAIRING_SETTINGS, unpaired
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
        ConfigError: for two variants or runs of one name, a name that is too long for a folder, a flag that the
            comparison sets itself, and a config that cannot be read.
    """
    found = [variant_of(words) for words in variants]
    names = [variant.name for variant in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two variants have the name {twice[0]!r}: write NAME=CONFIG to name them")
    own = (*OWN_SETTINGS, *(["optimizer.lr"] if rates else []))
    for flag in [flag for variant in found for flag in (*flags, *variant.flags)]:
        if flag.partition("=")[0].removeprefix("--").replace("-", "_") in own:
            raise ConfigError(f"{flag.partition('=')[0]}: 'mxtrain compare' sets it for every run")
    hashes = {variant.name: _hash(variant.config) for variant in found}
    runs = {}
    for seed, rate, variant in [(s, r, v) for s in range(seeds) for r in rates or [""] for v in found]:
        name = f"{variant.name}{f'-lr{rate}' if rate else ''}-seed{seed}"
        if name in runs:
            raise ConfigError(f"two runs have the name {name!r}: write NAME=CONFIG with other names")
        if (length := len(name.encode())) > LONGEST_NAME:
            raise ConfigError(
                f"the folder's name {name[:40]!r}... has {length} bytes, and at most {LONGEST_NAME} are allowed: "
                "write NAME=CONFIG with a short NAME"
            )
        arguments = [variant.config, *flags, *variant.flags, *([f"--optimizer.lr={rate}"] if rate else [])]
        arguments.append(f"--debug.seed={seed}")
        runs[name] = PairedRun(name, variant.name, arguments, hashes[variant.name], directory=os.getcwd())
    return runs


def planned_again(earlier: dict[str, PairedRun]) -> dict[str, PairedRun]:
    """Return the runs of a comparison that was begun before, with their configs as they are now.

    Raises ConfigError if a config cannot be read.
    """
    runs = {}
    for name, run in earlier.items():
        with _in_place_of(run):
            runs[name] = replace(run, config_sha256=_hash(run.arguments[0]))
    return runs


def joined(earlier: dict[str, PairedRun], plan: dict[str, PairedRun], where: str) -> dict[str, PairedRun]:
    """Return the runs of a comparison that was begun before, with what is planned now: more seeds, rates or variants.

    Args:
        where: the option that names the folder, for the error.

    Raises ConfigError if a run of the same name had other settings.
    """
    runs = dict(earlier)
    for name, run in plan.items():
        before = earlier.get(name, run)
        if before.arguments != run.arguments:
            what = f"was begun with other flags ({shlex.join(before.arguments)})"
        elif before.config_sha256 != run.config_sha256:
            what = f"was begun before {run.arguments[0]} changed"
        else:
            runs[name] = replace(run, status=before.status, directory=before.directory or run.directory)
            continue
        raise ConfigError(f"{where}: its run {name} {what}; choose another folder")
    return runs


def read_all(runs: dict[str, PairedRun]) -> dict[str, Settings]:
    """Return the settings of all runs by name. Raises ConfigError for every mistake that shows without PyTorch."""
    from mxtrain.titan.check_job import check_names  # takes seconds

    found = {}
    for name, run in runs.items():
        with _in_place_of(run) as arguments:
            found[name] = read_settings(arguments)
            check_names(found[name].values)
    return found


def check_machine_for(runs: dict[str, PairedRun], settings: Mapping[str, Settings], has_gpus: bool) -> None:
    """Raise ConfigError if an unfinished run could not start on this machine with its number of processes."""
    from mxtrain.titan.check_job import check_job  # takes seconds

    for run in {run.variant: run for run in runs.values() if run.status != 0}.values():
        try:
            with _in_place_of(run):
                check_job(settings[run.name], Machine(run.gpus, has_gpus))
        except ConfigError as error:
            raise ConfigError(f"{run.name}: {error}") from None


def unpaired_settings(runs: dict[str, PairedRun], settings: Mapping[str, Settings]) -> list[str]:
    """Return a line for each setting in which variants differ, or runs of one variant, and paired runs must not."""
    first_of = {(run.variant, run.gpus): run for run in reversed(runs.values())}
    found = []
    for run in reversed(first_of.values()):
        own = settings[run.name]
        # With defaults, but for [model_args], whose defaults are the flavor's.
        values = {name: own[name] for name in PAIRING_SETTINGS} | own.given
        # Unset, it follows from the layout: tensor parallelism leaves fewer processes that read different text.
        found.append((run.variant, values | {BATCH: global_batch_size(own, run.gpus)}))
    return unpaired(found)


@contextmanager
def _in_place_of(run: PairedRun) -> Iterator[list[str]]:
    """Context in the directory of a run, with its arguments; a ConfigError in it gets the config's file and line."""
    here = os.getcwd()
    config, *flags = run.arguments
    arguments = [f"{CONFIG_FLAGS[0]}={config}", *flags]
    os.chdir(run.working_directory)
    try:
        with places(arguments):
            yield arguments
    finally:
        os.chdir(here)


def _hash(config: str) -> str:
    content = json.dumps(load_config(config), sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()
