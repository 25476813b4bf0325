"""Append runs to a CSV of results: one row per run folder, its settings and its final losses.

python scripts/evidence/collect.py scripts/evidence/llama3_125m.csv outputs/a outputs/b
"""

import csv
import sys
from datetime import date
from pathlib import Path

import tomli

from mxtrain.analysis import load_run
from mxtrain.errors import ConfigError

COLUMNS = (
    "date", "flavor", "variant", "lr", "seed", "steps", "tokens", "validation", "last_10_percent", "tokens_per_second",
    "memory_gib", "device", "torch",
)  # fmt: skip


def row_of(folder: Path) -> dict[str, str]:
    """One row of the CSV. Losses are in nats; tokens per second are per device.

    Raises:
        ConfigError: for a folder without a run.
    """
    run = load_run(folder)
    config = tomli.loads((folder / "config.toml").read_text())
    last = run.training[-1]
    values = (
        date.fromtimestamp(last["time"]).isoformat(), run.facts["flavor"], run.variant,
        f"{config['optimizer']['lr']:g}", str(config["debug"]["seed"]), str(last["step"]), str(last["tokens_seen"]),
        f"{run.validation_loss:.4f}", f"{run.tail_loss:.4f}", f"{run.tokens_per_second:.0f}",
        f"{run.peak_memory_gib:.2f}", run.facts["device"], run.facts["versions"]["torch"],
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def main(arguments: list[str]) -> int:
    path, *folders = map(Path, arguments)
    is_new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for folder in folders:
            try:
                writer.writerow(row_of(folder))
            except ConfigError as error:
                print(f"{folder}: skipped: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
