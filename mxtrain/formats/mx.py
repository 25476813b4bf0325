"""Formats with one power-of-two scale (E8M0) per block of 8-bit elements, in plain PyTorch through torchao.

This is the only file that imports torchao's prototype names, which move between releases; tests run it with every
release in the package's range. All scale arithmetic is torchao's own.
"""

import logging
from unittest.mock import patch

import torch
from torch.nn.functional import ScalingType

from mxtrain.formats.gemm import product_of_codes
from mxtrain.formats.matrices import Codes, Operand, image_dtype, split_blocks
from mxtrain.formats.ops import FormatOps
from mxtrain.formats.recipe import Format, Recipe

# On import, torchao warns of compiled extensions that do not fit this machine (we use none), and torch warns of how
# torchao registers its enums. Users can do nothing about either.
with (
    patch.object(logging.getLogger("torchao"), "disabled", True),
    patch.object(logging.getLogger("torch.utils._pytree"), "disabled", True),
):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import get_fp_scale, to_mx
    from torchao.prototype.mx_formats.utils import from_blocked as from_blocked
    from torchao.prototype.mx_formats.utils import to_blocked as to_blocked

_TORCHAO_MODE = {"rceil": ScaleCalculationMode.RCEIL, "floor": ScaleCalculationMode.FLOOR}


def cast(
    x: torch.Tensor, fmt: Format, scale_rounding: str, block_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast ``x`` in blocks along its last dimension.

    A block with a NaN gets a NaN scale. A block with an infinity decodes to infinity or NaN. (Both are torchao's
    rules.) So a non-finite input never turns into a finite number.

    Args:
        x: bf16 or fp32, [..., D] with D a multiple of the block size.
        block_size: None for that of the format.

    Returns:
        codes: the format's dtype, shape of ``x``.
        scales: float8_e8m0fnu, [..., D / block_size].
    """
    element, block_size = getattr(torch, fmt.element), block_size or fmt.block_size
    if x.numel() == 0:
        codes = torch.empty_like(x, dtype=element)
        scales = torch.empty(*x.shape[:-1], x.shape[-1] // block_size, device=x.device, dtype=torch.float8_e8m0fnu)
        return codes, scales
    scales, codes = to_mx(x.contiguous(), element, block_size, scaling_mode=_TORCHAO_MODE[scale_rounding])
    return codes, scales


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, fmt: Format, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the values of ``codes`` [..., D] with ``scales`` [..., D / block_size], shape of ``codes``.

    An 8-bit code times a power of two is exact in bf16 and fp32, except below their smallest normal numbers.
    """
    blocks = split_blocks(_values(codes), fmt.block_size)
    return (blocks * get_fp_scale(scales).unsqueeze(-1)).flatten(-2).to(dtype)


def _values(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of 8-bit codes without their scales, fp32."""
    if codes.device.type != "cpu":
        return codes.to(torch.float32)
    # On a CPU a table takes 0.5 ms for 1024 x 768 codes, PyTorch's conversion 2.4, half of the whole cast.
    table = torch.arange(256, dtype=torch.uint8, device="cpu").view(codes.dtype).to(torch.float32)
    return table.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


def image(x: torch.Tensor, fmt: Format, scale_rounding: str, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Round ``x`` [R, C] to the format: cast in blocks along ``dim`` (0 or 1), then dequantize to ``dtype``.

    Along dimension 0 the last block may be incomplete. Zeros pad it, which changes neither its scale nor its codes.
    """
    if dim == 1:
        return dequantize(*cast(x, fmt, scale_rounding), fmt, dtype)
    rows, columns = x.shape
    padding = -rows % fmt.block_size
    if padding:
        x = torch.nn.functional.pad(x, (0, 0, 0, padding))
    # [R / B, B, C] -> [R / B, C, B]: moves blocks to the last dimension without transposing the whole matrix.
    blocks = x.reshape(-1, fmt.block_size, columns).transpose(1, 2)
    values = dequantize(*cast(blocks, fmt, scale_rounding), fmt, dtype)
    return values.transpose(1, 2).reshape(rows + padding, columns)[:rows]


def rounded_amax(amax: torch.Tensor, fmt: Format, scale_rounding: str) -> torch.Tensor:
    """Return the block maximum that the rounded scale of ``amax`` stands for, fp32, shape of ``amax``.

    For ``"rceil"`` this is scale * element_max (amax or more, up to rounding), for ``"floor"`` scale *
    2^element_max_exponent (amax rounded down to a power of two). torchao computes the scale: each amax is cast as a
    block of one element.
    """
    _, scales = cast(amax.unsqueeze(-1), fmt, scale_rounding, 1)
    top = fmt.element_max if scale_rounding == "rceil" else 2.0**fmt.element_max_exponent
    values = get_fp_scale(scales.squeeze(-1)) * top
    # Zero blocks and tiny blocks share the smallest scale, but a zero block must not look like a nonzero one.
    return torch.where(amax == 0, torch.zeros_like(values), values)


class MXOps(FormatOps):
    """What computes with a format of 8-bit elements and power-of-two scales, in plain PyTorch."""

    def encode(self, x: torch.Tensor, recipe: Recipe, mode: str = "reference") -> Codes:
        return Codes(*cast(x, self.format, recipe.scale_rounding))

    def operand(self, x: torch.Tensor, recipe: Recipe, mode: str, dim: int) -> Operand:
        if mode == "native" and self.format.is_native:
            if dim == 0:
                # The tensor cores take both operands with the reduction axis contiguous, in whole blocks.
                x = torch.nn.functional.pad(x.t(), (0, -x.shape[0] % self.format.block_size))
            return self.from_codes(self.encode(x, recipe), mode, 1)
        data = image(x, self.format, recipe.scale_rounding, dim, image_dtype(x, mode))
        return Operand(data if dim == 1 else data.t())

    def dequantize(self, codes: Codes, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(codes.data, codes.scales, self.format, dtype)

    def from_codes(self, codes: Codes, mode: str, dim: int, recipe: Recipe | None = None) -> Operand:
        if mode == "native" and self.format.is_native:
            return Operand(codes.data, to_blocked(codes.scales))
        return super().from_codes(codes, mode, dim)

    def codes_of(self, operand: Operand) -> Codes:
        rows, columns = operand.data.shape
        return Codes(operand.data, from_blocked(operand.scales, rows, columns // self.format.block_size))

    def product_of_codes(self, a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
        return product_of_codes(a.data, [a.scales], b.data, [b.scales], [ScalingType.BlockWise1x32], out_dtype)

    def trial(self, x: torch.Tensor) -> Codes:
        return Codes(*cast(x, self.format, "rceil"))

    def rounded_amax(self, amax: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        return rounded_amax(amax, self.format, recipe.scale_rounding)

    def block_scales(self, amax, recipe, tensor_scale=None):
        # Each maximum is cast as a block of one element.
        scales = cast(amax.unsqueeze(-1), self.format, recipe.scale_rounding, 1)[1].squeeze(-1).float()
        return scales, scales * self.format.element_max

    def stored(self, linear: str, codes: Codes) -> dict[str, torch.Tensor]:
        # E8M0 in the bytes of uint8: safetensors of older releases have no such dtype, and vLLM expects uint8.
        return {f"{linear}.weight": codes.data, f"{linear}.weight_scale": codes.scales.view(torch.uint8)}
