"""The backward of LayerNorm, dx, dweight and dbias, in one pass over dy and x, by the kernels of RMSNorm's backward.

Where registers do not hold a row beside both of its sums, the kernel of ``wide_rows_backward.py`` takes over.

With xhat = (x - mean) * rstd and h = dy * weight:

    dx = rstd * (h - mean_D(h) - xhat * mean_D(h * xhat)) + dtotal

    dweight = sum_T(dy * xhat)        dbias = sum_T(dy)

Bytes per row: D elements each of dy, x, dx and dtotal, and 8 bytes of mean and rstd.
"""

import torch

from mxtrain.kernels.launch import Launch, register_op
from mxtrain.kernels.norm.operands import check_operands, contiguous
from mxtrain.kernels.norm.rms_norm_backward import Wanted, norm_backward_by_plan
from mxtrain.kernels.norm.rms_norm_plan import Plan


def layer_norm_backward_by_plan(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    dtotal: torch.Tensor | None,
    dweight: torch.dtype | None,
    dbias: torch.dtype | None,
    plan: Plan | None = None,
) -> tuple[list[torch.Tensor], tuple[Launch, ...]]:
    """The op's results (dx, then dweight and dbias where they have a dtype) and the launches that fill them."""
    return norm_backward_by_plan(dy, x, mean, rstd, weight, dtotal, Wanted(dweight, dbias), plan)


_layer_norm_backward = register_op(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? dtotal,"
    " ScalarType? dweight, ScalarType? dbias) -> Tensor[]",
    layer_norm_backward_by_plan,
)


def layer_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None = None,
    dtotal: torch.Tensor | None = None,
    dweight: torch.dtype | None = None,
    dbias: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Compute (dx, dweight, dbias) of ``layer_norm``; the arithmetic is fp32, and each result is rounded once.

    Args:
        dy, x, rstd, weight, dtotal: as for ``rms_norm_backward``.
        mean: fp32 [T], from the forward.
        dweight, dbias: as in ``Wanted``. One or both cost a second, small launch.

    Returns:
        dx as ``rms_norm_backward`` returns it; dweight and dbias [D] in their dtypes, or None.

    Raises:
        ValueError: as ``rms_norm_backward`` does.
    """
    check_operands(x, dy=dy, dtotal=dtotal, mean=mean, rstd=rstd, weight=weight)
    dx, *vectors = _layer_norm_backward(*map(contiguous, (dy, x, mean, rstd, weight, dtotal)), dweight, dbias)
    results = iter(vectors)
    return dx, *(None if dtype is None else next(results) for dtype in (dweight, dbias))
