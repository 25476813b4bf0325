"""Formats with one power-of-two scale (E8M0) per block of elements, in plain PyTorch.

"rceil" is the rule of torchao after 0.18, and of TransformerEngine. "rceil_0_18" and "floor" are torchao 0.18's, bit
for bit: ``to_mx`` in torchao/prototype/mx_formats/mx_tensor.py. Easy to simplify wrongly: 0.18 takes an fp32 logarithm,
which rounds down for up to 60 numbers above a power of two, and does not scale a block whose scale is the smallest.

This is the only file that imports torchao's prototype names, which move between releases; tests run it with every
release in the package's range.
"""

import logging
from unittest.mock import patch

import torch
from torch.nn.functional import ScalingType

from mxtrain.formats.e2m1 import decode, encode, pack
from mxtrain.formats.gemm import product_of_codes
from mxtrain.formats.hardware import MERGED, operand_mode
from mxtrain.formats.matrices import PLAIN, Codes, Operand, at_least_fp32, split_blocks, tile_amax, values_dtype
from mxtrain.formats.mx import merged
from mxtrain.formats.mxnorm import block_amax
from mxtrain.formats.ops import FormatOps
from mxtrain.formats.recipe import Format, Recipe

# On import, torchao warns of compiled extensions that do not fit this machine (we use none), and torch warns of how
# torchao registers its enums. Users can do nothing about either.
with (
    patch.object(logging.getLogger("torchao"), "disabled", True),
    patch.object(logging.getLogger("torch.utils._pytree"), "disabled", True),
):
    from torchao.prototype.mx_formats.utils import from_blocked as from_blocked
    from torchao.prototype.mx_formats.utils import to_blocked as to_blocked

_NAN = 255  # E8M0's only code without a value


def scale_codes(amax: torch.Tensor, fmt: Format, scale_rounding: str) -> torch.Tensor:
    """Return the E8M0 codes (int32) of the scales of blocks with these largest magnitudes, fp32, same shape.

    Code c stands for 2^(c - 127). NaN has code 255 under every rule, infinity only under "rceil".
    """
    if scale_rounding == "floor":
        codes = ((amax.view(torch.int32) >> 23) - fmt.element_max_exponent).clamp(min=0)
        return torch.where(amax.isnan(), _NAN, codes)
    if scale_rounding == "rceil_0_18":
        # PyTorch divides on a CPU and multiplies by the reciprocal on a GPU, so about one code in a million differs.
        exponents = torch.ceil(torch.log2(amax / fmt.element_max)).clamp(-127, 127)
        return torch.where(amax.isnan(), _NAN, exponents + 127).to(torch.int32)
    bits = (amax * (1.0 / fmt.element_max)).view(torch.int32)
    # Up to the next power of two. 0x00400000 is 2^-127, the smallest scale.
    codes = torch.where(bits > 0x00400000, ((bits - 1) >> 23) + 1, 0)
    return torch.where(amax.isfinite(), codes, _NAN)


def scale_values(codes: torch.Tensor) -> torch.Tensor:
    """Return the powers of two (fp32) that E8M0 codes (int32) stand for; NaN for code 255."""
    bits = torch.where(codes == 0, 0x00400000, codes << 23)
    return torch.where(codes == _NAN, 0x7FC00000, bits).view(torch.float32)


def _inverse_scales(codes: torch.Tensor, scale_rounding: str) -> torch.Tensor:
    """Return the factors (fp32) for elements before they are rounded: 1 / scale, with torchao 0.18's exceptions."""
    if scale_rounding == "floor":
        # 0.18 divides by at least the smallest normal number, and divides a block with a NaN by infinity.
        return torch.where(codes == _NAN, 0.0, scale_values(254 - codes.clamp(1, 254)))
    inverse = scale_values(torch.where(codes == _NAN, _NAN, 254 - codes))
    return torch.where(codes == 0, 1.0, inverse) if scale_rounding == "rceil_0_18" else inverse


