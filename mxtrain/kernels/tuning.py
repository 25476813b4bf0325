"""Search for the fastest settings of an operation for one shape on this GPU, and keep them for later processes.

Nothing tunes itself: ``mxtrain doctor --tune`` or a benchmark calls the ``tune...`` functions, and every later process
uses the settings they found. (``triton.autotune`` would time kernels inside training, once in every process, so that
ranks could pick different plans and thus different bits.)
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import torch
import triton
from triton.runtime.errors import OutOfResources

from mxtrain.kernels.plan_table import Operation, gpu_of
from mxtrain.kernels.tuned_plans import TunedPlan, save

P = TypeVar("P")


class Search(NamedTuple):
    """What there is to try for one shape."""

    operation: Operation
    key: str
    """Name of the shape among the tuned ones"""
    starts: tuple
    """Settings to walk from"""
    fields: tuple[str, ...]
    """Fields to vary, in this order"""
    neighbour: Callable[[P, str, bool], P | None]
    """See ``walk``"""
    prepare: Callable[[P], Callable[[], object]]
    """Settings -> a function that runs the kernels once. Both may raise OutOfResources"""


def walk(
    start: P, fields: Iterable[str], neighbour: Callable[[P, str, bool], P | None], time: Callable[[P], float]
) -> tuple[P, dict[P, float]]:
    """Double each field in turn while that is faster, or else halve it; repeat until no field changes.

    The time is assumed to be roughly a parabola over the logarithm of a field: the first step that is not faster ends
    the walk along this field.

    Args:
        start: settings to walk from.
        neighbour: (settings, field, True) -> settings with this field doubled, (settings, field, False) -> halved; None
            at the end of the field's range.
        time: settings -> time in any unit, infinity if the kernels cannot run. Called once per settings.

    Returns:
        The fastest settings, and the times of all that were tried.
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


def walk_all(search: Search, time: Callable[[P], float]) -> tuple[P, dict[P, float]]:
    """``walk`` from every start of a search; the fastest settings of all walks, and all times."""
    time = functools.cache(time)
    walks = [walk(start, search.fields, search.neighbour, time) for start in search.starts]
    best, _ = min(walks, key=lambda result: result[1][result[0]])
    return best, {settings: each for _, times in walks for settings, each in times.items()}


def gpu() -> torch.device:
    """The current GPU.

    Raises:
        RuntimeError: without a GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("tuning times kernels on a GPU, and there is none here")
    return torch.device("cuda", torch.cuda.current_device())


def recorded(run: Callable[[], object]) -> Callable[[], None]:
    """``run`` as a CUDA graph, so that timing excludes host overhead, which training hides behind other work."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def tune(search: Search, device: torch.device) -> None:
    """Find the fastest settings of a search on ``device`` and save them in the user's cache."""

    def time(settings) -> float:
        try:
            return triton.testing.do_bench(recorded(search.prepare(settings)), return_mode="median")
        except OutOfResources:
            return math.inf

    best, times = walk_all(search, time)
    entry = TunedPlan(best._asdict(), times[best] * 1e3, len(times))
    save(search.operation, gpu_of(device).name, search.key, entry)
