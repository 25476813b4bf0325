"""Append runs to a CSV of results: one row per run folder, its settings and its final losses.

python scripts/evidence/collect.py scripts/evidence/llama3_125m.csv outputs/a outputs/b

A run that has not ended is left out with a line. ``mxtrain report`` draws the CSV.
"""

import sys
from pathlib import Path

from mxtrain.analysis import load_run
from mxtrain.analysis.results import append_results, result_of
from mxtrain.errors import ConfigError


def main(arguments: list[str]) -> int:
    path, *folders = map(Path, arguments)
    results = []
    for folder in folders:
        try:
            result = result_of(load_run(folder))
        except ConfigError as error:
            print(f"{folder}: skipped: {error}", file=sys.stderr)
            continue
        if result.problem and result.is_finite:
            print(f"{folder}: skipped: {result.problem}", file=sys.stderr)
        else:
            results.append(result)
    try:
        append_results(path, results)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
