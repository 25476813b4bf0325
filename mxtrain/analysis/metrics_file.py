"""Reads and writes ``metrics.jsonl``: one JSON object per logged step, in the order of logging.

A training row has ``step``, ``loss``, ``max_loss``, ``grad_norm``, ``lr``, ``tokens_per_second`` (per device),
``memory_gib`` (peak since the previous row), ``tokens_seen`` and ``time`` (Unix seconds). Runs with
``optimizer.early_step_in_backward`` have no ``grad_norm``. A loss that ends the run between logged steps has ``step``,
``loss``, ``tokens_seen`` and ``time``. A validation row has ``step``, ``validation_loss`` and ``time``. A row of
diagnostics has ``step``, the figures of ``mxtrain.analysis.numerics`` and ``time``. An event row has ``step``,
``event`` and ``time``: a text that says what changes with this step, such as another recipe or a setting of a resumed
run, or that weights after it are not finite, which ends the run.

JSON has no NaN or infinity. Such a value is written as null, and the row's extra key ``nonfinite`` holds its name:
``{"step": 7, "loss": null, ..., "nonfinite": {"loss": "nan"}}``. Any JSON reader can parse the line and sees a
missing value; ``read_metrics`` restores the float.
"""

import itertools
import json
import math
import os
from pathlib import Path

from mxtrain.errors import ConfigError
from mxtrain.files import reason, replace_file
from mxtrain.json_toml import parse
from mxtrain.run_folder.files import METRICS_FILE

EVENT = "event"
"""Key of the text in an event row"""


