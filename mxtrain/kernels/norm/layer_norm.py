"""LayerNorm of every row, with an optional residual add: one read of x, one write of y.

The kernel is RMSNorm's, with CENTERED. A large mean costs no digits: the kernel sums distances from an origin near the
mean, and their squares. In a row that registers hold, the origin is the mean as first summed; in a longer row, which is
read twice, the mean of its first chunk. The sums then give the mean and the variance.
"""

import torch

from mxtrain.kernels.launch import Launch, register_op
from mxtrain.kernels.norm.operands import check_operands, contiguous
from mxtrain.kernels.norm.rms_norm import norm_by_plan
from mxtrain.kernels.norm.rms_norm_plan import Plan


def layer_norm_by_plan(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    plan: Plan | None = None,
) -> tuple[list[torch.Tensor], Launch | None]:
    """The op's results (y, rstd, mean and, with a residual, total) and the launch; see ``norm_by_plan``."""
    return norm_by_plan(x, residual, weight, bias, eps, True, plan)


_layer_norm = register_op(
    "layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps) -> Tensor[]", layer_norm_by_plan
)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute (y, mean, rstd, total) of every row; the arithmetic is fp32, and y is rounded once.

    Args:
        x, weight, residual: as for ``rms_norm``.
        bias: bf16, fp16 or fp32 [D], or None for zeros.
        eps: added to the variance.

    Returns:
        mean: fp32 [T], of the rows of total.
        rstd: fp32 [T], 1 / sqrt(variance + eps); the variance is mean_D((total - mean)^2).
        y, total: as ``rms_norm`` returns them.

    Raises:
        ValueError: as ``rms_norm`` does.
    """
    check_operands(x, residual=residual, weight=weight, bias=bias)
    y, rstd, mean, *total = _layer_norm(*map(contiguous, (x, residual, weight, bias)), eps)
    return y, mean, rstd, total[0] if total else x
