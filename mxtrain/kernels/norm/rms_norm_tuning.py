"""Find the fastest plans of the RMSNorm kernels for one shape on the current GPU, and keep them."""

import functools
from collections.abc import Callable

import torch

from mxtrain.kernels import tuning
from mxtrain.kernels.norm.rms_norm import rms_norm_by_plan
from mxtrain.kernels.norm.rms_norm_backward import rms_norm_backward_by_plan
from mxtrain.kernels.norm.rms_norm_plan import (
    BACKWARD_FIELDS,
    FORWARD_FIELDS,
    TUNED,
    check_shape,
    choose_backward,
    choose_forward,
    key,
    neighbour,
    starts,
)
from mxtrain.kernels.tuning import Choice


def tune_forward(rows: int, columns: int, dtype: torch.dtype) -> Choice:
    """Find and keep the fastest plan of ``rms_norm`` for a matrix [rows, columns] of ``dtype`` on the current GPU.

    Returns:
        The choice that is made from now on.

    Raises:
        RuntimeError: without a GPU.
        ValueError: for a shape that the kernel does not take.
    """
    check_shape(rows, columns)
    device = tuning.gpu()
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    x, weight = draw(rows, columns), draw(columns)

    def launches(plan):
        return (rms_norm_by_plan(x, None, weight, 1e-5, plan)[1],)

    choose = functools.partial(choose_forward, rows, columns, dtype, device)
    return _tune(key("rms_norm", rows, columns, dtype, True), FORWARD_FIELDS, choose, launches, rows, columns, device)


def tune_backward(rows: int, columns: int, dtype: torch.dtype, has_weight: bool = True) -> Choice:
    """The same for ``rms_norm_backward``, with dweight if there is a weight; see ``tune_forward``."""
    check_shape(rows, columns)
    device = tuning.gpu()
    draw = functools.partial(torch.randn, dtype=dtype, device=device)
    dy, x, weight = draw(rows, columns), draw(rows, columns), draw(columns) if has_weight else None
    rstd = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32).div(columns**0.5).reciprocal()

    def launches(plan):
        return rms_norm_backward_by_plan(dy, x, rstd, weight, None, has_weight, plan)[1]

    shape = key("rms_norm_backward", rows, columns, dtype, has_weight)
    choose = functools.partial(choose_backward, rows, columns, dtype, has_weight, device)
    return _tune(shape, BACKWARD_FIELDS, choose, launches, rows, columns, device)


def _tune(
    shape: str, fields: tuple[str, ...], choose: Callable, launches: Callable,
    rows: int, columns: int, device: torch.device,
) -> Choice:  # fmt: skip
    def prepare(plan):
        prepared = launches(plan)

        def run():
            for launch in prepared:
                launch.run(device)

        return run

    step = functools.partial(neighbour, rows=rows, columns=columns)
    tuning.tune(TUNED, shape, device, starts(choose().plan, rows, columns), fields, step, prepare)
    return choose()
