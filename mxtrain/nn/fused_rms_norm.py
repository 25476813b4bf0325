"""RMSNorm with gradients: fused kernels on a GPU, plain PyTorch elsewhere. For norms that MXNorm does not replace."""

import torch
import torch.nn as nn

from mxtrain.custom_op import untraced
from mxtrain.nn.once_differentiable import once_differentiable
from mxtrain.nn.row_norms import FusedNorm, apply_to_rows, casts_under_autocast, check_settings, checked_eps
from mxtrain.ops import rms_norm as ops

_AUTOCASTS = casts_under_autocast("rms_norm")


@untraced
class _RMSNormFunction(torch.autograd.Function):
    """x [..., D], weight [D] or None, residual [..., D] or None -> y; with a residual, (y, x + residual)."""

    @staticmethod
    def forward(ctx, x, weight, residual, eps: float):
        ctx.set_materialize_grads(False)
        y, rstd, total = ops.rms_norm(x, weight, eps, residual)
        ctx.save_for_backward(total, rstd, weight)
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dy: torch.Tensor | None, dtotal: torch.Tensor | None = None):
        total, rstd, weight = saved
        needs_x, needs_weight, needs_residual, _ = ctx.needs_input_grad
        if dy is None:
            dx, dweight = dtotal, None
        else:
            dx, dweight = ops.rms_norm_backward(dy, total, rstd, weight, dtotal, needs_weight)
        return dx if needs_x else None, dweight, dx if needs_residual else None, None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-5, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Divide every row by its RMS and multiply by the weight, as ``F.rms_norm``; a residual is added to x first.

    The arithmetic is fp32 and y is rounded once. The backward computes dx and dweight in one pass over dy and x, sums
    dweight in fp32 and is deterministic; second derivatives are not supported. Autocast on a GPU casts x to fp32 if
    the installed PyTorch does so for ``F.rms_norm``. DTensors may be sharded along any dimension but the last.

    In fp32, a row with an RMS above 1.8e19 / sqrt(D) gives 0, as from ``F.rms_norm``, and no gradients.

    Args:
        x: bf16, fp16, fp32 or fp64, [..., D] with D at most 65536 on a GPU. fp64 runs in plain PyTorch.
        weight: [D], any of these dtypes, or None for ones. fp64 only with x of fp64.
        eps: added to the mean square.
        residual: [..., D], as the weight; the sum x + residual is rounded to the dtype of x.

    Returns:
        y [..., D] in the dtype of ``x``; with a residual, the pair (y, x + residual).

    Raises:
        ValueError: for mismatched shapes or devices, a negative eps, or an unsupported dtype or width.
        TypeError: for what is no tensor, and for a mix of DTensors and plain tensors.
    """
    return apply_to_rows(_RMSNormFunction, "rms_norm", _AUTOCASTS, x, {"weight": weight}, residual, eps)


class FusedRMSNorm(FusedNorm, nn.RMSNorm):
    """``nn.RMSNorm`` over one dimension, computed by ``rms_norm``. Same parameter, so checkpoints load either way.

    Args:
        dim: row length D.
        eps: added to the mean square; None for the machine epsilon of the arithmetic, as in ``nn.RMSNorm``.
        elementwise_affine: whether there is a weight.
        when_compiled: what runs under ``torch.compile``: "kernel", "formula" (``F.rms_norm``, which the compiler can
            fuse with its neighbours) or "auto" (the faster of the two as measured, AUTO_WHEN_COMPILED).

    Raises:
        ConfigError: for another ``when_compiled``, a length that is no positive integer, or more than one dimension.
        ValueError: for an eps that is no number, or negative.
    """

    def __init__(
        self,
        dim: int,
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        *,
        when_compiled: str = "auto",
        **factory_kwargs,
    ):
        check_settings(dim, when_compiled)
        if eps is not None:
            eps = checked_eps(eps)
        super().__init__(dim, eps, elementwise_affine, **factory_kwargs)
        self.when_compiled = when_compiled

    @classmethod
    def from_rms_norm(cls, norm: nn.RMSNorm, *, when_compiled: str = "auto") -> "FusedRMSNorm":
        """Return the FusedRMSNorm that replaces ``norm`` and shares its weight."""
        shape, affine = norm.normalized_shape, norm.elementwise_affine
        new = cls(shape, norm.eps, affine, when_compiled=when_compiled, device="meta")
        new.weight = norm.weight
        return new.train(norm.training)

    def _fused(self, x, residual):
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps
        return rms_norm(x, self.weight, eps, residual)
