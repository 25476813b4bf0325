"""Append runs to a CSV of results: one row per run folder, its settings and its final losses.

python scripts/evidence/collect.py scripts/evidence/llama3_125m.csv outputs/a outputs/b

--no-speed leaves out the speed of runs that shared their GPU.
A run that has not ended is left out with a line. A run whose loss or weights are not finite has nan as its losses.
``mxtrain report`` draws the CSV.
"""

import argparse
import csv
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

from mxtrain.analysis import load_run
from mxtrain.analysis.results import COLUMNS, FIELDS, HASH_DIGITS, HASHES, Result, nonfinite_loss, result_of
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


def row_of(result: Result) -> dict[str, str]:
    """Return the result as a row of a CSV with ``COLUMNS``; "" where a number is not known."""
    values = {column: (getattr(result, name), form) for column, (name, _, form) in FIELDS.items()}
    row = {column: "" if value is None else f"{value:{form}}" for column, (value, form) in values.items()}
    return row | {column: result.text.get(key, "")[:HASH_DIGITS] for column, key in HASHES.items()}


def append_results(path: str | os.PathLike, results: list[Result]) -> None:
    """Append a row per result to a CSV, which is created if it does not exist.

    Raises ConfigError if the CSV has other columns: rows would not fit under its header.
    """
    is_new = not Path(path).exists()
    before = "" if is_new else Path(path).read_text(encoding="utf-8-sig")
    if not is_new and (header := before.partition("\n")[0]) != ",".join(COLUMNS):
        raise ConfigError(f"{path} has the columns {header!r}; rows are appended under {','.join(COLUMNS)!r} only")
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        elif not before.endswith("\n"):  # an editor has left the last line open
            file.write("\n")
        writer.writerows(map(row_of, results))


if __name__ == "__main__":
    sys.exit(main())
