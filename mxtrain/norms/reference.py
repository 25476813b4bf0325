"""RMSNorm and LayerNorm with an optional residual add, and their backward, in plain PyTorch: the oracle of the kernels.

Sources of the formulas: Zhang, Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467; Ba, Kiros, Hinton,
"Layer Normalization", arXiv 1607.06450. RMSNorm is LayerNorm without the mean. Easy to simplify wrongly:

* x + residual is rounded to the dtype of x first: the norm reads the same sum that the residual stream carries on.
* y is rounded once, after the weight and the bias.
* The variance is the mean of squared distances from the mean. The mean of squares less the square of the mean loses
  all digits in rows whose mean is large.
* The mean is corrected by the mean of the distances from it: in a row of equal numbers, its rounding error would be
  multiplied by 1 / sqrt(eps).
* Both means in the backward are of h, which already contains the weight.
"""

import math

import torch

from mxtrain.reference.casts import at_least_fp32, converted


def row_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    centered: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return (y, mean, rstd, total), y = (total - mean) * rstd * weight + bias, in fp32 (fp64 for fp64 input).

    Args:
        x: [..., D].
        weight: [D], or None for ones.
        bias: [D], or None for zeros.
        eps: added to the mean square, or to the variance.
        residual: [..., D], added to x first, or None.
        centered: subtract the mean of every row: LayerNorm. False: RMSNorm.

    Returns:
        y: [..., D] in the dtype of ``x``.
        mean: [...], of the rows of total, fp32 (fp64 for fp64 input); None unless ``centered``.
        rstd: [...], 1 / sqrt(mean_D((total - mean)^2) + eps), fp32 (fp64 for fp64 input).
        total: x + residual [..., D] in the dtype of ``x``; ``x`` itself without a residual.
    """
    total = x if residual is None else converted(at_least_fp32(x) + at_least_fp32(residual), x.dtype)
    distance, mean = at_least_fp32(total), None
    if centered:
        mean = distance.mean(-1, keepdim=True)
        mean = mean + (distance - mean).mean(-1, keepdim=True)
        distance = distance - mean
        mean = mean.squeeze(-1)
    rstd = 1.0 / torch.sqrt(distance.square().mean(-1) + eps)
    y = distance * rstd.unsqueeze(-1)
    if weight is not None:
        y = y * at_least_fp32(weight)
    if bias is not None:
        y = y + at_least_fp32(bias)
    return converted(y, x.dtype), mean, rstd, total


def row_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor | None = None,
    dtotal: torch.Tensor | None = None,
    dweight: torch.dtype | None = None,
    dbias: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of ``row_norm``, computed in fp32 (fp64 for fp64 input).

    With xhat = (x - mean) * rstd and h = dy * weight:  dx = rstd * (h - mean_D(h) - xhat * mean_D(h * xhat)) + dtotal,
    in RMSNorm without mean_D(h); dweight and dbias are the sums of dy * xhat and of dy over rows. The residual's
    gradient is dx.

    Args:
        dy: dL/dy [..., D].
        x: ``total`` of the forward [..., D].
        mean, rstd: of the forward [...]; a mean of None for RMSNorm.
        weight: [D], or None for ones.
        dtotal: [..., D], the gradient of ``total`` from its other uses, or None.
        dweight, dbias: dtypes of these gradients; None for a gradient that is not needed.

    Returns:
        dx [..., D] in the dtype of ``x``, dweight and dbias [D] in their dtypes, or None.
    """
    rstd = rstd.unsqueeze(-1)
    xhat = (at_least_fp32(x) if mean is None else at_least_fp32(x) - mean.unsqueeze(-1)) * rstd
    dy = at_least_fp32(dy)
    h = dy if weight is None else dy * at_least_fp32(weight)
    dxhat = h if mean is None else h - h.mean(-1, keepdim=True)
    dx = (dxhat - xhat * (h * xhat).mean(-1, keepdim=True)) * rstd
    if dtotal is not None:
        dx = dx + at_least_fp32(dtotal)
    rows = (math.prod(x.shape[:-1]), x.shape[-1])
    return (
        dx.to(x.dtype),
        None if dweight is None else (dy * xhat).reshape(rows).sum(0).to(dweight),
        None if dbias is None else dy.reshape(rows).sum(0).to(dbias),
    )
