"""MXFP8 arithmetic inside kernels: E8M0 scales and E4M3 rounding.

Every function returns torchao's bits (``torchao.prototype.mx_formats.mx_tensor.to_mx``), special values included, so a
kernel that multiplies, reduces and casts in one pass returns what separate PyTorch operations would.
"""

import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import Storage, magnitude_bits
from mxtrain.formats.mxfp8 import MXFP8
from mxtrain.launch.launch import INTERPRETED

BLOCK = MXFP8.block_size
STORAGE = Storage(BLOCK, torch.float8_e4m3fn, 1, torch.float8_e8m0fnu)

_E4M3_MAX = tl.constexpr(448.0)
_LOG2_E = tl.constexpr(1.4426950408889634)
# To divide a tensor by a number, PyTorch multiplies by the fp32 reciprocal on CUDA, and divides on a CPU. The quotients
# sometimes differ in the last place, which changes the scale of about one block in a million.
_ON_CPU = tl.constexpr(INTERPRETED)


@triton.jit
def scale_code(amax, RCEIL: tl.constexpr, DTYPE: tl.constexpr = tl.float32):
    """E8M0 code (int32, 0 to 255) of the scale for blocks whose largest magnitude is ``amax`` (fp32).

    DTYPE: of which ``amax`` are numbers. For bf16 the result is the same in half the instructions.
    """
    if RCEIL and DTYPE == tl.bfloat16:
        # 448 is 1.75 * 2^8. A mantissa above 1.75, which is 0x600000, carries into the exponent. No bf16 number is so
        # little above 448 * 2^k that its logarithm rounds down, as it may for fp32 below.
        bits = amax.to(tl.int32, bitcast=True)
        code = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 0)
        return tl.where(bits >= 0x7F800000, 254 + (bits > 0x7F800000).to(tl.int32), code)
    if RCEIL:
        if _ON_CPU:
            descale = tl.div_rn(amax, tl.full(amax.shape, _E4M3_MAX, tl.float32))
        else:
            descale = amax * (1.0 / _E4M3_MAX)
        # torchao takes the ceiling of an fp32 log2, which rounds to k for numbers just above 2^k. The same happens
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
    # floor(log2(amax)) - 8, which needs no special case for infinity.
    code = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - 8, 0)
    return tl.where(amax != amax, 255, code)


@triton.jit
def scale_value(code):
    """Power of two (fp32) that an E8M0 code stands for. For 255 infinity, whose products with 0 and NaN are NaN."""
    return tl.maximum(code << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def inverse_scale(code, RCEIL: tl.constexpr):
    """Factor (fp32) for elements before rounding: one over the scale, with torchao's exceptions."""
    bits = (254 - code) << 23
    if RCEIL:
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
def rounded_amax(amax, RCEIL: tl.constexpr):
    """Block maximum (fp32) that the rounded scale of ``amax`` stands for; zero for zero, and NaN for NaN."""
    scale = scale_value(scale_code(amax, RCEIL))
    if RCEIL:
        top = scale * _E4M3_MAX
    else:
        top = scale * 256.0
    return tl.where(amax > 0.0, top, amax)


@triton.jit
def round_to_e4m3(y):
    """Nearest E4M3 value to y (fp32) on any device: ties to even, saturated at 448, NaN stays NaN.

    Adding a number whose last place is E4M3's step at y rounds to that step; subtracting it leaves the rounded y.
    """
    magnitude = magnitude_bits(y)
    size = magnitude.to(tl.float32, bitcast=True)
    size = tl.where(size > _E4M3_MAX, _E4M3_MAX, size)
    # The mantissa has three bits; below 2^-6 the step is 2^-9.
    exponent = tl.minimum(tl.maximum(magnitude >> 23, 127 - 6), 127 + 8)
    magic = ((exponent + 20) << 23).to(tl.float32, bitcast=True)
    rounded = ((size + magic) - magic).to(tl.int32, bitcast=True)
    sign = y.to(tl.int32, bitcast=True) & -2147483648
    return (rounded | sign).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_codes(y, HARDWARE: tl.constexpr):
    """E4M3 codes (uint8) of y (fp32), rounded to nearest even and saturated. HARDWARE: use the GPU's instruction."""
    if HARDWARE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    value = round_to_e4m3(y)
    # Times 2^-120, the exponents of E4M3 become those of fp32, and its subnormals fp32's denormals.
    bits = (value * 2.0**-120).to(tl.int32, bitcast=True)
    code = ((bits >> 20) & 0x7F) | ((bits >> 24) & 0x80)
    return tl.where(value != value, 0x7F, code).to(tl.uint8)


@triton.jit
def e4m3_image(y, scale, HARDWARE: tl.constexpr):
    """y (fp32) rounded to E4M3 and multiplied by the block's scale, exact in bf16. HARDWARE: as in ``e4m3_codes``."""
    if HARDWARE:
        value = y.to(tl.float8e4nv).to(tl.float32)
    else:
        value = round_to_e4m3(y)
    return (value * scale).to(tl.bfloat16)
