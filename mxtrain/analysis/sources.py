"""Finds the results in run folders, comparisons, folders of runs, and CSVs of results."""

import os
from pathlib import Path
from typing import NamedTuple

from mxtrain.analysis.labels import compared_settings, variants
from mxtrain.analysis.results import Result, read_results, result_of
from mxtrain.analysis.runs import Run, load_run
from mxtrain.errors import ConfigError
from mxtrain.run_folder.comparison import COMPARISON_FILE, read_comparison
from mxtrain.run_folder.files import FACTS_FILE, METRICS_FILE


def read_sources(paths: list[Path]) -> tuple[list[Result], list[str]]:
    """Return all results in the order of ``paths``, and a line for whatever cannot be read."""
    found: list[Result | Run | _Compared] = []  # rows of a CSV, runs that no comparison names, and runs of comparisons
    notes: list[str] = []
    for path in [one for given in paths for one in _inside(given)]:
        try:
            if path.is_file():
                rows, left_out = read_results(path)
                found += rows
                notes += left_out
            else:
                for folder, variant in _folders(path):
                    run = _loaded(folder, notes)
                    if run is not None:
                        found.append(run if variant is None else _Compared(path, variant, run))
        except ConfigError as error:
            notes.append(str(error))
    # The name of a run's variant depends on all other runs.
    of_alone = iter(variants([one for one in found if isinstance(one, Run)]))
    of_compared = iter(_told_apart([one for one in found if isinstance(one, _Compared)]))
    results = []
    for one in found:
        if isinstance(one, Run):
            one = result_of(one, next(of_alone))
        elif isinstance(one, _Compared):
            one = result_of(one.run, next(of_compared))
        results.append(one)
    return results, notes


class _Compared(NamedTuple):
    """A run of the comparison in ``folder``, which calls its variant ``variant``."""

    folder: Path
    variant: str
    run: Run


def _told_apart(found: list[_Compared]) -> list[str]:
    """Return the variant of every run: its name, after its comparison where another means other settings by it."""
    meanings: dict[str, dict[Path, dict[str, str]]] = {}
    for one in found:
        meanings.setdefault(one.variant, {}).setdefault(one.folder, compared_settings(one.run))
    folders = {one.folder for one in found}
    names = [folder.resolve().name for folder in folders]
    shown = {f: f.resolve().name if names.count(f.resolve().name) == 1 else str(f) for f in folders}
    told = []
    for one in found:
        first, *others = meanings[one.variant].values()
        differ = any(other != first for other in others)
        told.append(f"{shown[one.folder]}/{one.variant}" if differ else one.variant)
    return told


def _loaded(folder: Path, notes: list[str]) -> Run | None:
    try:
        return load_run(folder)
    except ConfigError as error:
        notes.append(str(error))
        return None


def _inside(path: Path) -> list[Path]:
    """Return the runs and comparisons in a folder that is neither; ``path`` itself if there are none."""
    # Unlike Path's, these functions raise no error for a folder that may not be searched.
    own = (os.path.exists(path / name) for name in (METRICS_FILE, FACTS_FILE, COMPARISON_FILE))
    if not os.path.isdir(path) or any(own):
        return [path]
    # A run that failed before its first logged step has no metrics, and becomes a line.
    found = {file.parent for name in (METRICS_FILE, FACTS_FILE, COMPARISON_FILE) for file in path.glob(f"*/{name}")}
    return sorted(found) or [path]


def _folders(path: Path) -> list[tuple[Path, str | None]]:
    """Return the run folders that ``path`` stands for, with the variant's name where a comparison gives one."""
    planned = read_comparison(path)
    return [(path / run.name, run.variant) for run in planned.values()] or [(path, None)]
