"""Find the fastest plans of RMSNorm and LayerNorm for one shape on the current GPU, and keep them."""

import functools

import torch

from mxtrain.kernels import tuning
from mxtrain.kernels.integers import next_power_of_2
from mxtrain.kernels.norm.rms_norm import norm_by_plan
from mxtrain.kernels.norm.rms_norm_backward import Wanted, norm_backward_by_plan
from mxtrain.kernels.norm.rms_norm_plan import (
    BACKWARD,
    FORWARD,
    LAYER_BACKWARD,
    LAYER_FORWARD,
    MAX_TILE,
    BackwardSettings,
    ForwardSettings,
    check_shape,
    choose_backward,
    choose_forward,
    choose_settings,
    fit,
    is_forward,
    is_valid,
    key,
)
from mxtrain.kernels.plan_table import GPU, Choice, Operation, gpu_of
from mxtrain.kernels.tuning import Search

FORWARD_FIELDS = ("warps", "tile")
BACKWARD_FIELDS = ("programs_per_sm", "warps", "tile", "stages")
FIELDS = {
    FORWARD: FORWARD_FIELDS,
    BACKWARD: BACKWARD_FIELDS,
    LAYER_FORWARD: FORWARD_FIELDS,
    LAYER_BACKWARD: BACKWARD_FIELDS,
}
# Rows of this length and up, while registers can hold them, are tried in both variants.
FEWEST_COLUMNS_IN_DOUBT = 2048


def tune_forward(rows: int, columns: int, dtype: torch.dtype, operation: Operation = FORWARD) -> Choice:
    """Find and keep the fastest plan of ``rms_norm`` for a matrix [rows, columns] of ``dtype`` on the current GPU.

    With ``operation`` LAYER_FORWARD the plan is for ``layer_norm``.

    Returns:
        The choice from now on.

    Raises:
        RuntimeError: without a GPU.
        ValueError: for a shape that the kernel does not support.
    """
    check_shape(rows, columns)
    device = tuning.gpu()
    tuning.tune(search_forward(rows, columns, dtype, device, operation), device)
    return choose_forward(rows, columns, dtype, device, operation)


def tune_backward(
    rows: int, columns: int, dtype: torch.dtype, has_weight: bool = True, operation: Operation = BACKWARD
) -> Choice:
    """Find and keep the fastest plan of ``rms_norm_backward``; see ``tune_forward``.

    With a weight, the backward also computes dweight, and for LayerNorm dbias.
    """
    check_shape(rows, columns)
    device = tuning.gpu()
    tuning.tune(search_backward(rows, columns, dtype, device, has_weight, operation), device)
    return choose_backward(rows, columns, dtype, has_weight, device, operation)


def search_forward(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, operation: Operation = FORWARD
) -> Search:
    """The search for the fastest plan of ``rms_norm`` or ``layer_norm``, on random inputs."""
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    x, weight, centered = draw(rows, columns), draw(columns), operation is LAYER_FORWARD
    bias = draw(columns) if centered else None

    def launches(plan):
        return (norm_by_plan(x, None, weight, bias, 1e-5, centered, plan)[1],)

    return _search(operation, rows, columns, dtype, True, device, launches)


def search_backward(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    has_weight: bool = True,
    operation: Operation = BACKWARD,
) -> Search:
    """The search for the fastest plan of the backward of ``rms_norm`` or ``layer_norm``, on random inputs."""
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    dy, x, weight = draw(rows, columns), draw(rows, columns), draw(columns) if has_weight else None
    rstd = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).div(columns**0.5).reciprocal()
    mean = x.mean(1, dtype=torch.float32) if operation is LAYER_BACKWARD else None
    wanted = Wanted(dtype if has_weight else None, dtype if has_weight and mean is not None else None)

    def launches(plan):
        return norm_backward_by_plan(dy, x, mean, rstd, weight, None, wanted, plan)[1]

    return _search(operation, rows, columns, dtype, has_weight, device, launches)


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
    if is_forward(operation):
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
