"""Append runs to a CSV of results: one row per run folder, its settings and its final losses.

python scripts/evidence/collect.py scripts/evidence/llama3_125m.csv outputs/a outputs/b

A run that has not ended is left out with a line. A run whose loss or weights are not finite has nan as its losses.
``mxtrain report`` draws the CSV.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

from mxtrain.analysis import load_run
from mxtrain.analysis.results import append_results, nonfinite_loss, result_of
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
        if nonfinite_loss(result.run):
            # Left out, it would be missing in the report without a line, as if every seed had come to its end.
            results.append(replace(result, tail=math.nan, validation=None, validation_step=None))
        elif result.problem:
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
