"""Finds the results in run folders, comparisons, folders of runs, and CSVs of results."""

import os
from pathlib import Path

from mxtrain.analysis.labels import variants
from mxtrain.analysis.results import Result, read_results, result_of
from mxtrain.analysis.runs import Run, load_run
from mxtrain.errors import ConfigError
from mxtrain.run_folder.comparison import COMPARISON_FILE, read_comparison
from mxtrain.run_folder.files import FACTS_FILE, METRICS_FILE


def read_sources(paths: list[Path]) -> tuple[list[Result], list[str]]:
    """Return all results in the order of ``paths``, and a line for whatever cannot be read."""
    results: list[Result | None] = []
    runs: list[tuple[int, Run]] = []  # those that no comparison names, and their place among the results
    notes: list[str] = []
    for path in [one for given in paths for one in _inside(given)]:
        try:
            if path.is_file():
                found, left_out = read_results(path)
                results += found
                notes += left_out
            else:
                for folder, variant in _folders(path):
                    _add(folder, variant, results, runs, notes)
        except ConfigError as error:
            notes.append(str(error))
    for (place, run), variant in zip(runs, variants([run for _, run in runs]), strict=True):
        results[place] = result_of(run, variant)
    return results, notes


def _add(folder: Path, variant: str | None, results: list, runs: list, notes: list[str]) -> None:
    try:
        run = load_run(folder)
    except ConfigError as error:
        notes.append(str(error))
        return
    if variant is None:
        runs.append((len(results), run))
    results.append(None if variant is None else result_of(run, variant))


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
