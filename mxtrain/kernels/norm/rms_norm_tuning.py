"""Find the fastest plans of the RMSNorm kernels for one shape on the current GPU, and keep them."""

import functools

import torch

from mxtrain.kernels import tuning
from mxtrain.kernels.integers import next_power_of_2
from mxtrain.kernels.norm.rms_norm import rms_norm_by_plan
from mxtrain.kernels.norm.rms_norm_backward import rms_norm_backward_by_plan
from mxtrain.kernels.norm.rms_norm_plan import (
    BACKWARD,
    FORWARD,
    MAX_TILE,
    BackwardSettings,
    ForwardSettings,
    check_shape,
    choose_backward,
    choose_forward,
    choose_settings,
    fit,
    is_valid,
    key,
)
from mxtrain.kernels.plan_table import GPU, Choice, Operation, gpu_of
from mxtrain.kernels.tuning import Search

FIELDS = {FORWARD: ("warps", "tile"), BACKWARD: ("programs_per_sm", "warps", "tile", "stages")}
# Rows of this length and up, while registers can hold them, are tried in both variants.
FEWEST_COLUMNS_IN_DOUBT = 2048


def tune_forward(rows: int, columns: int, dtype: torch.dtype) -> Choice:
    """Find and keep the fastest plan of ``rms_norm`` for a matrix [rows, columns] of ``dtype`` on the current GPU.

    Returns:
        The choice from now on.

    Raises:
        RuntimeError: without a GPU.
        ValueError: for a shape that the kernel does not support.
    """
    check_shape(rows, columns)
    device = tuning.gpu()
    tuning.tune(search_forward(rows, columns, dtype, device), device)
    return choose_forward(rows, columns, dtype, device)


def tune_backward(rows: int, columns: int, dtype: torch.dtype, has_weight: bool = True) -> Choice:
    """Find and keep the fastest plan of ``rms_norm_backward``; see ``tune_forward``. A weight comes with dweight."""
    check_shape(rows, columns)
    device = tuning.gpu()
    tuning.tune(search_backward(rows, columns, dtype, device, has_weight), device)
    return choose_backward(rows, columns, dtype, has_weight, device)


def search_forward(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Search:
    """The search for the fastest plan of ``rms_norm``, on random inputs."""
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    x, weight = draw(rows, columns), draw(columns)

    def launches(plan):
        return (rms_norm_by_plan(x, None, weight, 1e-5, plan)[1],)

    return _search(FORWARD, rows, columns, dtype, True, device, launches)


def search_backward(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, has_weight: bool = True
) -> Search:
    """The search for the fastest plan of ``rms_norm_backward``, on random inputs."""
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    dy, x, weight = draw(rows, columns), draw(rows, columns), draw(columns) if has_weight else None
    rstd = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).div(columns**0.5).reciprocal()

    def launches(plan):
        return rms_norm_backward_by_plan(dy, x, rstd, weight, None, has_weight, plan)[1]

    return _search(BACKWARD, rows, columns, dtype, has_weight, device, launches)


def neighbour(
    operation: Operation, settings, field: str, double: bool, rows: int, columns: int, itemsize: int, gpu: GPU
):
    """Settings with a field doubled or halved, or one stage more or less.

    None where that gives no plan for a matrix [rows, columns], or the same plan.
    """
    value = getattr(settings, field)
    if field == "stages":
        changed = value + 1 if double else value - 1
    else:
        changed = value * 2 if double else value // 2
    if changed < 1 or (field == "tile" and changed > MAX_TILE):
        return None
    changed = settings._replace(**{field: changed})
    before, plan = (fit(operation, each, rows, columns, itemsize, gpu) for each in (settings, changed))
    # A tile that does not fit the shape is the same as another one that does.
    fits = field != "tile" or plan.rows * plan.columns == changed.tile
    return changed if fits and plan != before and is_valid(plan, rows, columns) else None


def starts(operation: Operation, settings, columns: int) -> tuple:
    """Settings to walk from: these and, for long rows, the other variant."""
    width = next_power_of_2(columns)
    if not FEWEST_COLUMNS_IN_DOUBT <= width <= MAX_TILE:
        return (settings,)
    tile = min(4096, width) if settings.persistent else width
    other = {"persistent": not settings.persistent, "tile": tile, "warps": max(1, min(32, tile // 1024))}
    if operation is FORWARD:
        return settings, ForwardSettings(**other)
    return settings, BackwardSettings(**other, stages=1, programs_per_sm=1)


def _search(operation, rows: int, columns: int, dtype, has_weight: bool, device: torch.device, launches) -> Search:
    gpu = gpu_of(device)
    shape = rows, columns, dtype.itemsize, gpu

    def prepare(settings):
        prepared = launches(fit(operation, settings, *shape))

        def run():
            for launch in prepared:
                launch.run(device)

        return run

    def step(settings, field, double):
        return neighbour(operation, settings, field, double, *shape)

    settings = choose_settings(operation, rows, columns, dtype, has_weight, gpu).plan
    walked_from = starts(operation, settings, columns)
    return Search(operation, key(rows, columns, dtype, has_weight), walked_from, FIELDS[operation], step, prepare)
