"""Append runs to a CSV of results: one row per run folder, its settings and its final losses.

python scripts/evidence/collect.py scripts/evidence/llama3_125m.csv outputs/a outputs/b

--no-speed leaves out the speed of runs that shared their GPU.
A run that has not ended is left out with a line. A run whose loss or weights are not finite has nan as its losses.
``mxtrain compare --from`` draws the CSV.
"""

import argparse
import csv
import math
import os
import sys
from pathlib import Path

from mxtrain.analysis import load_run
from mxtrain.analysis.comparison import COLUMNS, row_of
from mxtrain.errors import ConfigError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--no-speed", action="store_true")
    args = parser.parse_args(argv)
    rows = []
    for folder in args.folders:
        try:
            run = load_run(folder)
        except ConfigError as error:
            print(f"{folder}: skipped: {error}", file=sys.stderr)
            continue
        row = row_of(run) | ({"tokens_per_second": None} if args.no_speed else {})
        if run.nonfinite_loss:
            # Left out, it would be missing in the table without a line, as if every seed had come to its end.
            rows.append(row | {"last_10_percent": math.nan, "validation": None, "validation_step": None})
        elif row["problem"]:
            print(f"{folder}: skipped: {row['problem']}", file=sys.stderr)
        else:
            rows.append(row)
    try:
        append_results(args.csv, rows)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def cells_of(row: dict) -> dict[str, str]:
    """Return a row as text by COLUMNS; "" where a number is not known."""
    return {name: "" if row[name] is None else f"{row[name]:{form}}" for name, form in COLUMNS.items()}


def append_results(path: str | os.PathLike, rows: list[dict]) -> None:
    """Append rows of results to a CSV, which is created if it does not exist.

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
        writer.writerows(map(cells_of, rows))


if __name__ == "__main__":
    sys.exit(main())
