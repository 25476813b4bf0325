"""Reads and writes ``metrics.jsonl``: one JSON object per logged step, in the order of logging.

A training row has ``step``, ``loss``, ``max_loss``, ``grad_norm``, ``lr``, ``tokens_per_second`` (per device),
``memory_gib`` (peak since the previous row), ``tokens_seen`` and ``time`` (Unix seconds). A validation row has
``step``, ``validation_loss`` and ``time``.

JSON has no NaN or infinity. Such a value is written as null, and the row's extra key ``nonfinite`` holds its name:
``{"step": 7, "loss": null, ..., "nonfinite": {"loss": "nan"}}``. Any JSON reader can parse the line and sees a
missing value; ``read_metrics`` restores the float.
"""

import json
import math
import os
from pathlib import Path

from mxtrain.errors import ConfigError

FILE_NAME = "metrics.jsonl"


def encode_row(row: dict) -> str:
    """Return one line of strict JSON, without a newline. ``row`` is flat and holds numbers."""
    nonfinite = {key: str(value) for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    if nonfinite:
        row = {**row, **dict.fromkeys(nonfinite), "nonfinite": nonfinite}
    return json.dumps(row, allow_nan=False)


def decode_row(line: str) -> dict:
    """Invert ``encode_row``. Raises ValueError if the line is not a row."""
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError("not a JSON object with an integer 'step'")
    row.update({key: float(value) for key, value in row.pop("nonfinite", {}).items()})
    return row


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """Return all rows of a metrics file.

    A damaged last line is dropped: a process that dies while it writes leaves one. Raises ConfigError if the file is
    missing or any other line is damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; a run creates this file at its first logged step")
    lines = path.read_bytes().splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(decode_row(line.decode()))
        except ValueError as error:
            if number < len(lines):
                raise ConfigError(f"{path}, line {number}: {error}") from error
    return rows


class MetricsWriter:
    """Appends rows to ``path`` and flushes each row.

    The first row removes rows of the same and later steps from an existing file. A restarted run therefore begins
    with an empty file, and a run resumed from a checkpoint replaces the steps that it repeats.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._file = None

    def write(self, row: dict) -> None:
        if self._file is None:
            self._drop_from(row["step"])
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(encode_row(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _drop_from(self, step: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if self.path.is_file():
            for line in self.path.read_bytes().splitlines():
                try:
                    row = decode_row(line.decode())
                except ValueError:
                    continue  # a damaged line must not stop a training run
                if row["step"] < step:
                    kept.append(encode_row(row) + "\n")
        replacement = self.path.with_name(self.path.name + ".tmp")
        replacement.write_text("".join(kept), encoding="utf-8")
        replacement.replace(self.path)  # atomic: the old rows survive a crash at any point
