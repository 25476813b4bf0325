"""The fastest plan of a kernel for one shape on this GPU: the walk that finds it, the file that keeps it.

Nothing is tuned by itself: the functions ``tune...`` of the plan files are called by hand or by a script, and from then
on every process takes their plans for that shape. There is one JSON file for each family of kernels and kind of GPU, in
a folder of ``mxtrain.cache.cache_folder`` that is named for the family.
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

P = TypeVar("P")


class Family(NamedTuple):
    """Kernels whose plans are of one kind, and kept together."""

    name: str
    version: int
    """Of the kernels. To be raised when a change to them could change which plan is the fastest"""
    words: tuple[str, ...] = ()
    """Fields of a plan that are words; all others are numbers"""


class Entry(NamedTuple):
    """What is kept of a tuned shape."""

    plan: dict[str, int | str]
    microseconds: float
    tried: int
    """Plans that were timed"""


class Choice(NamedTuple):
    """A plan, whether it is by "heuristic" or "tuned", and one sentence that says why it is this one."""

    plan: tuple
    source: str
    reason: str


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


@functools.cache
def device_name(device: torch.device) -> str:
    """The GPU's name, by which plans are kept; "cpu" where there is none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else "cpu"


def file_of(family: Family, name: str) -> Path:
    """The file of the GPUs of this name."""
    return cache_folder() / family.name / f"{re.sub('[^A-Za-z0-9]+', '_', name)}.json"


@functools.cache
def tuned_plans(family: Family, name: str) -> dict[str, Entry]:
    """Every shape tuned on a GPU of this name with these kernels. The file is read once a process."""
    return _read(family, file_of(family, name))


def save(family: Family, name: str, shape: str, entry: Entry) -> None:
    """Keep a tuned shape. Another process sees the file as it was or as it is, and nothing in between."""
    path = file_of(family, name)
    entries = {**_read(family, path), shape: entry}
    texts = {shape: {**entry._asdict(), "version": family.version} for shape, entry in sorted(entries.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}.tmp")
    written.write_text(json.dumps(texts, indent=1))
    os.replace(written, path)
    tuned_plans.cache_clear()


def tuned_plan(
    family: Family, shape: str, device: torch.device, plan_type: Callable[..., P], is_valid: Callable[[P], bool]
) -> Choice | None:
    """The plan kept for a shape on this device; None without one that the kernels can walk."""
    entry = tuned_plans(family, device_name(device)).get(shape)
    if entry is None or entry.plan.keys() != set(plan_type._fields) or not is_valid(plan := plan_type(**entry.plan)):
        return None
    return Choice(plan, "tuned", f"the fastest of {entry.tried} plans timed on this GPU, {entry.microseconds:.1f} us")


def gpu() -> torch.device:
    """The current GPU.

    Raises:
        RuntimeError: without one.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("tuning times kernels on a GPU, and there is none here")
    return torch.device("cuda", torch.cuda.current_device())


def recorded(run: Callable[[], object]) -> Callable[[], None]:
    """``run`` as a CUDA graph: to be timed without what the host does, which hides behind other work in training."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def tune(
    family: Family,
    shape: str,
    device: torch.device,
    starts: Iterable[P],
    fields: Iterable[str],
    neighbour: Callable[[P, str, bool], P | None],
    prepare: Callable[[P], Callable[[], object]],
) -> None:
    """Walk from every start, and keep the fastest plan of all for ``shape``.

    Args:
        starts: plans to walk from.
        fields: see ``walk``, as is ``neighbour``.
        prepare: of a plan, returns what is timed, a function without arguments. Either may find that the GPU lacks the
            resources for the plan.
    """

    def time(plan) -> float:
        try:
            return triton.testing.do_bench(prepare(plan), return_mode="median")
        except OutOfResources:
            return math.inf

    walks = [walk(start, fields, neighbour, time) for start in starts]
    best, times = min(walks, key=lambda result: result[1][result[0]])
    tried = sum(len(times) for _, times in walks)
    save(family, device_name(device), shape, Entry(best._asdict(), times[best] * 1e3, tried))


def _read(family: Family, path: Path) -> dict[str, Entry]:
    try:
        entries = json.loads(path.read_text())
        current = {shape: entry for shape, entry in entries.items() if entry["version"] == family.version}
        return {shape: _checked(family, **entry) for shape, entry in current.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(f"tuned plans in {str(path)!r} are ignored: {error!r}", stacklevel=2)
        return {}


def _checked(family: Family, plan, microseconds, tried, version) -> Entry:
    for number in (tried, *(value for field, value in plan.items() if field not in family.words)):
        if not isinstance(number, int):
            raise TypeError(f"{number!r} is not a whole number")
    if not isinstance(microseconds, (int, float)):
        raise TypeError(f"{microseconds!r} is not a number")
    return Entry(plan, microseconds, tried)
