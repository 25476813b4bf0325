"""RMSNorm with an optional residual add, and its backward, in plain PyTorch: the oracle of the kernels.

Source of the formula: Zhang, Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467. Easy to simplify
wrongly:

* x + residual is rounded to the dtype of x first: the norm reads the same sum that the residual stream carries on.
* y is rounded once, after the weight; total * rstd is not rounded.
* The mean in the backward is over h * xhat, where h already contains the weight.
"""

import math

import torch

from mxtrain.reference.casts import at_least_fp32, converted


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divide every row by its RMS and multiply by the weight, in fp32 (fp64 for fp64 input).

    Args:
        x: [..., D].
        weight: [D], or None for ones.
        eps: added to the mean square.
        residual: [..., D], added to x first.

    Returns:
        y: [..., D] in the dtype of ``x``.
        rstd: [...], 1 / sqrt(mean_D(total^2) + eps), fp32 (fp64 for fp64 input).
        total: x + residual [..., D] in the dtype of ``x``; ``x`` itself without a residual.
    """
    total = x if residual is None else converted(at_least_fp32(x) + at_least_fp32(residual), x.dtype)
    wide = at_least_fp32(total)
    rstd = 1.0 / torch.sqrt(wide.square().mean(-1) + eps)
    y = wide * rstd.unsqueeze(-1)
    if weight is not None:
        y = y * at_least_fp32(weight)
    return converted(y, x.dtype), rstd, total


def rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    dtotal: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of ``rms_norm``, computed in fp32 (fp64 for fp64 input).

    With xhat = x * rstd and h = dy * weight:  dx = rstd * (h - xhat * mean_D(h * xhat)) + dtotal, and dweight is the
    sum of dy * xhat over rows. The residual's gradient is dx.

    Args:
        dy: dL/dy [..., D].
        x: ``total`` of the forward [..., D].
        rstd: ``rstd`` of the forward [...].
        weight: [D], or None for ones.
        dtotal: [..., D], the gradient of ``total`` from its other uses.

    Returns:
        dx [..., D] in the dtype of ``x``, and dweight [D] in the dtype of ``weight``, None without a weight.
    """
    rstd = rstd.unsqueeze(-1)
    xhat = at_least_fp32(x) * rstd
    dy = at_least_fp32(dy)
    h = dy if weight is None else dy * at_least_fp32(weight)
    dx = (h - xhat * (h * xhat).mean(-1, keepdim=True)) * rstd
    if dtotal is not None:
        dx = dx + at_least_fp32(dtotal)
    dweight = None
    if weight is not None:
        columns = x.shape[-1]
        dweight = (dy * xhat).reshape(math.prod(x.shape[:-1]), columns).sum(0).to(weight.dtype)
    return dx.to(x.dtype), dweight
