"""Tables of measured plans, a file per kind of GPU and operation: ``plans/NVIDIA_H200/rms_norm_forward.csv``.

A row has a range for every size of the operation and the settings for shapes in these ranges. ``at`` is the shape that
was timed and ``us`` its microseconds, "-" before the first measurement. ``us_before`` is the time of the settings
that the row had before. ``scripts/bench/write_plans.py`` writes the files.
"""

import csv
import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from mxtrain.files import replace_file
from mxtrain.kernels.device import shared_memory, sm_count

FOLDER = Path(__file__).with_name("plans")
# Serves every GPU with compute capability 9.0 and 132 SMs that has no table of its own, and plans made without a GPU.
H200 = "NVIDIA_H200"


class Operation(NamedTuple):
    """Kernels that are planned together: a table per kind of GPU, and a file of tuned settings in the user's cache."""

    name: str
    version: int
    """Version of the kernels. Raise it when a change to them could change which settings are fastest"""
    sizes: tuple[str, ...]
    """Names of the sizes that rows of a table have ranges of"""
    settings: type
    """NamedTuple of bool, int and str: what a table and a tuned file hold for a shape"""


class Choice(NamedTuple):
    """A plan, or the settings that make one, its source ("tuned", "table NAME" or "rule") and a sentence
    that says why."""

    plan: tuple
    source: str
    reason: str


class GPU(NamedTuple):
    """What plans depend on. Without a GPU these are the figures of an H100."""

    name: str
    tables: tuple[str, ...]
    """Folders of the tables that serve this GPU, the best first"""
    sms: int
    shared: int
    """Bytes of shared memory that one program may use"""


class Row(NamedTuple):
    """A row of a table."""

    ranges: tuple[tuple[int, int | None], ...]
    """(first, last) for every size of the operation; a last of None is unbounded"""
    at: tuple[int, ...]
    """Shape that was timed"""
    settings: tuple
    us: float | None = None
    us_before: float | None = None

    def holds(self, sizes: Sequence[int]) -> bool:
        """Whether every size is in its range."""
        return all(low <= size and (high is None or size <= high) for size, (low, high) in zip(sizes, self.ranges))


def folder_name(gpu_name: str) -> str:
    """Name of the folder or file for GPUs of this name."""
    return re.sub("[^A-Za-z0-9]+", "_", gpu_name)


@functools.cache
def gpu_of(device: torch.device) -> GPU:
    """The GPU ``device``, or an H100 under the name "cpu" where there is no GPU."""
    sms, shared = sm_count(device), shared_memory(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        return GPU("cpu", (H200,), sms, shared)
    name = torch.cuda.get_device_name(device)
    tables = [folder_name(name)]
    if (torch.cuda.get_device_capability(device), sms) == ((9, 0), 132):
        tables.append(H200)
    return GPU(name, tuple(dict.fromkeys(tables)), sms, shared)


@functools.cache
def table_of(operation: Operation, gpu: GPU) -> str | None:
    """The folder whose table of an operation serves this GPU; None without one."""
    return next((table for table in gpu.tables if _file_in(table, operation).is_file()), None)


@functools.cache
def rows_of(operation: Operation, table: str | None) -> tuple[Row, ...]:
    """The rows of an operation's table in this folder; none without a table."""
    return () if table is None else read(operation, _file_in(table, operation))


def _file_in(table: str, operation: Operation) -> Path:
    return FOLDER / table / f"{operation.name}.csv"


@functools.lru_cache(4096)
def find(operation: Operation, table: str | None, sizes: tuple[int, ...]) -> Row | None:
    """The first row of an operation's table whose ranges hold these sizes."""
    return next((row for row in rows_of(operation, table) if row.holds(sizes)), None)


def reason(row: Row) -> str:
    """Where the settings of a row come from, as a sentence."""
    shape = " x ".join(map(str, row.at))
    return f"not timed yet, to be timed at {shape}" if row.us is None else f"measured at {shape}: {row.us:.1f} us"


def read(operation: Operation, path: Path) -> tuple[Row, ...]:
    """The rows of a file.

    Raises:
        ValueError: for a file without the operation's columns, or with cells that do not parse.
    """
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    cells = [[cell.strip() for cell in line] for line in csv.reader(lines)]
    if not cells or cells[0] != _columns(operation) or any(len(line) != len(cells[0]) for line in cells):
        raise ValueError(f"{path}: expected the columns {', '.join(_columns(operation))}")
    try:
        return tuple(_parsed(operation, line) for line in cells[1:])
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from error


def write(operation: Operation, path: Path, rows: Iterable[Row], comment: str) -> None:
    """Replace a file as a whole, with columns aligned and ``comment`` above them."""
    lines = [_columns(operation), *(_formatted(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    texts = [", ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines]
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "\n".join([*(f"# {line}" for line in comment.splitlines()), *texts, ""]).encode())


def _columns(operation: Operation) -> list[str]:
    return [*operation.sizes, "at", *operation.settings._fields, "us", "us_before"]


_BOOLS = {"yes": True, "no": False}


def _parsed(operation: Operation, cells: list[str]) -> Row:
    count = len(operation.sizes)
    ranges, at, settings, times = cells[:count], cells[count], cells[count + 1 : -2], cells[-2:]
    types = operation.settings.__annotations__.values()
    values = (_BOOLS[text] if kind is bool else kind(text) for kind, text in zip(types, settings))
    us, us_before = (None if text == "-" else float(text) for text in times)
    sizes = tuple(map(int, at.split("x")))
    row = Row(tuple(map(_range, ranges)), sizes, operation.settings(*values), us, us_before)
    if len(sizes) != count or not row.holds(sizes):
        raise ValueError(f"{at} is not in the ranges {', '.join(ranges)}")
    return row


def _range(text: str) -> tuple[int, int | None]:
    low, dots, high = text.partition("..")
    return int(low), int(high or low) if high or not dots else None


def _formatted(row: Row) -> list[str]:
    def cell(value) -> str:
        return ("yes" if value else "no") if isinstance(value, bool) else str(value)

    def time(us: float | None) -> str:
        return "-" if us is None else f"{us:.2f}"

    ranges = (str(low) if low == high else f"{low}..{'' if high is None else high}" for low, high in row.ranges)
    at = "x".join(map(str, row.at))
    return [*ranges, at, *map(cell, row.settings), time(row.us), time(row.us_before)]
