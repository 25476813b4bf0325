"""What the norms of a row share: fused kernels on a GPU, plain PyTorch elsewhere, DTensors, and the module's forward.

LayerNorm is RMSNorm that subtracts the mean of the row (``centered``) and may have a bias.
"""

import math
from collections.abc import Callable
from numbers import Real
from typing import ClassVar, Literal, get_args

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from mxtrain.errors import ConfigError, require_one_of, require_positive_integer
from mxtrain.formats.hardware import HAS_TRITON, runs_kernels
from mxtrain.formats.matrices import at_least_fp32
from mxtrain.launch.functions import once_differentiable, untraced
from mxtrain.launch.pytorch import autocasts_on_cuda
from mxtrain.norms import reference

if HAS_TRITON:
    from mxtrain.norms import kernels

# The kernels take all but float64, which is for gradcheck and oracles.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

WhenCompiled = Literal["auto", "kernel", "formula"]
WHEN_COMPILED = get_args(WhenCompiled)

# Measured to be faster: Inductor fuses the residual add and the casts around the norm with the formula only.
AUTO_WHEN_COMPILED = "formula"

# Whether autocast on a GPU casts to fp32 before these functions of PyTorch. Before F.rms_norm PyTorch 2.11 does not.
_AUTOCASTS = {name: autocasts_on_cuda(name) for name in ("rms_norm", "layer_norm")}


def _has_kernels(x: torch.Tensor) -> bool:
    # The modes native and emulated share these kernels.
    return runs_kernels("emulated", x.device.type) and x.dtype != torch.float64


