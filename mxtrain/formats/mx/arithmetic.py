"""Arithmetic of MX formats inside kernels: E8M0 scales, and rounding to the elements.

Every function returns the bits of ``mxtrain.formats.mx.reference``, special values included, so a kernel that
multiplies, reduces and casts in one pass returns what separate PyTorch operations would.

ELEMENT is the kind of elements, a key of ``STORAGE``: "e4m3" has 4 bits of exponent and 3 of mantissa. Codes of "e2m1"
have 4 bits and no NaN; the scale of a block says that it has one. ROUNDING is the recipe's ``scale_rounding``.
"""

import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import Storage, block_amax, magnitude_bits, rounded_product
from mxtrain.formats.mx.merged import FARTHEST
from mxtrain.formats.recipe import Format
from mxtrain.launch.launch import INTERPRETED

BLOCK = 32


def element_of(fmt: Format) -> str:
    """Return the kind of elements of a format: "e4m3" for float8_e4m3fn."""
    return fmt.element.partition("_")[2][:4]


STORAGE = {
    "e4m3": Storage(BLOCK, torch.float8_e4m3fn, 1, torch.float8_e8m0fnu),
    "e5m2": Storage(BLOCK, torch.float8_e5m2, 1, torch.float8_e8m0fnu),
    "e2m1": Storage(BLOCK, torch.uint8, 2, torch.float8_e8m0fnu),
}
_FARTHEST = tl.constexpr(FARTHEST)
_SQRT_32 = tl.constexpr(32**0.5)
_LOG2_E = tl.constexpr(1.4426950408889634)
# To divide a tensor by a number, PyTorch multiplies by the fp32 reciprocal on CUDA, and divides on a CPU. The quotients
# sometimes differ in the last place, which changes about one scale in a million under "rceil_0_18".
_ON_CPU = tl.constexpr(INTERPRETED)


@triton.constexpr_function
def largest(ELEMENT):
    """The largest element."""
    return {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}[ELEMENT]


@triton.constexpr_function
def largest_exponent(ELEMENT):
    """Exponent of the largest element."""
    return int(largest(ELEMENT)).bit_length() - 1


@triton.constexpr_function
def smallest_exponent(ELEMENT):
    """Exponent of the smallest normal element."""
    return 2 - 2 ** (int(ELEMENT[1]) - 1)


@triton.constexpr_function
def mantissa_bits(ELEMENT):
    """Width of an element's mantissa."""
    return int(ELEMENT[3])


@triton.constexpr_function
def code_bits(ELEMENT):
    """Width of a code."""
    return 1 + int(ELEMENT[1]) + int(ELEMENT[3])


@triton.constexpr_function
def largest_bits(ELEMENT):
    """Bits of the fp32 number whose scale is just 2^-127: the largest element times 2^-127."""
    return ((largest_exponent(ELEMENT) - 1) << 23) + int(largest(ELEMENT) * 2 ** (23 - largest_exponent(ELEMENT)))


@triton.jit
def scale_code(amax, ROUNDING: tl.constexpr, ELEMENT: tl.constexpr):
    """E8M0 code (int32, 0 to 255) of the scale for blocks whose largest magnitude is ``amax`` (fp32)."""
    bits = magnitude_bits(amax)
    if ROUNDING == "floor":
        # floor(log2(amax)) minus the largest exponent, which needs no special case for infinity.
        code = tl.maximum((bits >> 23) - largest_exponent(ELEMENT), 0)
        return tl.where(amax != amax, 255, code)
    if ROUNDING == "rceil":
        # The quotient is above a power of two where amax is above the largest element times it, with one exception:
        # next to 2^-127, a denormal number, quotients are coarse, and that of the next amax rounds down to it.
        above = bits - largest_bits(ELEMENT)
        code = tl.where(above > 1, (above + 0x7FFFFF) >> 23, 0)
        return tl.where(bits >= 0x7F800000, 255, code)
    if _ON_CPU:
        descale = tl.div_rn(amax, tl.full(amax.shape, largest(ELEMENT), tl.float32))
    else:
        descale = amax * (1.0 / largest(ELEMENT))
    # torchao 0.18 takes the ceiling of an fp32 log2, which rounds to k for numbers just above 2^k. The same happens
    # here: near 1, log2(1 + f) is f * log2(e), and adding k rounds that sum as the logarithm is rounded. Farther
    # from 1 the sum is above k in any case, and the ceiling needs no more than that.
    bits = magnitude_bits(descale)
    code = bits >> 23
    k = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + 127.0)
    one_plus_f = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    log2 = k + (one_plus_f - 1.0) * _LOG2_E
    # Denormal numbers: 2^-127 is bit 22, and the logarithms of the next 11 numbers above it still round to -127.
    is_above = tl.where(code == 0, bits > 0x400000 + 11, log2 > k)
    # Infinity and NaN have 255 in their exponent. Infinity gets code 254, and NaN, which is above it, 255.
    return tl.minimum(code, 254) + is_above.to(tl.int32)


