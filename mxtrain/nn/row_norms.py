"""Common parts of the fused RMSNorm and LayerNorm: checks, autocast, DTensors, and the choice made when compiled."""

import math
from collections.abc import Mapping
from numbers import Real

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from mxtrain.errors import ConfigError, require_one_of, require_positive_integer
from mxtrain.nn.once_differentiable import refuse_transforms
from mxtrain.ops.arguments import check_tensor
from mxtrain.ops.rms_norm import DTYPES
from mxtrain.reference.casts import at_least_fp32

WHEN_COMPILED = ("auto", "kernel", "formula")

# Measured to be faster: Inductor fuses the residual add and the casts around the norm with the formula only.
AUTO_WHEN_COMPILED = "formula"

Vectors = Mapping[str, torch.Tensor | None]
"""Weight and bias by name, in the order in which the autograd function takes them; None for one that is absent"""


def casts_under_autocast(op: str) -> bool:
    """Whether autocast on a GPU casts to fp32 before this op of PyTorch: "rms_norm" (not in 2.11) or "layer_norm"."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "AutocastCUDA")


def runs_when_compiled(when_compiled: str) -> str:
    """Return "kernel" or "formula", whichever a fused norm with this setting runs under ``torch.compile``."""
    return AUTO_WHEN_COMPILED if when_compiled == "auto" else when_compiled


def apply_to_rows(
    function: type[torch.autograd.Function],
    name: str,
    autocasts: bool,
    x: torch.Tensor,
    vectors: Vectors,
    residual: torch.Tensor | None,
    eps: float,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Check the operands, and apply ``function`` to x, the vectors, the residual and eps, or to shards of DTensors.

    Args:
        function: takes x [..., D], the vectors [D], the residual [..., D] and eps; returns y, or (y, x + residual).
        name: of the public function, for messages.
        autocasts: whether autocast on a GPU casts x to fp32.

    Raises:
        ValueError: for mismatched shapes or devices, a negative eps, or an unsupported dtype.
        TypeError: for what is no tensor, and for a mix of DTensors and plain tensors.
        RuntimeError: in a transform of ``torch.func``.
    """
    refuse_transforms()
    _check(x, vectors, residual)
    eps = checked_eps(eps)
    if autocasts and x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        if residual is not None:
            total = (x + residual).to(x.dtype)  # not the sum of what autocast makes of them
            return apply_to_rows(function, name, autocasts, total, vectors, None, eps), total
        x = at_least_fp32(x)
    given = [tensor for tensor in (x, *vectors.values(), residual) if tensor is not None]
    if not any(isinstance(tensor, DTensor) for tensor in given):
        return function.apply(x, *vectors.values(), residual, eps)
    if not all(isinstance(tensor, DTensor) for tensor in given):
        raise TypeError(f"{name} of {', '.join(type(tensor).__name__ for tensor in given)}: all or none as DTensor")
    return _apply_to_shards(function, x, vectors, residual, eps)


def _check(x: torch.Tensor, vectors: Vectors, residual: torch.Tensor | None) -> None:
    check_tensor("x", x)
    shape, dtype, device = x.shape, x.dtype, x.device
    if len(shape) == 0 or shape[-1] == 0:
        raise ValueError(f"x {tuple(shape)}: expected a last dimension of at least 1")
    if dtype not in DTYPES:
        raise ValueError(f"x of {dtype}: expected bfloat16, float16, float32 or float64")
    for name, tensor in (*vectors.items(), ("residual", residual)):
        if tensor is None:
            continue
        check_tensor(name, tensor)
        if tensor.shape != (shape if name == "residual" else shape[-1:]):
            part = "its shape" if name == "residual" else "its last dimension"
            raise ValueError(f"{name} {tuple(tensor.shape)} does not match x {tuple(shape)}: expected {part}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} of {tensor.dtype}: expected bfloat16, float16, float32 or float64")
        if tensor.dtype == torch.float64 != dtype:
            raise ValueError(f"{name} of float64 with x of {dtype}: kernels compute x in fp32; expected x of float64")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}: expected {device}, where x is")


def checked_eps(eps) -> float:
    """Return eps as kernels take it. Raise ValueError for an eps that is no number, negative or infinite."""
    if isinstance(eps, bool) or not isinstance(eps, (float, torch.SymFloat, Real)) or not 0 <= eps < math.inf:
        raise ValueError(f"eps = {eps!r}: expected a number, not negative")
    return eps if isinstance(eps, (float, torch.SymFloat)) else float(eps)


def _apply_to_shards(function, x: DTensor, vectors: Vectors, residual: DTensor | None, eps: float):
    """Every rank normalizes its rows and computes its part of the gradients of the vectors."""
    mesh, last = x.device_mesh, x.ndim - 1
    # Normalization needs whole rows and finished sums: gather shards of the last dimension, reduce partial sums.
    rows = tuple(p if p.is_shard() and p.dim not in (-1, last) else Replicate() for p in x.placements)
    parts = tuple(Partial() if p.is_shard() else p for p in rows)
    shape, stride = x.shape, _contiguous_stride(x.shape)

    def whole_vector(vector):
        if vector is None:
            return None
        return _placed(vector, (Replicate(),) * mesh.ndim).to_local(grad_placements=parts)

    results = function.apply(
        _placed(x, rows).to_local(),
        *map(whole_vector, vectors.values()),
        None if residual is None else _placed(residual, rows).to_local(),
        eps,
    )

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


def check_settings(dim, when_compiled: str) -> None:
    """Raise ConfigError for the settings of a fused norm: a length that is no positive integer, or several of them."""
    require_one_of("when_compiled", when_compiled, WHEN_COMPILED)
    lengths = dim if isinstance(dim, (tuple, list)) else (dim,)
    for length in lengths:
        require_positive_integer("dim", length)
    if len(lengths) != 1:
        raise ConfigError(f"normalized_shape = {tuple(lengths)} has more than one dimension")


class FusedNorm(nn.Module):
    """The forward of a fused norm. A subclass has this class and then PyTorch's norm as bases.

    It defines ``_fused(x, residual)``, which calls the public function.
    """

    when_compiled: str

    def _formula_takes(self, x: torch.Tensor) -> bool:
        """Whether PyTorch's norm computes these dtypes of x and the parameters."""
        return True

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x [..., D] -> y [..., D]; with a residual [..., D] (y, x + residual)."""
        check_tensor("x", x)
        if x.shape[-1:] != self.normalized_shape:
            raise ValueError(f"x {tuple(x.shape)}: expected a last dimension of {self.normalized_shape[0]}")
        takes_formula = torch.compiler.is_compiling() and runs_when_compiled(self.when_compiled) == "formula"
        if takes_formula and self._formula_takes(x):
            total = x if residual is None else (x + residual).to(x.dtype)
            y = super().forward(total)
            return y if residual is None else (y, total)
        return self._fused(x, residual)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, when_compiled={self.when_compiled}"
