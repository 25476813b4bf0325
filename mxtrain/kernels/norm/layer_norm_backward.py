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
        dy: dL/dy, bf16, fp16 or fp32 [T, D], D at most 65536.
        x: the forward's ``total``, which was normalized, bf16, fp16 or fp32 [T, D].
        mean: fp32 [T], from the forward.
        rstd: fp32 [T], from the forward.
        weight: bf16, fp16 or fp32 [D], or None for ones.
        dtotal: bf16, fp16 or fp32 [T, D], another gradient of ``total``, added to dx.
        dweight: dtype of the weight's gradient; None if it is not needed. Either costs a second, small launch.
        dbias: dtype of the bias's gradient; None if it is not needed.

    Returns:
        dx [T, D] in the dtype of ``x``, which is also the residual's gradient; dweight and dbias [D], or None.

    Raises:
        ValueError: for unsupported shapes, dtypes or devices.
    """
    check_operands(x, dy=dy, dtotal=dtotal, mean=mean, rstd=rstd, weight=weight)
    dx, *vectors = _layer_norm_backward(*map(contiguous, (dy, x, mean, rstd, weight, dtotal)), dweight, dbias)
    results = iter(vectors)
    return dx, *(None if dtype is None else next(results) for dtype in (dweight, dbias))