@triton.jit
def codes_of_rows(x, ROUNDING: tl.constexpr, ELEMENT: tl.constexpr, TILES: tl.constexpr):
    """Scale codes (int32) [R, C / 32] of x (fp32) [R, C / 32, 32]. TILES: 32 rows share the scales."""
    amax = block_amax(x, 2)
    if TILES:
        rows: tl.constexpr = amax.shape[0]
        blocks: tl.constexpr = amax.shape[1]
        of_tiles = block_amax(tl.reshape(amax, (rows // 32, 32, blocks)), 1)[:, None, :]
        amax = tl.reshape(tl.broadcast_to(of_tiles, (rows // 32, 32, blocks)), (rows, blocks))
    return scale_code(amax, ROUNDING, ELEMENT)


@triton.jit
def codes_of_columns(x, ROUNDING: tl.constexpr, ELEMENT: tl.constexpr, TILES: tl.constexpr):
    """Scale codes (int32) [R / 32, C] of x (fp32) [R / 32, 32, C]. TILES: 32 columns share the scales."""
    amax = block_amax(x, 1)
    if TILES:
        blocks: tl.constexpr = amax.shape[0]
        columns: tl.constexpr = amax.shape[1]
        of_tiles = block_amax(tl.reshape(amax, (blocks * columns // 32, 32)), 1)[:, None]
        amax = tl.reshape(tl.broadcast_to(of_tiles, (blocks * columns // 32, 32)), (blocks, columns))
    return scale_code(amax, ROUNDING, ELEMENT)


@triton.jit
def scale_value(code):
    """Power of two (fp32) that an E8M0 code stands for. For 255 infinity, whose products with 0 and NaN are NaN."""
    return tl.maximum(code << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def inverse_scale(code, ROUNDING: tl.constexpr):
    """Factor (fp32) for elements before rounding: one over the scale, with torchao 0.18's exceptions."""
    bits = (254 - code) << 23
    if ROUNDING == "rceil":
        bits = tl.where(code == 255, 0x7FC00000, bits)
    elif ROUNDING == "rceil_0_18":
        # One over 2^127 is a denormal number, with the bits 0x00400000. A zero or tiny block is not scaled.
        bits = tl.maximum(bits, 0x00400000)
        bits = tl.where(code == 0, 0x3F800000, bits)
        bits = tl.where(code == 255, 0x7FC00000, bits)
    else:
        # torchao divides by at least the smallest normal number, and divides a NaN block by infinity.
        bits = tl.where(code == 0, 253 << 23, bits)
        bits = tl.where(code == 255, 0, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def rounded_amax(amax, ROUNDING: tl.constexpr, ELEMENT: tl.constexpr):
    """Block maximum (fp32) that the rounded scale of ``amax`` stands for; zero for zero, and NaN for NaN."""
    scale = scale_value(scale_code(amax, ROUNDING, ELEMENT))
    if ROUNDING == "floor":
        top = scale * 2.0 ** largest_exponent(ELEMENT)
    else:
        top = scale * largest(ELEMENT)
    return tl.where(amax > 0.0, top, amax)


@triton.jit
def round_to_element(y, ELEMENT: tl.constexpr):
    """Nearest element to y (fp32) on any device: ties to even, saturated. NaN stays NaN, and becomes 6 for "e2m1".

    Adding a number whose last place is the elements' step at y rounds to that step; subtracting it leaves rounded y.
    """
    size = tl.minimum(tl.abs(y), largest(ELEMENT))
    # Below the smallest normal element the step stays the same.
    power = tl.maximum(size, 2.0 ** smallest_exponent(ELEMENT)).to(tl.int32, bitcast=True) & 0x7F800000
    power = power.to(tl.float32, bitcast=True)
    places: tl.constexpr = 2.0 ** (23 - mantissa_bits(ELEMENT))
    rounded = tl.fma(power, -places, tl.fma(power, places, size)).to(tl.int32, bitcast=True)
    sign = y.to(tl.int32, bitcast=True) & -2147483648
    value = (rounded | sign).to(tl.float32, bitcast=True)
    if code_bits(ELEMENT) == 8:
        value = tl.where(y != y, y, value)
    return value


@triton.jit
def _by_hardware(y, ELEMENT: tl.constexpr):
    if ELEMENT == "e5m2":
        return y.to(tl.float8e5)
    else:
        return y.to(tl.float8e4nv)


@triton.jit
def element_codes(y, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes (uint8) of y (fp32), rounded to nearest even and saturated. HARDWARE: for 8 bits by a GPU's instruction."""
    if HARDWARE and code_bits(ELEMENT) == 8:
        return _by_hardware(y, ELEMENT).to(tl.uint8, bitcast=True)
    value = round_to_element(y, ELEMENT)
    # The smallest normal element becomes fp32's, 2^-126, so that exponents have the elements' bias.
    bits = (value * 2.0 ** (-126 - smallest_exponent(ELEMENT))).to(tl.int32, bitcast=True)
    sign: tl.constexpr = 1 << (code_bits(ELEMENT) - 1)
    code = ((bits >> (23 - mantissa_bits(ELEMENT))) & (sign - 1)) | ((bits >> (32 - code_bits(ELEMENT))) & sign)
    return tl.where(value != value, sign - 1, code).to(tl.uint8)


@triton.jit
def store_codes(ptr, offsets, codes, mask, ELEMENT: tl.constexpr):
    """Store codes at these offsets of elements, two codes of 4 bits in a byte."""
    if code_bits(ELEMENT) == 4:
        pairs: tl.constexpr = (codes.numel // 2, 2)
        low, high = tl.split(tl.reshape(codes, pairs))
        mask, _ = tl.split(tl.reshape(tl.broadcast_to(mask, codes.shape), pairs))
        offsets, _ = tl.split(tl.reshape(offsets, pairs))
        codes, offsets = low | (high << 4), offsets // 2
    tl.store(ptr + offsets, codes, mask=mask)


@triton.jit
def element_image(y, scale, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr):
    """y (fp32), rounded to the nearest element, times the block's scale, exact in bf16. HARDWARE: as above."""
    if HARDWARE and code_bits(ELEMENT) == 8:
        value = _by_hardware(y, ELEMENT).to(tl.float32)
    else:
        value = round_to_element(y, ELEMENT)
    if code_bits(ELEMENT) == 4:
        scale = tl.where(scale == float("inf"), float("nan"), scale)
    return (value * scale).to(tl.bfloat16)


@triton.jit
def code_in_group(code):
    """What a block's scale code counts for the largest of its group: NaN nothing, and every code at least 1."""
    return tl.maximum(tl.where(code == 255, 0, code), 1)


@triton.jit
def _merge_factor(code, group):
    """Factor (fp32) from the grid of a block's scale ``code`` to that of ``group``; NaN for a block with a NaN."""
    shift = tl.minimum(tl.maximum(code - group, -_FARTHEST), 0)
    return tl.where(code == 255, 0x7FC00000, (shift + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def merged_codes(y, code, group, HARDWARE: tl.constexpr):
    """Codes of y (fp32), rounded to E4M3 for a block with scale ``code``, then once more for the scale ``group``.

    ``code`` and ``group`` (int32) broadcast to y. See ``mxtrain.formats.mx.merged.merge``.
    """
    factor = _merge_factor(code, group)
    if HARDWARE:
        # fp16 holds E4M3. Products that it rounds are below 2^-20, and E4M3 rounds them to zero.
        return (y.to(tl.float8e4nv).to(tl.float16) * factor.to(tl.float16)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return element_codes(round_to_element(y, "e4m3") * factor, "e4m3", False)


@triton.jit
def merged_words(y0, y1, y2, y3, code, group, HARDWARE: tl.constexpr):
    """``merged_codes`` of four rows in one word (int32), those of y0 in its lowest byte."""
    if HARDWARE:
        # Triton 3.6 makes words of bytes with halves of registers that are undefined, and ptxas miscompiles them.
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            .reg .b32 first, last, factor;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 last, high;
            cvt.rn.f16x2.f32 factor, $5, $5;
            mul.f16x2 first, first, factor;
            mul.f16x2 last, last, factor;
            cvt.rn.satfinite.e4m3x2.f16x2 low, first;
            cvt.rn.satfinite.e4m3x2.f16x2 high, last;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f,f",
            [y0, y1, y2, y3, _merge_factor(code, group)],
            tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        words = merged_codes(y0, code, group, False).to(tl.int32)
        words |= merged_codes(y1, code, group, False).to(tl.int32) << 8
        words |= merged_codes(y2, code, group, False).to(tl.int32) << 16
        return words | (merged_codes(y3, code, group, False).to(tl.int32) << 24)


@triton.jit
def hadamard(x):
    """Fixed Hadamard transform of 32 rows, x [R, 32, C] (fp32), by the operations of ``mxtrain.formats.hadamard``."""
    shape: tl.constexpr = x.shape
    x = rounded_product(x, 1.0 / 32)
    for level in tl.static_range(5):
        x = tl.reshape(x, (shape[0] * (16 >> level), 2, shape[2] << level))
        lower, upper = tl.split(tl.permute(x, (0, 2, 1)))
        x = tl.permute(tl.join(lower + upper, lower - upper), (0, 2, 1))
    return tl.reshape(x, shape) * _SQRT_32
