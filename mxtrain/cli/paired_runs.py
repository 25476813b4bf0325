"""Which runs a comparison consists of: every variant with every learning rate and seed."""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from mxtrain.analysis.comparison import PAIRING_SETTINGS, unpaired
from mxtrain.config import load_config
from mxtrain.errors import ConfigError, errors_begin_with
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


class Variant(NamedTuple):
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
        ConfigError: for two runs of one name, a name that is too long for a folder, a flag that the
            comparison sets itself, and a config that cannot be read.
    """
    found = [variant_of(words) for words in variants]
    own = (*OWN_SETTINGS, *(["optimizer.lr"] if rates else []))
    for flag in [flag for variant in found for flag in (*flags, *variant.flags)]:
        if flag.partition("=")[0].removeprefix("--").replace("-", "_") in own:
            raise ConfigError(f"{flag.partition('=')[0]}: 'mxtrain compare' sets it for every run")
    hashes = [_hash(variant.config) for variant in found]
    runs = {}
    for seed, rate, (variant, hashed) in product(range(seeds), rates or [""], zip(found, hashes)):
        name = f"{variant.name}{f'-lr{rate}' if rate else ''}-seed{seed}"
        if name in runs:
            raise ConfigError(f"two runs have the name {name!r}: write NAME=CONFIG to name variants apart")
        if (length := len(name.encode())) > LONGEST_NAME:
            raise ConfigError(
                f"the folder's name {name[:40]!r}... has {length} bytes, and at most {LONGEST_NAME} are allowed: "
                "write NAME=CONFIG with a short NAME"
            )
        arguments = [variant.config, *flags, *variant.flags, *([f"--optimizer.lr={rate}"] if rate else [])]
        arguments.append(f"--debug.seed={seed}")
        runs[name] = PairedRun(name, variant.name, arguments, hashed, directory=os.getcwd())
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
            directory = before.directory or run.directory
            runs[name] = replace(run, status=before.status, gpus=before.gpus, directory=directory)
            continue
        raise ConfigError(f"{where}: its run {name} {what}; choose another folder")
    return runs


def read_all(runs: dict[str, PairedRun], has_gpus: bool = True) -> dict[str, Settings]:
    """Return the settings of all runs by name.

    Raises ConfigError for a mistake in them, or if an unfinished run could not start with its number of processes.
    """
    from mxtrain.titan.check_job import check_job  # takes seconds

    found, checked = {}, set()
    for name, run in runs.items():
        with errors_begin_with(f"{name}: "), _in_place_of(run) as arguments:
            found[name] = read_settings(arguments)
            if run.status != 0 and run.variant not in checked:
                check_job(found[name], Machine(run.gpus, has_gpus))
                checked.add(run.variant)
    return found


def unpaired_settings(runs: dict[str, PairedRun], settings: Mapping[str, Settings]) -> list[str]:
    """Return a line for each setting in which variants differ, or runs of one variant, and paired runs must not."""
    found = {}
    for name, run in runs.items():
        own = settings[name]
        # With defaults, but for [model_args], whose defaults are the flavor's.
        values = {setting: own[setting] for setting in PAIRING_SETTINGS} | own.given
        # Unset, it follows from the layout: tensor parallelism leaves fewer processes that read different text.
        batch = {BATCH: global_batch_size(own, run.gpus)}
        found.setdefault((run.variant, run.gpus), (run.variant, values | batch))
    return unpaired(found.values())


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
