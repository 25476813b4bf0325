"""MXFP8 arithmetic inside kernels: block maxima, E8M0 scales, E4M3 rounding, the blocked layout of scales.

Every function gives torchao's bits (``torchao.prototype.mx_formats.mx_tensor.to_mx``), special values included, so that
a kernel that multiplies, reduces and casts in one pass returns what separate PyTorch operations would.
"""

import triton
import triton.language as tl

from mxtrain.kernels.device import INTERPRETED
from mxtrain.recipes.formats import MXFP8

BLOCK = MXFP8.block_size

_E4M3_MAX = tl.constexpr(448.0)
_LOG2_E = tl.constexpr(1.4426950408889634)
# PyTorch divides a tensor by a number on CUDA by multiplying with its fp32 reciprocal, on a CPU properly. The quotients
# differ in the last place now and then, and with them the scale of about one block in a million.
_ON_CPU = tl.constexpr(INTERPRETED)


@triton.jit
def magnitude_bits(x):
    """The bits of |x| (fp32) as int32. Their order is that of the magnitudes, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def block_amax(x, AXIS: tl.constexpr):
    """Largest magnitude of x (fp32) along AXIS; NaN if any is NaN, which tl.max would drop."""
    return tl.max(magnitude_bits(x), AXIS).to(tl.float32, bitcast=True)


@triton.jit
def scale_code(amax, RCEIL: tl.constexpr):
    """The E8M0 code (int32, 0 to 255) of the scale for blocks whose largest magnitude is ``amax`` (fp32)."""
    if RCEIL:
        if _ON_CPU:
            descale = tl.div_rn(amax, tl.full(amax.shape, _E4M3_MAX, tl.float32))
        else:
            descale = amax * (1.0 / _E4M3_MAX)
        # torchao takes the ceiling of an fp32 log2, and for a number just above 2^k that logarithm rounds to k. Near 1,
        # log2(1 + f) is f * log2(e), and adding k to it rounds as the logarithm does; farther from 1 the sum is above k
        # in any case, which is all that the ceiling asks.
        bits = magnitude_bits(descale)
        code = bits >> 23
        k = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + 127.0)
        one_plus_f = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
        log2 = k + (one_plus_f - 1.0) * _LOG2_E
        code = tl.where(log2 > k, code + 1, code)
        # Denormal numbers: 2^-127 is bit 22, and 11 is where the logarithm of what lies above still rounds to -127.
        code = tl.where(bits <= 0x7FFFFF, tl.where(bits > 0x400000 + 11, 1, 0), code)
        # Infinity gives 255 and NaN 256 here.
        return tl.where(bits >= 0x7F800000, code - 1, code)
    # floor(log2(amax)) - 8; infinity is no special case.
    code = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - 8, 0)
    return tl.where(amax != amax, 255, code)


@triton.jit
def scale_value(code):
    """The power of two (fp32) that an E8M0 code stands for; NaN for 255."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def multiplier(code, RCEIL: tl.constexpr):
    """What elements are multiplied by before they are rounded (fp32): one over the scale, with torchao's exceptions."""
    bits = (254 - code) << 23
    if RCEIL:
        # A zero or tiny block is left as it is; 2^-127 is a denormal number.
        bits = tl.where(code == 0, 0x3F800000, bits)
        bits = tl.where(code == 254, 0x00400000, bits)
        bits = tl.where(code == 255, 0x7FC00000, bits)
    else:
        # torchao divides by a scale that is at least the smallest normal number, and by infinity for a NaN block.
        bits = tl.where(code == 0, 253 << 23, bits)
        bits = tl.where(code == 255, 0, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def rounded_amax(amax, RCEIL: tl.constexpr):
    """The block maximum that the rounded scale of ``amax`` stands for (fp32); zero for a zero block."""
    scale = scale_value(scale_code(amax, RCEIL))
    if RCEIL:
        top = scale * _E4M3_MAX
    else:
        top = scale * 256.0
    return tl.where(amax == 0.0, 0.0, top)


@triton.jit
def round_to_e4m3(y):
    """The nearest E4M3 value to y (fp32), ties to even, saturating at 448; NaN stays NaN. For any device.

    Adding a number whose last place is E4M3's step at y, and taking it off again, rounds to that step.
    """
    magnitude = magnitude_bits(y)
    size = magnitude.to(tl.float32, bitcast=True)
    size = tl.where(size > _E4M3_MAX, _E4M3_MAX, size)
    # Three bits of mantissa, and below 2^-6 the fixed step 2^-9.
    exponent = tl.minimum(tl.maximum(magnitude >> 23, 127 - 6), 127 + 8)
    magic = ((exponent + 20) << 23).to(tl.float32, bitcast=True)
    rounded = ((size + magic) - magic).to(tl.int32, bitcast=True)
    sign = y.to(tl.int32, bitcast=True) & -2147483648
    return (rounded | sign).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_codes(y, HARDWARE: tl.constexpr):
    """E4M3 codes (uint8) of y (fp32), rounded to nearest even and saturated; HARDWARE: by the GPU's own conversion."""
    if HARDWARE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    value = round_to_e4m3(y)
    # Scaled by 2^-120 the exponents of E4M3 become those of fp32, its subnormal numbers fp32's denormal ones.
    bits = (value * 2.0**-120).to(tl.int32, bitcast=True)
    code = ((bits >> 20) & 0x7F) | ((bits >> 24) & 0x80)
    return tl.where(value != value, 0x7F, code).to(tl.uint8)


@triton.jit
def e4m3_image(y, scale, HARDWARE: tl.constexpr):
    """y (fp32) rounded to E4M3, times the block's scale: what code and scale stand for, exact in bf16."""
    if HARDWARE:
        value = y.to(tl.float8e4nv).to(tl.float32)
    else:
        value = round_to_e4m3(y)
    return (value * scale).to(tl.bfloat16)


@triton.jit
def blocked_offset(row, block, blocks):
    """Where the scale of (row, block) lies in the 128x4 layout that tensor cores read; ``blocks`` are those of a row.

    Source: NVIDIA, cuBLAS documentation, "1D block scaling factors layout"; torchao ``to_blocked``.
    """
    tile = (row // 128) * ((blocks + 3) // 4) + block // 4
    return tile * 512 + (row % 32) * 16 + (row // 32 % 4) * 4 + block % 4
