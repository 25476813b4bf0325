"""NVFP4 arithmetic inside kernels: E4M3 block scales, E2M1 rounding to nearest and stochastic, packing, random bits.

Every function returns the bits of ``nvfp4.reference``, special values included, for tensor scales that are
powers of two, infinite or NaN. As in the reference, the codes of a block whose scale is NaN are meaningless. Without
E2M1 instructions a cast is bound by arithmetic, so each function takes as few instructions as it can. Easy to simplify
wrongly:

* Quotients are rounded to nearest. Triton's ``/`` is approximate on a GPU.
* The Hadamard transform's products are rounded before its sums (``rounded_product``).
"""

import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import Storage, magnitude_bits
from mxtrain.formats.nvfp4 import NVFP4, RANGE, SCALE_MAX, SCALE_MIN, TENSOR_SCALE_MIN
from mxtrain.launch.launch import INTERPRETED

BLOCK = NVFP4.block_size
# Two 4-bit codes share a byte.
STORAGE = Storage(BLOCK, torch.uint8, 2, torch.float8_e4m3fn)

_E2M1_MAX = tl.constexpr(NVFP4.element_max)
_SCALE_MAX = tl.constexpr(SCALE_MAX)
_SCALE_MIN = tl.constexpr(SCALE_MIN)
_RANGE, _TENSOR_SCALE_MIN = tl.constexpr(RANGE), tl.constexpr(TENSOR_SCALE_MIN)
_INTERPRETED = tl.constexpr(INTERPRETED)
# The bits of 1.5 * 2^23, and the int32 sum of eight of them, shifted by 0, 4, ... 28 bits.
_ABOVE_CODE = 0x4B400000
_ABOVE_CODES = tl.constexpr(sum(_ABOVE_CODE << (4 * i) for i in range(8)) & 0x7FFFFFFF)


@triton.jit
def tensor_scale_bits(amax):
    """The tensor scale, as int32 bits, of matrices or rows with this largest magnitude (fp32)."""
    scale = tl.maximum(tl.div_rn(amax, _RANGE), _TENSOR_SCALE_MIN, propagate_nan=tl.PropagateNan.ALL)
    # The next power of two: carry any mantissa into the exponent, then drop the mantissa.
    bits = magnitude_bits(scale)
    return tl.where(bits < 0x7F800000, (bits + 0x7FFFFF) & 0x7F800000, bits)


@triton.jit
def quotient_of(x, DIVISOR: tl.constexpr):
    """x / DIVISOR, rounded once, for x (fp32) whose quotient is a normal number."""
    if _INTERPRETED:  # the interpreter's tl.fma rounds twice
        return tl.div_rn(x, tl.full(x.shape, DIVISOR, tl.float32))
    # One correction is enough where the inverse of the divisor is rounded to nearest (Markstein, "Computation of
    # elementary functions on the IBM RISC System/6000 processor", 1990).
    quotient = x * (1.0 / DIVISOR)
    return tl.fma(tl.fma(quotient, -DIVISOR, x), 1.0 / DIVISOR, quotient)


@triton.jit
def reciprocal(scale):
    """1 / scale (fp32), rounded once, where both are normal numbers; a test checks every E4M3 scale."""
    if _INTERPRETED:
        return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], tl.float32, is_pure=True, pack=1)
    return tl.fma(tl.fma(inverse, -scale, 1.0), inverse, inverse)


@triton.jit
def scale_of_block(amax, inverse):
    """Code (uint8) and value (fp32) of the E4M3 scale for blocks whose largest magnitude is ``amax`` (fp32).

    ``inverse`` is one over the tensor scale. The clamped scale is a normal E4M3 number, so integer arithmetic on its
    bits rounds it on any device.
    """
    wanted = amax * inverse
    is_nan = wanted != wanted
    wanted = quotient_of(tl.minimum(tl.maximum(wanted, _E2M1_MAX * _SCALE_MIN), _E2M1_MAX * _SCALE_MAX), _E2M1_MAX)
    bits = wanted.to(tl.int32, bitcast=True)
    bits = (bits + (0x7FFFF + ((bits >> 20) & 1))) & -0x100000
    # The exponent bias is 127 in fp32 and 7 in E4M3, which has 3 mantissa bits.
    code = tl.where(is_nan, 0x7F, (bits >> 20) - (120 << 3))
    bits = tl.where(is_nan, 0x7FC00000, bits)
    return code.to(tl.uint8), bits.to(tl.float32, bitcast=True)


