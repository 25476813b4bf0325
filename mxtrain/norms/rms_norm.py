"""RMSNorm without a cast."""

from typing import overload

import torch
import torch.nn as nn
import torch.nn.functional as F

from mxtrain.formats.matrices import at_least_fp32
from mxtrain.norms.row_norm import FusedNorm, WhenCompiled, checked_eps, row_norm


@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-5, residual: None = None
) -> torch.Tensor: ...
@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-5, residual: torch.Tensor = ...
) -> tuple[torch.Tensor, torch.Tensor]: ...
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-5, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Divide every row by its RMS and multiply by the weight, as ``F.rms_norm`` does. A residual is added to x first.

    The arithmetic is fp32 and y is rounded once. The backward computes dx and dweight in one pass over dy and x, sums
    dweight in fp32 and is deterministic. Second derivatives are not supported. Autocast on a GPU casts x to fp32 if
    the installed PyTorch does so for ``F.rms_norm``. DTensors may be sharded along any dimension but the last.

    In fp32, a row with an RMS above 1.8e19 / sqrt(D) gives 0, as ``F.rms_norm`` does, and no gradients.

    Args:
        x: bf16, fp16, fp32 or fp64, [..., D] with D at most 65536 on a GPU. fp64 runs in plain PyTorch.
        weight: [D], any of these dtypes, or None for ones. fp64 needs x in fp64.
        eps: added to the mean square.
        residual: [..., D], dtypes as for the weight. The sum x + residual is rounded to the dtype of x.

    Returns:
        y [..., D] in the dtype of ``x``; with a residual, the pair (y, x + residual).

    Raises:
        ValueError: for mismatched shapes or devices, a negative eps, or an unsupported dtype or width.
        TypeError: for a mix of DTensors and plain tensors.
    """
    return row_norm("rms_norm", x, weight, None, residual, eps)


class OffsetRMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` whose gain may be 1 + weight, as in Gemma, Qwen3-Next and TorchTitan's Qwen3.5.

    Such a weight starts at zero, and weight decay pulls the gain to 1. The sum is fp32, because bf16 would lose small
    weights, and the result is rounded once.
    """

    add_unit_offset = False
    """Whether the gain is 1 + ``weight``"""

    def gain_of(self, weight: torch.Tensor | None) -> torch.Tensor | None:
        """The gain [D] for this weight: ``weight`` itself, or 1 + ``weight`` in fp32 (fp64 for fp64)."""
        return 1.0 + at_least_fp32(weight) if self.add_unit_offset else weight

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.add_unit_offset:
            nn.init.zeros_(self.weight)

    def plain(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float | None) -> torch.Tensor:
        """``F.rms_norm`` of x [..., D] with the gain for this weight, in the dtype of ``x``."""
        if not self.add_unit_offset:
            return F.rms_norm(x, self.normalized_shape, weight, eps)
        return F.rms_norm(at_least_fp32(x), self.normalized_shape, self.gain_of(weight), eps).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, add_unit_offset=True" if self.add_unit_offset else super().extra_repr()


class FusedRMSNorm(FusedNorm, OffsetRMSNorm):
    """``nn.RMSNorm`` over one dimension, computed by ``rms_norm``. The parameter is the same, so checkpoints load.

    Args:
        dim: row length D.
        eps: added to the mean square; None for the machine epsilon of the arithmetic, as in ``nn.RMSNorm``.
        elementwise_affine: whether there is a weight.
        when_compiled: what runs under ``torch.compile``: "kernel", "formula" (``F.rms_norm``, which the compiler can
            fuse with its neighbors) or "auto" (the one that was measured to be faster, AUTO_WHEN_COMPILED).

    Raises:
        ConfigError: for another ``when_compiled``, a length that is no positive integer, or more than one dimension.
        ValueError: for an eps that is negative or not a number.
    """

    replaces, formula = nn.RMSNorm, staticmethod(F.rms_norm)

    def __init__(
        self,
        dim: int,
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        *,
        when_compiled: WhenCompiled = "auto",
        **factory_kwargs,
    ):
        self._check_settings(dim, when_compiled)
        super().__init__(dim, None if eps is None else checked_eps(eps), elementwise_affine, **factory_kwargs)
        self.when_compiled = when_compiled

    @classmethod
    def from_rms_norm(cls, norm: nn.RMSNorm, *, when_compiled: WhenCompiled = "auto") -> "FusedRMSNorm":
        """Return the FusedRMSNorm that replaces ``norm`` and shares its weight."""
        shape, affine = norm.normalized_shape, norm.elementwise_affine
        new = cls(shape, norm.eps, affine, when_compiled=when_compiled, device="meta")
        new.weight, new.add_unit_offset = norm.weight, getattr(norm, "add_unit_offset", False)
        return new.train(norm.training)

    from_norm = from_rms_norm

    def _fused(self, x, residual):
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps
        return rms_norm(x, self.gain_of(self.weight), eps, residual)
