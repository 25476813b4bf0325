"""LayerNorm."""

from typing import overload

import torch
import torch.nn as nn
import torch.nn.functional as F

from mxtrain.norms.row_norm import FusedNorm, WhenCompiled, checked_eps, row_norm


@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual: None = None,
) -> torch.Tensor: ...
@overload
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual: torch.Tensor = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Bring every row to mean 0 and variance 1, multiply by the weight and add the bias, as ``F.layer_norm`` does.

    A residual is added to x first. The variance is the mean of squared distances from the mean, so a large mean costs
    no digits. Arithmetic, backward and DTensors are as for ``rms_norm``. Autocast on a GPU casts x to fp32, as it does
    for ``F.layer_norm``.

    In fp32, a row with a standard deviation above 1.8e19 / sqrt(D) gives the bias, and no gradients of x and weight. A
    row whose sum also overflows gives NaN. (``F.layer_norm`` gives the bias or NaN.)

    Args:
        x, weight, residual: as for ``rms_norm``.
        bias: [D], as the weight, or None for zeros.
        eps: added to the variance.

    Returns:
        y [..., D] in the dtype of ``x``; with a residual, the pair (y, x + residual).

    Raises:
        ValueError, TypeError: as ``rms_norm`` does.
    """
    return row_norm("layer_norm", x, weight, bias, residual, eps)


class FusedLayerNorm(FusedNorm, nn.LayerNorm):
    """``nn.LayerNorm`` over one dimension, computed by ``layer_norm``. Parameters are the same, so checkpoints load.

    Args:
        dim: row length D.
        eps: added to the variance.
        elementwise_affine: whether there is a weight.
        bias: whether there is a bias beside the weight.
        when_compiled: what runs under ``torch.compile``, as in ``FusedRMSNorm``; the formula is ``F.layer_norm``.

    Raises:
        ConfigError: for another ``when_compiled``, a length that is no positive integer, or more than one dimension.
        ValueError: for an eps that is negative or not a number.
    """

    replaces, formula, parameters_of = nn.LayerNorm, staticmethod(F.layer_norm), ("weight", "bias")

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        when_compiled: WhenCompiled = "auto",
        **factory_kwargs,
    ):
        self._check_settings(dim, when_compiled)
        super().__init__(dim, checked_eps(eps), elementwise_affine, bias, **factory_kwargs)
        self.when_compiled = when_compiled

    @classmethod
    def from_layer_norm(cls, norm: nn.LayerNorm, *, when_compiled: WhenCompiled = "auto") -> "FusedLayerNorm":
        """Return the FusedLayerNorm that replaces ``norm`` and shares its weight and bias."""
        shape, affine, has_bias = norm.normalized_shape, norm.elementwise_affine, norm.bias is not None
        new = cls(shape, norm.eps, affine, has_bias, when_compiled=when_compiled, device="meta")
        new.weight, new.bias = norm.weight, norm.bias
        return new.train(norm.training)

    from_norm = from_layer_norm

    def _fused(self, x, residual):
        return layer_norm(x, self.weight, self.bias, self.eps, residual)

    def _formula_takes(self, x):
        if x.device.type != "cpu":
            return True
        weight = x.dtype if self.weight is None else self.weight.dtype
        bias = weight if self.bias is None else self.bias.dtype
        # There F.layer_norm mixes dtypes only where fp32 parameters meet bf16 or fp16.
        return weight == bias and (weight == x.dtype or weight.itemsize == 4 > x.dtype.itemsize)