@triton.jit
def multiplier(scale, inverse):
    """Factor (fp32) for elements before rounding: one over the block's scale and the tensor scale."""
    return reciprocal(scale) * inverse


@triton.jit
def _binade(y):
    """|y| (fp32) saturated at 6, and twice E2M1's step there: 1 below 2, 2 below 4, then 4."""
    size = tl.minimum(tl.abs(y), _E2M1_MAX)
    bits = tl.maximum(size, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
    return size, bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude_to_nearest(y):
    """Magnitude of the nearest E2M1 value to y (fp32): ties to even, saturated at 6.

    Adding a number whose last place is E2M1's step at y rounds to that step; subtracting it leaves the rounded y.
    """
    size, power = _binade(y)
    return tl.fma(power, -(2.0**22), tl.fma(power, 2.0**22, size))


@triton.jit
def _plus_half(number, word, UPPER: tl.constexpr):
    """number plus the upper or the lower half of word, all int32."""
    if _INTERPRETED:
        return number + ((word >> 16) & 0xFFFF if UPPER else word & 0xFFFF)
    # Products of the halves with two bytes, of which one is 1: the instruction needs no mask or shift.
    return tl.inline_asm_elementwise(
        "dp2a.lo.u32.u32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [word, 256 if UPPER else 1, number],
        tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _truncated(steps, power):
    """steps - 64 * power (fp32), rounded down to a multiple of power / 2.

    Adding 2^22 * power leaves no place for the fraction, and takes the pipe for fp32, which is wider than a mask's.
    """
    if _INTERPRETED:
        bits = steps.to(tl.int32, bitcast=True) & -65536
        return tl.fma(power, -64.0, bits.to(tl.float32, bitcast=True))
    coarse = tl.inline_asm_elementwise(
        "fma.rz.f32 $0, $1, 0f4A800000, $2;", "=f,f,f", [power, steps], tl.float32, is_pure=True, pack=1
    )
    return tl.fma(power, -(2.0**22 + 64.0), coarse)


@triton.jit
def round_stochastically(y, words, UPPER: tl.constexpr):
    """One of the two E2M1 values around y (fp32), chosen by the uniform halves of words (int32), saturated at 6.

    A sum as in ``magnitude_to_nearest`` rounds to 2^-16 of E2M1's step. Then the half is added and the rest dropped.
    """
    size, power = _binade(y)
    steps = _plus_half(tl.fma(power, 64.0, size).to(tl.int32, bitcast=True), words, UPPER)
    size = _truncated(steps.to(tl.float32, bitcast=True), power)
    sign = y.to(tl.int32, bitcast=True) & -2147483648
    return (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def element_code(value):
    """Code (int32, 0 to 15) of an E2M1 value (fp32)."""
    # Times 2^-126, the exponents of E2M1 become those of fp32, and its subnormal number an fp32 denormal.
    bits = (value * 2.0**-126).to(tl.int32, bitcast=True)
    return ((bits >> 22) & 7) | ((bits >> 28) & 8)


@triton.jit
def pack(first, second):
    """Pack two E2M1 values (fp32) into one byte, the first in the low half."""
    return (element_code(first) | (element_code(second) << 4)).to(tl.uint8)


@triton.jit
def _part(size, offset):
    """size / 2 + offset (fp32), clamped to [0, 1]."""
    if _INTERPRETED:
        return tl.minimum(tl.maximum(size * 0.5 + offset, 0.0), 1.0)
    return tl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, 0f3F000000, $2;",
        "=f,f,f",
        [size, tl.zeros(size.shape, tl.float32) + offset],
        tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _nearest_code(size):
    """_ABOVE_CODE plus the code of the nearest E2M1 value to ``size`` >= 0 (fp32), as int32.

    From 0 to 2 the code rises by 4, from 2 to 4 by 2, from 4 to 6 by 1: one part each. At most one part lies inside its
    range, so only one sum rounds, to an integer. All of it is fp32 arithmetic, whose pipe is wider than the one for
    integers.
    """
    total = tl.fma(_part(size, 0.0), 4.0, 1.5 * 2.0**23)
    total = tl.fma(_part(size, -1.0), 2.0, total)
    return (total + _part(size, -2.0)).to(tl.int32, bitcast=True)


@triton.jit
def pack_nearest(first, second, HARDWARE: tl.constexpr):
    """Round two numbers (fp32) to nearest and pack them into one byte. HARDWARE: use the GPU's instruction."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b8 b0, b1, b2, b3;
            cvt.rn.satfinite.e2m1x2.f32 b0, $5, $1;
            cvt.rn.satfinite.e2m1x2.f32 b1, $6, $2;
            cvt.rn.satfinite.e2m1x2.f32 b2, $7, $3;
            cvt.rn.satfinite.e2m1x2.f32 b3, $8, $4;
            mov.b32 $0, {b0, b1, b2, b3};
            }""",
            constraints="=r,r,r,r,r,r,r,r,r",
            args=[first, second],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    codes = _nearest_code(tl.abs(first)) + _nearest_code(tl.abs(second)) * 16
    signs = ((first.to(tl.int32, bitcast=True) >> 28) & 8) | ((second.to(tl.int32, bitcast=True) >> 24) & 128)
    return ((codes & 0x77) | signs).to(tl.uint8)


@triton.jit
def pack_nearest_words(eight, factor, HARDWARE: tl.constexpr):
    """Round x * factor to nearest for a tuple of eight tensors x (fp32), and pack them into one int32."""
    if HARDWARE:
        word = pack_nearest(eight[0] * factor, eight[1] * factor, True).to(tl.int32)
        for i in tl.static_range(1, 4):
            pair = pack_nearest(eight[2 * i] * factor, eight[2 * i + 1] * factor, True)
            word |= pair.to(tl.int32) << (8 * i)
        return word
    codes = _nearest_code(tl.abs(eight[7]) * factor)
    signs = eight[7].to(tl.int32, bitcast=True) >> 28
    for i in tl.static_range(1, 8):
        codes = codes * 16 + _nearest_code(tl.abs(eight[7 - i]) * factor)
        # The sign, and three more bits that the mask below clears.
        signs = (signs << 4) | (eight[7 - i].to(tl.uint32, bitcast=True) >> 28).to(tl.int32)
    # The eight _ABOVE_CODE add up to a constant.
    return (codes - _ABOVE_CODES) | (signs & -0x77777778)


@triton.jit
def philox(key, c0, c1, c2, c3):
    """Four random words (uint32) of a counter, as in ``reference.philox``. key: int64; c0 to c3: uint32.

    A product has 64 bits, by one instruction. ``tl.philox`` takes one for each half.
    """
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    # A real loop, which LLVM unrolls: Triton's own passes take much longer for ten rounds in each row.
    c1, c2, c3 = tl.broadcast_to(c1, c0.shape), tl.broadcast_to(c2, c0.shape), tl.broadcast_to(c3, c0.shape)
    for _ in range(10):
        first, second = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (second >> 32).to(tl.uint32) ^ c1 ^ k0, (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = second.to(tl.uint32), first.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def load_draws(draws_ptr):
    """Key, microbatch, step and rank from a pointer to key, step, microbatch and rank."""
    step = tl.load(draws_ptr + 1).to(tl.uint32)
    microbatch = tl.load(draws_ptr + 2).to(tl.uint32)
    rank = tl.load(draws_ptr + 3).to(tl.uint32)
    return tl.load(draws_ptr), microbatch, step, rank


@triton.jit
def random_words(draws, four):
    """Random words (int32) of elements 4 * four to 4 * four + 3 for each of ``four`` (uint32), side by side."""
    word0, word1, word2, word3 = philox(draws[0], four, draws[1], draws[2], draws[3])
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    return tl.reshape(words.to(tl.int32, bitcast=True), (4 * four.shape[0],))


@triton.jit
def amax_across(strip, OF_BITS: tl.constexpr = False):
    """Elementwise largest magnitude of 16 tensors (fp32), NaN if any is NaN, as int32 bits.

    OF_BITS: compare integers, with one instruction more for each element. Beside maxima of floats that keep NaN, Triton
    may miscompile the stores of transposed bytes (its issue 11111).
    """
    if OF_BITS:
        largest = magnitude_bits(strip[0])
        for i in tl.static_range(1, 16):
            largest = tl.maximum(largest, magnitude_bits(strip[i]))
        return largest
    largest = tl.abs(strip[0])
    for i in tl.static_range(1, 16):
        largest = tl.maximum(largest, tl.abs(strip[i]), propagate_nan=tl.PropagateNan.ALL)
    return largest.to(tl.int32, bitcast=True)
