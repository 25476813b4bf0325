"""The fastest plan of an RMSNorm kernel for one shape on this GPU: the walk that finds it, the file that keeps it.

Nothing is tuned by itself: ``tune_forward`` and ``tune_backward`` are called by hand or by a script, and from then on
every process takes their plans for that shape. There is one JSON file for each kind of GPU, in the folder rms_norm of
``mxtrain.cache.cache_folder``.
"""

import functools
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import triton
from triton.runtime.errors import OutOfResources

from mxtrain.cache import cache_folder

# Of the kernels. To be raised when a change to them could change which plan is the fastest.
VERSION = 1

P = TypeVar("P")


class Entry(NamedTuple):
    """What is kept of a tuned shape."""

    plan: dict[str, int]
    microseconds: float
    tried: int
    """Plans that were timed"""
    version: int


def walk(
    start: P, fields: Iterable[str], neighbour: Callable[[P, str, bool], P | None], time: Callable[[P], float]
) -> tuple[P, dict[P, float]]:
    """Field by field, double while that is faster, or else halve; again, until no field is better elsewhere.

    The time over the logarithm of a field is taken for roughly a parabola: the first step that is not faster ends it.

    Args:
        start: the plan to walk from.
        neighbour: (plan, field, True) -> the plan with this field doubled, (plan, field, False) -> halved; None where
            there is no such plan.
        time: of a plan, in any unit; called once a plan. Infinity for a plan that cannot run.

    Returns:
        The fastest plan, and the times of all that were tried.
    """
    time = functools.cache(time)
    times = {start: time(start)}
    best, before = start, None
    while best != before:
        before = best
        for field in fields:
            for double in (True, False):
                came_from = best
                while (candidate := neighbour(best, field, double)) is not None:
                    times[candidate] = time(candidate)
                    if times[candidate] >= times[best]:
                        break
                    best = candidate
                if best != came_from:
                    break
    return best, times


def key(op: str, rows: int, columns: int, dtype: torch.dtype, has_weight: bool) -> str:
    """The name of a shape in the file."""
    return f"{op} {rows}x{columns} {str(dtype).removeprefix('torch.')} {'weight' if has_weight else 'no weight'}"


@functools.cache
def device_name(device: torch.device) -> str:
    """The GPU's name, by which plans are kept; "cpu" where there is none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else "cpu"


def file_of(name: str) -> Path:
    """The file of the GPUs of this name."""
    return cache_folder() / "rms_norm" / f"{re.sub('[^A-Za-z0-9]+', '_', name)}.json"


@functools.cache
def tuned_plans(name: str) -> dict[str, Entry]:
    """Every shape tuned on a GPU of this name with these kernels. The file is read once a process."""
    return _read(file_of(name))


def save(name: str, shape: str, entry: Entry) -> None:
    """Keep a tuned shape. Another process sees the file as it was or as it is, and nothing in between."""
    path = file_of(name)
    entries = {**_read(path), shape: entry}
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}.tmp")
    written.write_text(json.dumps({shape: entry._asdict() for shape, entry in sorted(entries.items())}, indent=1))
    os.replace(written, path)
    tuned_plans.cache_clear()


def tune_forward(rows: int, columns: int, dtype: torch.dtype):
    """Find and keep the fastest plan of ``rms_norm`` for a matrix [rows, columns] of ``dtype`` on the current GPU.

    Returns:
        The ``rms_norm_plan.Choice`` that is made from now on.

    Raises:
        RuntimeError: without a GPU.
        ValueError: for a shape that the kernel does not take.
    """
    # Not at the top: kernels ask for their plans, and plans for this file.
    from mxtrain.kernels.rms_norm import rms_norm_by_plan
    from mxtrain.kernels.rms_norm_plan import FORWARD_FIELDS, choose_forward

    device = _device(rows, columns)
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    x, weight = draw(rows, columns), draw(columns)

    def launches(plan):
        return (rms_norm_by_plan(x, None, weight, 1e-5, plan)[1],)

    shape = key("rms_norm", rows, columns, dtype, True)
    choose = functools.partial(choose_forward, rows, columns, dtype, device)
    return _tune(shape, FORWARD_FIELDS, choose, launches, rows, columns, device)


def tune_backward(rows: int, columns: int, dtype: torch.dtype, has_weight: bool = True):
    """The same for ``rms_norm_backward``, with dweight if there is a weight; see ``tune_forward``."""
    from mxtrain.kernels.rms_norm_backward import rms_norm_backward_by_plan
    from mxtrain.kernels.rms_norm_plan import BACKWARD_FIELDS, choose_backward

    device = _device(rows, columns)
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    dy, x, weight = draw(rows, columns), draw(rows, columns), draw(columns) if has_weight else None
    rstd = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).div(columns**0.5).reciprocal()

    def launches(plan):
        return rms_norm_backward_by_plan(dy, x, rstd, weight, None, has_weight, plan)[1]

    shape = key("rms_norm_backward", rows, columns, dtype, has_weight)
    choose = functools.partial(choose_backward, rows, columns, dtype, has_weight, device)
    return _tune(shape, BACKWARD_FIELDS, choose, launches, rows, columns, device)


def _device(rows: int, columns: int) -> torch.device:
    from mxtrain.kernels.rms_norm_plan import check_shape

    check_shape(rows, columns)
    if not torch.cuda.is_available():
        raise RuntimeError("tuning times kernels on a GPU, and there is none here")
    return torch.device("cuda", torch.cuda.current_device())


def _tune(
    shape: str, fields: tuple[str, ...], choose: Callable, launches: Callable,
    rows: int, columns: int, device: torch.device,
):  # fmt: skip
    from mxtrain.kernels.rms_norm_plan import neighbour, starts

    def time(plan) -> float:
        def run():
            for launch in all_launches:
                launch.run(device)

        all_launches = launches(plan)
        try:
            return triton.testing.do_bench(run, return_mode="median")
        except OutOfResources:
            return math.inf

    step = functools.partial(neighbour, rows=rows, columns=columns)
    walks = [walk(start, fields, step, time) for start in starts(choose().plan, rows, columns)]
    best, times = min(walks, key=lambda result: result[1][result[0]])
    tried = sum(len(times) for _, times in walks)
    save(device_name(device), shape, Entry(best._asdict(), times[best] * 1e3, tried, VERSION))
    return choose()


def _read(path: Path) -> dict[str, Entry]:
    try:
        entries = json.loads(path.read_text())
        return {shape: _checked(**entry) for shape, entry in entries.items() if entry["version"] == VERSION}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(f"tuned plans in {str(path)!r} are ignored: {error!r}", stacklevel=2)
        return {}


def _checked(plan, microseconds, tried, version) -> Entry:
    for number in (microseconds, tried, *plan.values()):
        if not isinstance(number, (int, float)):
            raise TypeError(f"{number!r} is not a number")
    return Entry(plan, microseconds, tried, version)
