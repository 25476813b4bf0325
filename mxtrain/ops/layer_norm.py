"""LayerNorm with an optional residual add, forward and backward, without gradients and checks."""

import torch

from mxtrain.ops.hardware import HAS_TRITON
from mxtrain.ops.rms_norm import has_kernels
from mxtrain.reference import layer_norm as reference

if HAS_TRITON:
    from mxtrain.kernels.norm import layer_norm as forward_kernel
    from mxtrain.kernels.norm import layer_norm_backward as backward_kernel


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y [..., D], mean and inverse standard deviation of every row, and the sum x + residual [..., D].

    See ``mxtrain.reference.layer_norm``; the kernel returns the numbers of rows as [T].
    """
    if not has_kernels(x):
        y, mean, rstd, total = reference.layer_norm(x, weight, bias, eps, residual)
        # As the kernel and nn.LayerNorm return it, whatever the strides of x: models view it.
        return y.contiguous(), mean, rstd, x if residual is None else total.contiguous()
    rows = (-1, x.shape[-1])
    residual = None if residual is None else residual.reshape(rows)
    y, mean, rstd, total = forward_kernel.layer_norm(x.reshape(rows), weight, bias, eps, residual)
    return y.view(x.shape), mean, rstd, x if residual is None else total.view(x.shape)


def layer_norm_backward(
    dy: torch.Tensor,
    total: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    dtotal: torch.Tensor | None,
    dweight: torch.dtype | None,
    dbias: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return dx [..., D], and dweight and dbias [D] in these dtypes; see ``mxtrain.reference.layer_norm``."""
    if not has_kernels(total):
        return reference.layer_norm_backward(dy, total, mean, rstd, weight, dtotal, dweight, dbias)
    rows = (-1, total.shape[-1])
    dtotal = None if dtotal is None else dtotal.reshape(rows)
    dx, *vectors = backward_kernel.layer_norm_backward(
        dy.reshape(rows), total.reshape(rows), mean, rstd, weight, dtotal, dweight, dbias
    )
    return dx.view(total.shape), *vectors
