"""Reads and writes ``metrics.jsonl``: one JSON object per logged step, in the order of logging.

A training row has ``step``, ``loss``, ``max_loss``, ``grad_norm``, ``lr``, ``tokens_per_second`` (per device),
``tflops`` (per device) and ``mfu`` (percent of the peak in bf16) for GPUs whose peak TorchTitan knows, ``memory_gib``
(peak since the previous row), ``tokens_seen`` and ``time`` (Unix seconds). A loss that ends the run between logged
steps has ``step``, ``loss``, ``tokens_seen`` and ``time``. A validation row has ``step``, ``validation_loss`` and
``time``. A row of diagnostics has ``step``, the figures of ``mxtrain.analysis.numerics`` and ``time``. An event row has
``step``, ``event`` and ``time``: a text that says what changes with this step, such as another recipe or a setting of a
resumed run, or that weights after it are not finite, which ends the run.

JSON has no NaN or infinity. Such a value is written as null, and the row's extra key ``nonfinite`` holds its name:
``{"step": 7, "loss": null, ..., "nonfinite": {"loss": "nan"}}``. Any JSON reader can parse the line and sees a
missing value; ``read_metrics`` restores the float.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from mxtrain.errors import ConfigError
from mxtrain.files import parse, reason, replace_file

EVENT = "event"
"""Key of the text in an event row"""
NUMERICS = "numerics/"
"""Beginning of the keys of figures of diagnostics"""
MERGED_SHARE = "_merged"
"""End of the key of a figure: the share of a cast's codes that mode "fp8_merged" changes"""
IMAGE_LAYERS = "layers so far: "
"""In the event of a layer that mode "fp8_merged" gives up, before the number of these layers so far"""


def encode_row(row: dict) -> str:
    """Return one line of strict JSON, without a newline. ``row`` is flat: numbers, and an event's text."""
    nonfinite = {key: str(value) for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    if nonfinite:
        row = {**row, **dict.fromkeys(nonfinite), "nonfinite": nonfinite}
    return json.dumps(row, allow_nan=False)


def _decoded(lines: Iterable[bytes]) -> Iterator[dict | ValueError]:
    """Invert ``encode_row``: yield the row of each line, or the error of a damaged line."""
    for line in lines:
        try:
            row = parse(line.decode())
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise ValueError("the line is not a JSON object with an integer 'step'")
            yield row | {key: float(value) for key, value in row.pop("nonfinite", {}).items()}
        except ValueError as error:
            yield error


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """Return all rows of a metrics file.

    A damaged last line is dropped: a process that dies while it writes leaves one.
    """
    path = Path(path)
    try:
        rows = list(_decoded(path.read_bytes().splitlines()))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; a run creates this file at its first logged step") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason(error)}") from error
    for number, row in enumerate(rows[:-1], start=1):
        if isinstance(row, ValueError):
            raise ConfigError(f"{path}, line {number}: {row}; remove this line") from row
    return [row for row in rows if isinstance(row, dict)]


class MetricsWriter:
    """Appends rows to ``path``, each as soon as it is written.

    The first row removes rows of steps that are not done from an existing file. A restarted run therefore begins with
    an empty file, and a run resumed from a checkpoint replaces the steps that it repeats.

    Args:
        steps_done: number of steps before the first one that will be written. 0 for a run that does not resume.

    Rows that cannot be written, on a full disk for example, wait in memory for the next call. A file that was removed
    or moved gets no more rows: they go on in a new file at ``path``.
    """

    def __init__(self, path: str | os.PathLike, steps_done: int = 0):
        self.path = Path(path)
        self._steps_done: int | None = steps_done
        self._unwritten = bytearray()

    def write(self, row: dict) -> None:
        """Write ``row``, after the rows that wait. Raises OSError if the file cannot be written; ``row`` then waits."""
        self._unwritten += encode_row(row).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write the rows that wait. Raises OSError if the file cannot be written."""
        if not self._unwritten:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._steps_done is not None:
            lines = self.path.read_bytes().splitlines() if self.path.is_file() else []
            # A damaged line must not stop a training run.
            rows = [(line, row) for line, row in zip(lines, _decoded(lines)) if isinstance(row, dict)]
            replace_file(self.path, b"".join(line + b"\n" for line, row in rows if row["step"] <= self._steps_done))
            self._steps_done = None
        with self.path.open("ab", buffering=0) as file:
            while self._unwritten:
                count = file.write(self._unwritten)  # a part of a row if the disk becomes full
                del self._unwritten[:count]
