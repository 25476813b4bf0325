"""LayerNorm with an optional residual add, and its backward, in plain PyTorch: the oracle of the kernels.

Source of the formula: Ba, Kiros, Hinton, "Layer Normalization", arXiv 1607.06450. Easy to simplify wrongly:

* The variance is the mean of squared distances from the mean. The mean of squares less the square of the mean loses
  all digits in rows whose mean is large.
* The mean is corrected by the mean of the distances from it: in a row of equal numbers, its rounding error would be
  multiplied by 1 / sqrt(eps).
* x + residual is rounded to the dtype of x first: the norm reads the same sum that the residual stream carries on.
* y is rounded once, after the weight and the bias.
* Both means in the backward are of h, which already contains the weight.
"""

import math

import torch

from mxtrain.reference.casts import at_least_fp32, converted


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, mean, rstd, total), y = (total - mean) * rstd * weight + bias, in fp32 (fp64 for fp64 input).

    Args:
        x, weight, residual: as for ``mxtrain.reference.rms_norm.rms_norm``.
        bias: [D], or None for zeros.
        eps: added to the variance.

    Returns:
        mean: [...], of the rows of total, fp32 (fp64 for fp64 input).
        rstd: [...], 1 / sqrt(mean_D((total - mean)^2) + eps), in the dtype of ``mean``.
        y, total: as ``rms_norm`` returns them.
    """
    total = x if residual is None else converted(at_least_fp32(x) + at_least_fp32(residual), x.dtype)
    wide = at_least_fp32(total)
    mean = wide.mean(-1, keepdim=True)
    mean = mean + (wide - mean).mean(-1, keepdim=True)
    centered = wide - mean
    rstd = 1.0 / torch.sqrt(centered.square().mean(-1, keepdim=True) + eps)
    y = centered * rstd
    if weight is not None:
        y = y * at_least_fp32(weight)
    if bias is not None:
        y = y + at_least_fp32(bias)
    return converted(y, x.dtype), mean.squeeze(-1), rstd.squeeze(-1), total


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
    """Return the gradients of ``layer_norm``, computed in fp32 (fp64 for fp64 input).

    With xhat = (x - mean) * rstd and h = dy * weight:  dx = rstd * (h - mean_D(h) - xhat * mean_D(h * xhat)) + dtotal;
    dweight and dbias are the sums of dy * xhat and of dy over rows. The residual's gradient is dx.

    Args:
        dy, x, rstd, weight, dtotal: as for ``mxtrain.reference.rms_norm.rms_norm_backward``.
        mean: ``mean`` of the forward [...].
        dweight, dbias: dtypes of these gradients; None for one that is not needed.

    Returns:
        dx [..., D] in the dtype of ``x``, dweight and dbias [D] in their dtypes, or None.
    """
    rstd = rstd.unsqueeze(-1)
    xhat = (at_least_fp32(x) - mean.unsqueeze(-1)) * rstd
    dy = at_least_fp32(dy)
    h = dy if weight is None else dy * at_least_fp32(weight)
    dx = (h - h.mean(-1, keepdim=True) - xhat * (h * xhat).mean(-1, keepdim=True)) * rstd
    if dtotal is not None:
        dx = dx + at_least_fp32(dtotal)
    rows = (math.prod(x.shape[:-1]), x.shape[-1])
    return (
        dx.to(x.dtype),
        None if dweight is None else (dy * xhat).reshape(rows).sum(0).to(dweight),
        None if dbias is None else dy.reshape(rows).sum(0).to(dbias),
    )