def _encode(y: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the codes of y (fp32), rounded to nearest even and saturated. In 8 bits NaN stays NaN; 4 are packed."""
    if fmt.element_bits == 4:
        return pack(encode(y))
    # Not every PyTorch saturates in the conversion.
    return y.clamp(-fmt.element_max, fmt.element_max).to(getattr(torch, fmt.element))


def cast(x: torch.Tensor, fmt: Format, scale_rounding: str, tiles: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast ``x`` in blocks along its last dimension.

    A block with a NaN gets a NaN scale. A block with an infinity decodes to infinity or NaN. So a non-finite input
    never turns into a finite number.

    Args:
        x: bf16 or fp32, [..., D] with D a multiple of the block size B.
        tiles: every B rows share their scales. Zeros pad the last tile, which changes nothing. The
            transpose of a matrix then has the same values, and its codes are the transposed ones.

    Returns:
        codes: the format's dtype, shape of ``x``. Of 4 bits: uint8 [..., D / 2], two a byte, the first in the low half.
        scales: float8_e8m0fnu, [..., D / B].
    """
    x, block_size = x.contiguous(), fmt.block_size
    amax = block_amax(x, block_size)
    scales = scale_codes(tile_amax(amax, block_size, -2) if tiles else amax, fmt, scale_rounding)
    y = at_least_fp32(split_blocks(x, block_size)) * _inverse_scales(scales, scale_rounding).unsqueeze(-1)
    return _encode(y.reshape(x.shape), fmt), scales.to(torch.uint8).view(torch.float8_e8m0fnu)


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, fmt: Format, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the values [..., D] of codes and scales from ``cast``.

    A code times a power of two is exact in bf16 and fp32, except below their smallest normal numbers.
    """
    blocks = split_blocks(_values(codes, fmt), fmt.block_size)
    return (blocks * scale_values(scales.view(torch.uint8).int()).unsqueeze(-1)).flatten(-2).to(dtype)


def _values(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the values of codes without their scales, fp32."""
    if fmt.element_bits == 4:
        return decode(codes.view(torch.uint8))
    if codes.device.type != "cpu":
        return codes.to(torch.float32)
    # On a CPU a table takes 0.5 ms for 1024 x 768 codes, PyTorch's conversion 2.4, half of the whole cast.
    table = torch.arange(256, dtype=torch.uint8, device="cpu").view(codes.dtype).to(torch.float32)
    return table.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


def image(
    x: torch.Tensor, fmt: Format, scale_rounding: str, dim: int, dtype: torch.dtype, tiles: bool = False
) -> torch.Tensor:
    """Round ``x`` [R, C] to the format: cast in blocks along ``dim`` (0 or 1), then dequantize to ``dtype``.

    Along dimension 0 the last block may be incomplete. Zeros pad it, which changes neither its scale nor its codes.
    """
    if dim == 1:
        return dequantize(*cast(x, fmt, scale_rounding, tiles=tiles), fmt, dtype)
    rows, columns = x.shape
    padding = -rows % fmt.block_size
    if padding:
        x = torch.nn.functional.pad(x, (0, 0, 0, padding))
    # [R / B, B, C] -> [R / B, C, B]: moves blocks to the last dimension without transposing the whole matrix.
    blocks = x.reshape(-1, fmt.block_size, columns).transpose(1, 2)
    values = dequantize(*cast(blocks, fmt, scale_rounding, tiles=tiles), fmt, dtype)
    return values.transpose(1, 2).reshape(rows + padding, columns)[:rows]


def cast_of_torchao(x: torch.Tensor, fmt: Format, tensor_scale: torch.Tensor | None) -> list[tuple[str, torch.Tensor]]:
    """Return the "codes" and "scales" of the installed torchao for x [R, C] along its rows, rounded to nearest."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    if tensor_scale is None:
        element, rounding = getattr(torch, fmt.element), ScaleCalculationMode.RCEIL
        scales, codes = to_mx(x.contiguous(), element, fmt.block_size, rounding)
    else:
        scales, codes = nvfp4_quantize(x.contiguous(), fmt.block_size, tensor_scale)
    return [("codes", codes), ("scales", scales.reshape(len(x), -1))]


class MXOps(FormatOps):
    """What computes with a format of power-of-two scales, in plain PyTorch."""

    def encode(self, x: torch.Tensor, recipe: Recipe, mode: str = "reference", role: str = "weight") -> Codes:
        return Codes(*cast(x, self.format, recipe.scale_rounding, tiles=recipe.has_tiles(role)))

    def cast(self, parts, recipe, mode, dims, spec=PLAIN):
        if operand_mode(recipe, mode) == MERGED:
            merged.check_parts(parts, spec.axis)
        return super().cast(parts, recipe, mode, dims, spec)

    def operand(self, x: torch.Tensor, recipe: Recipe, mode: str, dim: int, role: str) -> Operand:
        own_mode = operand_mode(recipe, mode)
        if own_mode in ("native", MERGED):
            if dim == 0:
                # The tensor cores take both operands with the reduction axis contiguous, in whole blocks.
                x = torch.nn.functional.pad(x.t(), (0, -x.shape[0] % self.format.block_size))
            codes = self.encode(x, recipe, mode, role)
            if own_mode == MERGED:
                return merged.merge(codes, merged.shares_tile(role, dim))
            return self.from_codes(codes, mode, 1)
        data = image(x, self.format, recipe.scale_rounding, dim, values_dtype(mode), recipe.has_tiles(role))
        return Operand(data if dim == 1 else data.t())

    def dequantize(self, codes: Codes, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(codes.data, codes.scales, self.format, dtype)

    def from_codes(self, codes: Codes, mode: str, dim: int) -> Operand:
        if mode == "native":
            return Operand(codes.data, to_blocked(codes.scales))
        if mode == MERGED:
            return merged.merge(codes, merged.shares_tile("input", dim))
        return super().from_codes(codes, mode, dim)

    def codes_of(self, operand: Operand) -> Codes:
        rows, columns = operand.data.shape
        if operand.scales.dtype == torch.float32:
            return merged.codes_of(operand)
        return Codes(operand.data, from_blocked(operand.scales, rows, columns // self.format.block_size))

    def product_of_codes(self, a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
        if a.scales.dtype == torch.float32:
            return merged.merged_mm(a.data, b.data.t(), a.scales, b.scales, out_dtype)
        return product_of_codes(a.data, [a.scales], b.data, [b.scales], [ScalingType.BlockWise1x32], out_dtype)

    def decoded(self, parts, recipe, mode, spec=PLAIN):
        if operand_mode(recipe, mode) != MERGED:
            return super().decoded(parts, recipe, mode, spec)
        return merged.values_of(self.cast(parts, recipe, mode, (1,), spec)[1], values_dtype(mode))

    def trial(self, x: torch.Tensor) -> Codes:
        return Codes(*cast(x, self.format, "rceil"))

    def rounded_amax(self, amax: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        """For "floor" this is scale * 2^element_max_exponent (amax rounded down to a power of two), otherwise scale *
        element_max (amax or more; under "rceil_0_18" up to a rounding error).
        """
        fmt, rounding = self.format, recipe.scale_rounding
        top = 2.0**fmt.element_max_exponent if rounding == "floor" else fmt.element_max
        values = scale_values(scale_codes(amax.float(), fmt, rounding)) * top
        # Zero blocks and tiny blocks share the smallest scale, but a zero block must not look like a nonzero one. Nor
        # must an infinite block look like one with a NaN.
        return torch.where((amax == 0) | amax.isinf(), amax.float(), values)

    def block_scales(self, amax, recipe, tensor_scale=None):
        scales = scale_values(scale_codes(amax, self.format, recipe.scale_rounding))
        return scales, scales * self.format.element_max

    def stored(self, linear: str, codes: Codes) -> dict[str, torch.Tensor]:
        # E8M0 in the bytes of uint8: safetensors of older releases have no such dtype, and vLLM expects uint8.
        name = "weight" if self.format.element_bits == 8 else "weight_packed"
        return {f"{linear}.{name}": codes.data, f"{linear}.weight_scale": codes.scales.view(torch.uint8)}