def _rows(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.reshape(-1, x.shape[-1])


@untraced
class _RowNormFunction(torch.autograd.Function):
    """x [..., D], weight and bias [D] or None, residual [..., D] or None -> y; with a residual, (y, x + residual)."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, eps: float, centered: bool):
        ctx.set_materialize_grads(False)
        if _has_kernels(x):
            y, mean, rstd, total = kernels.row_norm(_rows(x), weight, bias, eps, _rows(residual), centered)
            y, total = y.view(x.shape), total.view(x.shape)
        else:
            y, mean, rstd, total = reference.row_norm(x, weight, bias, eps, residual, centered)
            # As the kernel and PyTorch's norms return them, whatever the strides of x: models view them.
            y, total = y.contiguous(), total.contiguous()
        if residual is None:
            total = x
        ctx.save_for_backward(total, mean, rstd, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dy: torch.Tensor | None, dtotal: torch.Tensor | None = None):
        total, mean, rstd, weight = saved
        needs_x, needs_weight, needs_bias, needs_residual, *_ = ctx.needs_input_grad
        dtypes = weight.dtype if needs_weight else None, ctx.bias_dtype if needs_bias else None
        if dy is None:
            dx, dweight, dbias = dtotal, None, None
        elif _has_kernels(total):
            rows = (_rows(dy), _rows(total), mean, rstd, weight, _rows(dtotal))
            dx, dweight, dbias = kernels.row_norm_backward(*rows, *dtypes)
            dx = dx.view(total.shape)
        else:
            dx, dweight, dbias = reference.row_norm_backward(dy, total, mean, rstd, weight, dtotal, *dtypes)
        return dx if needs_x else None, dweight, dbias, dx if needs_residual else None, None, None


def row_norm(name: str, x, weight, bias, residual, eps):
    """Check the operands, and apply the norm ``name`` to them, or to the shards of DTensors."""
    _check(x, weight=weight, bias=bias, residual=residual)
    eps = checked_eps(eps)
    if _AUTOCASTS[name] and x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        if residual is not None:
            total = (x + residual).to(x.dtype)  # not the sum of what autocast makes of them
            return row_norm(name, total, weight, bias, None, eps), total
        x = at_least_fp32(x)
    centered = name == "layer_norm"
    given = [tensor for tensor in (x, weight, bias, residual) if tensor is not None]
    if not any(isinstance(tensor, DTensor) for tensor in given):
        return _RowNormFunction.apply(x, weight, bias, residual, eps, centered)
    if not all(isinstance(tensor, DTensor) for tensor in given):
        raise TypeError(
            f"{name} are {', '.join(type(tensor).__name__ for tensor in given)}; make all or none a DTensor"
        )
    return _norm_of_shards(x, weight, bias, residual, eps, centered)


def _check(x: torch.Tensor, **others: torch.Tensor | None) -> None:
    shape, dtype, device = x.shape, x.dtype, x.device
    if len(shape) == 0 or shape[-1] == 0:
        raise ValueError(f"x has shape {tuple(shape)}; its last dimension must be at least 1")
    for name, tensor in {"x": x, **others}.items():
        if tensor is None:
            continue
        if tensor.shape != (shape if name in ("x", "residual") else shape[-1:]):
            part = "the shape" if name == "residual" else "the last dimension"
            raise ValueError(f"{name} {tuple(tensor.shape)} must have {part} of x {tuple(shape)}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}; it must be bfloat16, float16, float32 or float64")
        if tensor.dtype == torch.float64 != dtype:
            raise ValueError(
                f"{name} is float64 and x is {dtype}, which kernels compute in fp32; x must be float64, too"
            )
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}; move it to {device}, where x is")


def checked_eps(eps) -> float:
    """Return eps as kernels take it. Raise ValueError for an eps that is no number, negative or infinite."""
    if isinstance(eps, bool) or not isinstance(eps, (float, torch.SymFloat, Real)) or not 0 <= eps < math.inf:
        raise ValueError(f"eps = {eps!r} is not a number of at least 0")
    return eps if isinstance(eps, (float, torch.SymFloat)) else float(eps)


def _norm_of_shards(x: DTensor, weight, bias, residual, eps: float, centered: bool):
    """Every rank normalizes its rows and computes its part of the gradients of weight and bias."""
    mesh, last = x.device_mesh, x.ndim - 1
    # Normalization needs whole rows and finished sums: gather shards of the last dimension, reduce partial sums.
    rows = tuple(p if p.is_shard() and p.dim not in (-1, last) else Replicate() for p in x.placements)
    parts = tuple(Partial() if p.is_shard() else p for p in rows)
    whole = (Replicate(),) * mesh.ndim
    shape, stride = x.shape, torch.empty(x.shape, device="meta").stride()
    results = _RowNormFunction.apply(
        _placed(x, rows).to_local(),
        *(None if v is None else _placed(v, whole).to_local(grad_placements=parts) for v in (weight, bias)),
        None if residual is None else _placed(residual, rows).to_local(),
        eps,
        centered,
    )

    def joined(local):
        # Explicit shape and stride: DTensor cannot infer them from shards of different sizes.
        return DTensor.from_local(local, mesh, rows, run_check=False, shape=shape, stride=stride)

    return joined(results) if residual is None else tuple(map(joined, results))


def _placed(x: DTensor, placements: tuple) -> DTensor:
    # Redistribute only if needed: it also redistributes the gradient, and would sum the weight's parts at every norm.
    return x if x.placements == placements else x.redistribute(placements=placements)


class FusedNorm(nn.Module):
    """The forward of a fused norm. A subclass has two bases: this class, then PyTorch's norm.

    A subclass defines ``_fused(x, residual)``, which calls the public function, and ``from_norm``.

    Attributes:
        replaces: PyTorch's class.
        formula: PyTorch's function, by whose results a model's own class is recognized.
        parameters_of: the names that its parameters may have, row length D each.
    """

    replaces: ClassVar[type[nn.Module]]
    formula: ClassVar[Callable[..., torch.Tensor]]
    parameters_of: ClassVar[tuple[str, ...]] = ("weight",)
    when_compiled: WhenCompiled

    @staticmethod
    def _check_settings(dim, when_compiled: str) -> None:
        require_one_of("when_compiled", when_compiled, WHEN_COMPILED)
        lengths = dim if isinstance(dim, (tuple, list)) else (dim,)
        for length in lengths:
            require_positive_integer("dim", length)
        if len(lengths) != 1:
            raise ConfigError(f"normalized_shape = {tuple(lengths)} has more than one dimension")

    def _formula_takes(self, x: torch.Tensor) -> bool:
        """Whether PyTorch's norm computes these dtypes of x and the parameters."""
        return True

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x [..., D] -> y [..., D]; with a residual [..., D] (y, x + residual)."""
        if x.shape[-1:] != self.normalized_shape:
            raise ValueError(f"x has shape {tuple(x.shape)}; its last dimension must be {self.normalized_shape[0]}")
        choice = AUTO_WHEN_COMPILED if self.when_compiled == "auto" else self.when_compiled
        if torch.compiler.is_compiling() and choice == "formula" and self._formula_takes(x):
            total = x if residual is None else (x + residual).to(x.dtype)
            y = super().forward(total)
            return y if residual is None else (y, total)
        return self._fused(x, residual)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, when_compiled={self.when_compiled}"
