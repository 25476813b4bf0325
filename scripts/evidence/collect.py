"""Append runs to a CSV of results: one row per run folder, its settings and its final losses.

python scripts/evidence/collect.py scripts/evidence/llama3_125m.csv outputs/a outputs/b

--no-speed leaves out the speed of runs that shared their GPU.
A run that has not ended is left out with a line. A run whose loss or weights are not finite has nan as its losses.
``mxtrain report`` draws the CSV.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

from mxtrain.analysis import load_run
from mxtrain.analysis.results import append_results, nonfinite_loss, result_of
from mxtrain.errors import ConfigError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--no-speed", action="store_true")
    args = parser.parse_args(argv)
    results = []
    for folder in args.folders:
        try:
            result = result_of(load_run(folder))
        except ConfigError as error:
            print(f"{folder}: skipped: {error}", file=sys.stderr)
            continue
        if args.no_speed:
            result = replace(result, tokens_per_second=None)
        if nonfinite_loss(result.run):
            # Left out, it would be missing in the report without a line, as if every seed had come to its end.
            results.append(replace(result, tail=math.nan, validation=None, validation_step=None))
        elif result.problem:
            print(f"{folder}: skipped: {result.problem}", file=sys.stderr)
        else:
            results.append(result)
    try:
        append_results(args.csv, results)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
