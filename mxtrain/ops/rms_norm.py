"""RMSNorm with an optional residual add, forward and backward, without gradients and checks."""

import torch

from mxtrain.ops.hardware import HAS_TRITON, runs_kernels
from mxtrain.reference import rms_norm as reference

if HAS_TRITON:
    from mxtrain.kernels.norm import rms_norm as forward_kernel
    from mxtrain.kernels.norm import rms_norm_backward as backward_kernel

# The kernels take all but float64, which is for gradcheck and oracles.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y [..., D], the inverse RMS of every row, and the normalized sum x + residual [..., D].

    See ``mxtrain.reference.rms_norm``; the kernel returns the inverse RMS as [T].
    """
    if not has_kernels(x):
        y, rstd, total = reference.rms_norm(x, weight, eps, residual)
        # As the kernel and nn.RMSNorm return it, whatever the strides of x: models view it.
        return y.contiguous(), rstd, x if residual is None else total.contiguous()
    rows = (-1, x.shape[-1])
    residual = None if residual is None else residual.reshape(rows)
    y, rstd, total = forward_kernel.rms_norm(x.reshape(rows), weight, eps, residual)
    return y.view(x.shape), rstd, x if residual is None else total.view(x.shape)


def rms_norm_backward(
    dy: torch.Tensor,
    total: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    dtotal: torch.Tensor | None,
    needs_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return dx [..., D] and dweight [D]; see ``mxtrain.reference.rms_norm``."""
    if not has_kernels(total):
        return reference.rms_norm_backward(dy, total, rstd, weight, dtotal)
    rows = (-1, total.shape[-1])
    dtotal = None if dtotal is None else dtotal.reshape(rows)
    dx, dweight = backward_kernel.rms_norm_backward(
        dy.reshape(rows), total.reshape(rows), rstd, weight, dtotal, needs_weight
    )
    return dx.view(total.shape), dweight


def has_kernels(x: torch.Tensor) -> bool:
    """Whether the norms' kernels take x. Plain PyTorch takes every other input."""
    # The modes native and emulated share these kernels.
    return runs_kernels("emulated", x.device.type) and x.dtype != torch.float64