def encode_row(row: dict) -> str:
    """Return one line of strict JSON, without a newline. ``row`` is flat: numbers, and an event's text."""
    nonfinite = {key: str(value) for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    if nonfinite:
        row = {**row, **dict.fromkeys(nonfinite), "nonfinite": nonfinite}
    return json.dumps(row, allow_nan=False)


def decode_row(line: str) -> dict:
    """Invert ``encode_row``. Raises ValueError if the line is not a row."""
    row = parse(line)
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise ValueError("not a JSON object with an integer 'step'")
    nonfinite = row.pop("nonfinite", {})
    if not isinstance(nonfinite, dict):
        raise ValueError(f"'nonfinite' is {nonfinite!r}, not a JSON object")
    for key, value in nonfinite.items():
        if type(value) is not str:
            raise ValueError(f"'nonfinite' has {value!r} for {key!r}, not the name of a number")
        row[key] = float(value)
    for key, value in row.items():
        if key == EVENT and type(value) is not str:
            raise ValueError(f"{key!r} is {value!r}, not a text")
        if key != EVENT and value is not None and type(value) not in (int, float):
            raise ValueError(f"{key!r} is {value!r}, not a number")
    return row


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """Return all rows of a metrics file.

    A damaged last line is dropped: a process that dies while it writes leaves one. Raises ConfigError if the file is
    missing or cannot be read, or if any other line is damaged.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; a run creates this file at its first logged step") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason(error)}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(decode_row(line.decode()))
        except ValueError as error:
            if number < len(lines):
                raise ConfigError(f"{path}, line {number}: {error}") from error
    return rows


def metrics_of_run(folder: Path) -> list[dict]:
    """Return all rows of a run's metrics. Raises ConfigError if there is no such folder, and as ``read_metrics``."""
    if not folder.is_dir():
        what = "is a file: name the run's folder" if folder.exists() else "does not exist"
        raise ConfigError(f"run folder {str(folder)!r} {what}")
    return read_metrics(folder / METRICS_FILE)


def lacks_validation(path: Path, step: int) -> bool:
    """Return whether a run's metrics have no validation of a step. False if they cannot be read."""
    try:
        with path.open("rb") as lines:
            return not any(_is_validation(line, step) for line in lines)
    except OSError:
        return False


def _is_validation(line: bytes, step: int) -> bool:
    if b'"validation_loss"' not in line:  # decoding every line of a long run would take seconds
        return False
    try:
        return decode_row(line.decode())["step"] == step
    except ValueError:
        return False


def missing_rows(path: Path, steps_done: int, log_freq: int) -> list[str]:
    """Say which rows of the first ``steps_done`` steps a metrics file lacks: a line for damaged ones and for each gap.

    A gap is longer than ``log_freq`` and than the distances between the rows before it and after it, because a run may
    have logged more or less often before. A file that has no rows or cannot be read lacks nothing: a run may go on from
    the checkpoint of another. A damaged last line is what a kill leaves.
    """
    steps, damaged, is_damaged = [], 0, False
    try:
        with path.open("rb") as lines:
            for line in lines:
                damaged += is_damaged  # and not the last line
                try:
                    row = decode_row(line.decode())
                except ValueError:
                    is_damaged = True
                    continue
                is_damaged = False
                if "loss" in row and row["step"] <= steps_done:
                    steps.append(row["step"])
    except OSError:
        return []
    found = [f"{path}: {damaged} damaged lines are left out"] if damaged else []
    for before, after in _gaps(steps, steps_done, log_freq):
        steps_without = f"step {before + 1}" if after - before == 2 else f"steps {before + 1} to {after - 1}"
        found.append(f"{path} has no rows of {steps_without}")
    return found


def _gaps(steps: list[int], steps_done: int, log_freq: int) -> list[tuple[int, int]]:
    """The steps before and after each gap. Behind the last row it ends with the first step that is not done."""
    pairs = list(itertools.pairwise(steps))
    apart = [after - before for before, after in pairs]
    gaps = [pairs[i] for i in range(1, len(pairs) - 1) if apart[i] > max(log_freq, apart[i - 1], apart[i + 1])]
    if apart and steps_done + 1 - steps[-1] > max(log_freq, apart[-1]):
        gaps.append((steps[-1], steps_done + 1))
    return gaps


class MetricsWriter:
    """Appends rows to ``path``, each as soon as it is written.

    The first row removes rows of steps that are not done from an existing file. A restarted run therefore begins with
    an empty file, and a run resumed from a checkpoint replaces the steps that it repeats.

    Args:
        steps_done: number of steps before the first one that will be written. 0 for a run that does not resume.

    Rows that cannot be written, on a full disk for example, wait in memory for the next call. If the file is removed,
    or its folder moved, all its rows are written to ``path`` again.
    """

    def __init__(self, path: str | os.PathLike, steps_done: int = 0):
        self.path = Path(path)
        self._file = None
        self._steps_done = steps_done
        self._unwritten = bytearray()

    def write(self, row: dict) -> bool:
        """Write ``row``, after the rows that wait. Return whether the file was gone, or another one in its place.

        Raises OSError if the file cannot be written; ``row`` then waits.
        """
        self._unwritten += encode_row(row).encode() + b"\n"
        return self._write_waiting()

    def close(self) -> None:
        """Write the rows that wait, and close the file. Raises OSError if they are lost."""
        try:
            self._write_waiting()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write_waiting(self) -> bool:
        if not self._unwritten:
            return False
        was_gone = self._file is not None and not self._is_in_place()
        if was_gone:
            self._put_in_place()
        elif self._file is None:
            self._drop_steps_not_done()
            self._file = self._opened()
        while self._unwritten:
            count = self._file.write(self._unwritten)  # a part of a row if the disk becomes full
            del self._unwritten[:count]
        return was_gone

    def _opened(self):
        return self.path.open("a+b", buffering=0)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    def _put_in_place(self) -> None:
        """Write all rows to the path again, from the open file, which has no name any more or another one.

        A file that someone has put there instead stays, and gets the next rows.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            self._file.seek(0)
            replace_file(self.path, self._file.read())
        self._file.close()
        self._file = self._opened()
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read() != b"\n":  # an editor may leave the last line without an end
                self._file.write(b"\n")

    def _drop_steps_not_done(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if self.path.is_file():
            for line in self.path.read_bytes().splitlines():
                try:
                    step = decode_row(line.decode())["step"]
                except ValueError:
                    continue  # a damaged line must not stop a training run
                if step <= self._steps_done:
                    kept.append(line + b"\n")
        replace_file(self.path, b"".join(kept))
