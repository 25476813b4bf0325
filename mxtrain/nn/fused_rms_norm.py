"""RMSNorm with gradients: fused kernels on a GPU, plain PyTorch elsewhere. For norms that MXNorm does not replace."""

import math

import torch
import torch.nn as nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate

from mxtrain.errors import ConfigError, require_one_of, require_positive_integer
from mxtrain.ops import rms_norm as ops
from mxtrain.reference.casts import at_least_fp32

WHEN_COMPILED = ("auto", "kernel", "formula")

# Whether autocast on a GPU casts to fp32 before F.rms_norm. PyTorch 2.11 does not; later releases do.
CASTS_UNDER_AUTOCAST = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")

# Measured faster: Inductor fuses the formula with the residual add before it and the casts after it, the kernel not.
AUTO_WHEN_COMPILED = "formula"


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
    def backward(ctx, dy: torch.Tensor | None, dtotal: torch.Tensor | None = None):
        total, rstd, weight = ctx.saved_tensors
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

    Args:
        x: bf16, fp16, fp32 or fp64, [..., D] with D at most 65536 on a GPU. fp64 runs in plain PyTorch.
        weight: [D], any of these dtypes, or None for ones.
        eps: added to the mean square.
        residual: [..., D]; the sum x + residual is rounded to the dtype of x.

    Returns:
        y [..., D] in the dtype of ``x``; with a residual, the pair (y, x + residual).

    Raises:
        ValueError: for mismatched shapes or devices, a negative eps, or an unsupported dtype or width.
        TypeError: for a mix of DTensors and plain tensors.
    """
    _check(x, weight, eps, residual)
    if CASTS_UNDER_AUTOCAST and x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        x = at_least_fp32(x)
    if any(isinstance(tensor, DTensor) for tensor in (x, weight, residual)):
        return _rms_norm_of_shards(x, weight, eps, residual)
    return _RMSNormFunction.apply(x, weight, residual, eps)


def _check(x, weight, eps, residual) -> None:
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x {_shape(x)}: expected a last dimension of at least 1")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {_shape(weight)} does not match x {_shape(x)}: expected its last dimension")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual {_shape(residual)} does not match x {_shape(x)}: expected its shape")
    for name, tensor in (("x", x), ("weight", weight), ("residual", residual)):
        if tensor is not None and tensor.dtype not in ops.DTYPES:
            raise ValueError(f"{name} of {tensor.dtype}: expected bfloat16, float16, float32 or float64")
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}: expected {x.device}, where x is")
    _check_eps(eps)


def _check_eps(eps) -> None:
    if isinstance(eps, bool) or not isinstance(eps, (int, float, torch.SymFloat)) or not 0 <= eps < math.inf:
        raise ValueError(f"eps = {eps!r}: expected a number, not negative")


def _rms_norm_of_shards(x, weight, eps, residual):
    """``rms_norm`` of DTensors: every rank normalizes its rows and gets its part of the weight's gradient."""
    given = [tensor for tensor in (x, weight, residual) if tensor is not None]
    if not all(isinstance(tensor, DTensor) for tensor in given):
        raise TypeError(f"rms_norm of {', '.join(type(tensor).__name__ for tensor in given)}: all or none as DTensor")
    mesh, last = x.device_mesh, x.ndim - 1
    # Normalization needs whole rows and finished sums: gather shards of the last dimension, reduce partial sums.
    rows = tuple(p if p.is_shard() and p.dim not in (-1, last) else Replicate() for p in x.placements)
    parts = tuple(Partial() if p.is_shard() else p for p in rows)
    shape, stride = x.shape, _contiguous_stride(x.shape)
    x = _placed(x, rows).to_local()
    if weight is not None:
        weight = _placed(weight, (Replicate(),) * mesh.ndim).to_local(grad_placements=parts)
    if residual is not None:
        residual = _placed(residual, rows).to_local()
    results = rms_norm(x, weight, eps, residual)

    def whole(local):
        # Explicit shape and stride: DTensor cannot infer them from shards of different sizes.
        return DTensor.from_local(local, mesh, rows, run_check=False, shape=shape, stride=stride)

    return whole(results) if residual is None else tuple(whole(local) for local in results)


def _placed(x: DTensor, placements: tuple) -> DTensor:
    # Redistribute only if needed: it also redistributes the gradient, and would sum the weight's parts at every norm.
    return x if x.placements == placements else x.redistribute(placements=placements)


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.append(stride[-1] * max(size, 1))
    return tuple(reversed(stride))


def _shape(x: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if x is None else tuple(x.shape)


def runs_when_compiled(when_compiled: str) -> str:
    """Return "kernel" or "formula", whichever ``FusedRMSNorm`` with this setting runs under ``torch.compile``."""
    return AUTO_WHEN_COMPILED if when_compiled == "auto" else when_compiled


class FusedRMSNorm(nn.RMSNorm):
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
        require_one_of("when_compiled", when_compiled, WHEN_COMPILED)
        if eps is not None:
            _check_eps(eps)
        for length in dim if isinstance(dim, (tuple, list)) else (dim,):
            require_positive_integer("dim", length)
        super().__init__(dim, eps, elementwise_affine, **factory_kwargs)
        self.when_compiled = when_compiled
        if len(self.normalized_shape) != 1:
            raise ConfigError(f"normalized_shape = {tuple(self.normalized_shape)} has more than one dimension")

    @classmethod
    def from_rms_norm(cls, norm: nn.RMSNorm, *, when_compiled: str = "auto") -> "FusedRMSNorm":
        """Return the FusedRMSNorm that replaces ``norm`` and shares its weight."""
        shape, affine = norm.normalized_shape, norm.elementwise_affine
        new = cls(shape, norm.eps, affine, when_compiled=when_compiled, device="meta")
        new.weight = norm.weight
        return new.train(norm.training)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x [..., D] -> y [..., D]; with a residual [..., D] (y, x + residual)."""
        if x.shape[-1:] != self.normalized_shape:
            raise ValueError(f"x {_shape(x)}: expected a last dimension of {self.normalized_shape[0]}")
        if torch.compiler.is_compiling() and runs_when_compiled(self.when_compiled) == "formula":
            total = x if residual is None else (x + residual).to(x.dtype)
            y = super().forward(total)
            return y if residual is None else (y, total)
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps
        return rms_norm(x, self.weight, eps, residual)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, when_compiled={self.when_compiled}"
