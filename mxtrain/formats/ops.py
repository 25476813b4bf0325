"""What computes with a format, in plain PyTorch: casts of operands and their products.

The base class is that of recipes without a format, whose operands keep their values. A format's subclass says what its
codes are; one with kernels runs them where it can.

Linears with the same X can be one GEMM: ``parts`` are then several matrices, W or dY of one GEMM. Every part has the
bits that it has alone.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from mxtrain.errors import ConfigError
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.gemm import matmul
from mxtrain.formats.hadamard import along_tokens
from mxtrain.formats.matrices import PLAIN, CastSpec, Codes, Operand, scale_of_product, values_dtype
from mxtrain.formats.mxnorm import inverse_rms
from mxtrain.formats.recipe import Format, Recipe


class Fusions(NamedTuple):
    """Operations of a format that ``mxtrain.compile`` puts in the place of a cast and of what comes before it.

    Attributes:
        cast: casts matrices: "cast(Tensor[] parts, int axis, Tensor? row_factor, Tensor? column_factor, Tensor? source,
            bool to_bf16, int experts, bool hadamard, bool along_rows, bool along_columns, str element,
            str scale_rounding, str form) -> Tensor[]".
        swiglu: casts silu(gate) * up: "(Tensor gate, Tensor up, bool along_rows, ...)", on like ``cast``.
        swiglu_backward: casts its gradients: "(Tensor dh, Tensor gate, Tensor up, bool along_rows, bool along_columns,
            bool h_columns, bool joined, str h_element, str element, str scale_rounding, str form) -> Tensor[]".
        is_fused: (along_columns, form) -> whether the two before make such casts.
    """

    cast: Callable
    swiglu: Callable
    swiglu_backward: Callable
    is_fused: Callable[[bool, str], bool]


class FormatOps:
    """What computes with a format; of ``HIGH_PRECISION`` for recipes without one.

    ``mode`` is one of ``mxtrain.formats.hardware.MODES``. X [R, C] is quantized along dimension 1, for an operand
    [R, C] that is reduced over C, or along dimension 0, for an operand [C, R] that is reduced over R; the last block
    may then be incomplete.

    Attributes:
        casts: operations that cast matrices, which a compiled backward makes anew.
        norms: operations f(x, residual, *settings) -> [..., total] that normalize and cast x, or total = x + residual.
        weight_casts: the same for operations "(Tensor[] weights, ...)" that cast or join weights in tiles. A graph
            keeps the tensor scales, the second argument of formats that have them.
        kept: operations that read whole matrices for a few bytes, which activation checkpointing keeps.
        fusions: None for a format without fused kernels.
    """

    casts: tuple[Callable, ...] = ()
    norms: tuple[Callable, ...] = ()
    weight_casts: tuple[Callable, ...] = ()
    kept: tuple[Callable, ...] = ()
    fusions: Fusions | None = None

    def __init__(self, format: Format):
        self.format = format

    def cast(
        self, parts: Sequence[torch.Tensor], recipe: Recipe, mode: str, dims: tuple[int, ...], spec: CastSpec = PLAIN
    ) -> dict[int, Operand | Codes]:
        """Quantize X [R, C] along each dimension in ``dims``, from one read of X; return the operands by dimension.

        Args:
            parts: X, bf16, fp32, or (without a format in mode "reference" only) fp64. Or several matrices of whole
                blocks, which joined along ``spec.axis`` are X.
        """
        # Every block lies in one part, so its scale does not depend on other parts.
        x = spec.scaled(spec.joined(parts))
        along = {dim: along_tokens(x, None) if dim == 0 and spec.is_transformed(recipe) else x for dim in dims}
        if spec.as_codes:
            return {dim: self.encode(x if dim == 1 else x.t(), recipe, mode, spec.role) for dim, x in along.items()}
        return {dim: self.operand(x, recipe, mode, dim, spec.role) for dim, x in along.items()}

    def normalize(
        self,
        x: torch.Tensor,
        estimate: RMSEstimate,
        recipe: Recipe,
        mode: str,
        group: str | None = None,
        as_codes=False,
    ) -> tuple[Operand | Codes, torch.Tensor]:
        """x [T, D] -> xhat = x * rho as fprop's operand [T, D], and rho, fp32 [T]. By one kernel if the format has one.

        With ``as_codes`` codes and scales in every mode; ``group`` holds other rows of the same matrix.
        """
        rho = inverse_rms(x, estimate, recipe)
        return self.cast([x], recipe, mode, (1,), CastSpec(row_factor=rho, group=group, as_codes=as_codes))[1], rho

    def encode(self, x: torch.Tensor, recipe: Recipe, mode: str = "reference", role: str = "weight") -> Codes:
        """Return the codes of x [R, C], rounded to nearest, in blocks along C: the weight of fprop in every mode.

        ``role`` is that of ``CastSpec``.
        """
        return Codes(x.to(values_dtype(mode, x.dtype)))

    def operand(self, x: torch.Tensor, recipe: Recipe, mode: str, dim: int, role: str) -> Operand:
        """Return the operand of X [R, C] along ``dim``."""
        data = x if recipe.dequantizes and mode != "reference" else x.to(values_dtype(mode, x.dtype))
        return Operand(data if dim == 1 else data.t())

    def decoded(self, parts: Sequence[torch.Tensor], recipe: Recipe, mode: str, spec: CastSpec = PLAIN) -> torch.Tensor:
        """Return the values [R, C] of the codes that ``cast`` along the rows gives: bf16, in mode "reference" fp32."""
        mode = "reference" if mode == "reference" else "emulated"
        if recipe.error_for(spec.role):  # exact tensor scales, which images do not contain
            codes = self.cast(parts, recipe, mode, (1,), spec._replace(as_codes=True))[1]
            return self.dequantize(codes, values_dtype(mode))
        return self.cast(parts, recipe, mode, (1,), spec)[1].data

    def dequantize(self, codes: Codes, dtype: torch.dtype) -> torch.Tensor:
        """Return the values [R, K] of codes, which bf16 holds exactly unless tensor scales are exact quotients."""
        return codes.data.to(dtype)

    def decode_tiles(self, data: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, mode: str) -> None:
        """Write what the codes of a weight in tiles stand for to ``values``, bf16 or fp32 [R, C].

        ``data`` and ``scales`` are uint8: the codes, and [R / block size, C / block size], a scale for each tile.
        """
        rows = scales.repeat_interleave(self.format.block_size, 0)
        codes = Codes(data.view(getattr(torch, self.format.element)), rows)
        values.copy_(self.dequantize(codes, values.dtype))

    def from_codes(self, codes: Codes, mode: str, dim: int) -> Operand:
        """The operand of an "input" with these codes, with the bits and the memory layout of ``cast`` along ``dim``."""
        data = codes.data if codes.scales is None else self.dequantize(codes, values_dtype(mode))
        # Products in another memory layout may add up in another order.
        return Operand(data if dim == 1 else data.t().contiguous().t())

    def codes_of(self, operand: Operand) -> Codes:
        """Return the codes of a native operand, with row-major scales."""
        raise NotImplementedError

    def matmul(self, a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
        """Multiply a [M, K] by the transpose of b [N, K] -> [M, N], summed in fp32 and rounded once, to ``out_dtype``.

        Operands with scales run on the MX tensor cores. Operands without scales hold their values: an ordinary product
        sums the same exact products in another order.
        """
        if a.scales is not None:
            return self.product_of_codes(a, b, out_dtype)
        return matmul(a.data, b.data, out_dtype, scale_of_product(a.tensor_scale, b.tensor_scale))

    def product_of_codes(self, a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
        """``matmul`` of native operands."""
        raise NotImplementedError

    def trial(self, x: torch.Tensor) -> Codes:
        """The codes of x [R, C] for a trial of the tensor cores."""
        raise NotImplementedError

    # What diagnostics and MXNorm's estimate ask.

    def rounded_amax(self, amax: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        """Return the block maximum that the rounded scale of ``amax`` stands for, fp32, shape of ``amax``."""
        raise NotImplementedError

    def static_scale(self, columns: int, estimate: RMSEstimate, recipe: Recipe) -> float | None:
        """Return ``CastSpec.tensor_scale`` for a norm's output with rows of ``columns``, if the norm bounds it."""
        return None

    def tensor_scales(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the tensor scales of matrices with these largest magnitudes, fp32, same shape."""
        raise NotImplementedError

    def block_scales(
        self, amax: torch.Tensor, recipe: Recipe, tensor_scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block scales that the cast gives blocks, and the largest magnitude below each.

        Args:
            amax: the maxima of the blocks, fp32, any shape.
            tensor_scale: of the matrix of each block, fp32, in a shape that broadcasts to that of ``amax``.

        Returns:
            scales: fp32, shape of ``amax``, as stored: without the tensor scale.
            tops: fp32, shape of ``amax``, what elements above saturate to.
        """
        raise NotImplementedError

    # What an export asks.

    def stored(self, linear: str, codes: Codes) -> dict[str, torch.Tensor]:
        """Return the tensors that the format's layout stores for a linear of this name."""
        raise ConfigError(f"format {self.format.name!r} has no layout to be exported in")

    def with_one_tensor_scale(self, weights: Sequence[Codes]) -> list[Codes] | None:
        """Give weights one tensor scale and leave their values unchanged; None if that is impossible."""
        return list(weights)
