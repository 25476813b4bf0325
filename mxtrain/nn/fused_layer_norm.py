"""LayerNorm (arXiv 1607.06450) with gradients: fused kernels on a GPU, plain PyTorch elsewhere."""

import torch
import torch.nn as nn

from mxtrain.custom_op import untraced
from mxtrain.nn.once_differentiable import once_differentiable
from mxtrain.nn.row_norms import FusedNorm, apply_to_rows, casts_under_autocast, check_settings, checked_eps
from mxtrain.ops import layer_norm as ops

_AUTOCASTS = casts_under_autocast("layer_norm")


@untraced
class _LayerNormFunction(torch.autograd.Function):
    """x [..., D], weight and bias [D] or None, residual [..., D] or None -> y; with a residual, (y, x + residual)."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, eps: float):
        ctx.set_materialize_grads(False)
        y, mean, rstd, total = ops.layer_norm(x, weight, bias, eps, residual)
        ctx.save_for_backward(total, mean, rstd, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dy: torch.Tensor | None, dtotal: torch.Tensor | None = None):
        total, mean, rstd, weight = saved
        needs_x, needs_weight, needs_bias, needs_residual, _ = ctx.needs_input_grad
        if dy is None:
            dx, dweight, dbias = dtotal, None, None
        else:
            dtypes = weight.dtype if needs_weight else None, ctx.bias_dtype if needs_bias else None
            dx, dweight, dbias = ops.layer_norm_backward(dy, total, mean, rstd, weight, dtotal, *dtypes)
        return dx if needs_x else None, dweight, dbias, dx if needs_residual else None, None


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Bring every row to mean 0 and variance 1, multiply by the weight and add the bias, as ``F.layer_norm``.

    A residual is added to x first. The arithmetic is fp32 and y is rounded once. The variance is the mean of squared
    distances from the mean, so a large mean costs no digits. The backward computes dx, dweight and dbias in one pass
    over dy and x, sums the last two in fp32 and is deterministic; second derivatives are not supported. Autocast on a
    GPU casts x to fp32, as before ``F.layer_norm``. DTensors may be sharded along any dimension but the last.

    In fp32, a row with a standard deviation above 1.8e19 / sqrt(D) gives the bias, and no gradients of x and weight. It
    gives NaN if its sum overflows, too. (``F.layer_norm`` gives the bias or NaN.)

    Args:
        x: bf16, fp16, fp32 or fp64, [..., D] with D at most 65536 on a GPU. fp64 runs in plain PyTorch.
        weight: [D], any of these dtypes, or None for ones. fp64 only with x of fp64.
        bias: [D], as the weight, or None for zeros.
        eps: added to the variance.
        residual: [..., D], as the weight; the sum x + residual is rounded to the dtype of x.

    Returns:
        y [..., D] in the dtype of ``x``; with a residual, the pair (y, x + residual).

    Raises:
        ValueError: for mismatched shapes or devices, a negative eps, or an unsupported dtype or width.
        TypeError: for what is no tensor, and for a mix of DTensors and plain tensors.
    """
    vectors = {"weight": weight, "bias": bias}
    return apply_to_rows(_LayerNormFunction, "layer_norm", _AUTOCASTS, x, vectors, residual, eps)


class FusedLayerNorm(FusedNorm, nn.LayerNorm):
    """``nn.LayerNorm`` over one dimension, computed by ``layer_norm``. Same parameters, so checkpoints load either way.

    Args:
        dim: row length D.
        eps: added to the variance.
        elementwise_affine: whether there is a weight.
        bias: whether there is a bias beside the weight.
        when_compiled: what runs under ``torch.compile``, as in ``FusedRMSNorm``; the formula is ``F.layer_norm``.

    Raises:
        ConfigError: for another ``when_compiled``, a length that is no positive integer, or more than one dimension.
        ValueError: for an eps that is no number, or negative.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        when_compiled: str = "auto",
        **factory_kwargs,
    ):
        check_settings(dim, when_compiled)
        eps = checked_eps(eps)
        super().__init__(dim, eps, elementwise_affine, bias, **factory_kwargs)
        self.when_compiled = when_compiled

    @classmethod
    def from_layer_norm(cls, norm: nn.LayerNorm, *, when_compiled: str = "auto") -> "FusedLayerNorm":
        """Return the FusedLayerNorm that replaces ``norm`` and shares its weight and bias."""
        shape, affine, has_bias = norm.normalized_shape, norm.elementwise_affine, norm.bias is not None
        new = cls(shape, norm.eps, affine, has_bias, when_compiled=when_compiled, device="meta")
        new.weight, new.bias = norm.weight, norm.bias
        return new.train(norm.training)

    def _fused(self, x, residual):
        return layer_norm(x, self.weight, self.bias, self.eps, residual)

    def _formula_takes(self, x):
        if x.device.type != "cpu":
            return True
        weight = x.dtype if self.weight is None else self.weight.dtype
        bias = weight if self.bias is None else self.bias.dtype
        # There F.layer_norm mixes dtypes only where fp32 parameters meet bf16 or fp16.
        return weight == bias and (weight == x.dtype or weight.itemsize == 4 > x.dtype.itemsize)
