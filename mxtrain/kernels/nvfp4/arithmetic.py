"""NVFP4 inside kernels: E4M3 block scales, E2M1 rounding to nearest and stochastic, packing, the Hadamard transform.

Every function gives the bits of ``mxtrain.reference.nvfp4`` and ``mxtrain.reference.hadamard`` for tensor scales that
are powers of two (or infinite or NaN, as those of a tensor that holds such a number), special values included; only
the codes of a block whose scale is NaN mean nothing, as there. On GPUs without instructions for E2M1 these casts would
be bound by arithmetic, so it is kept short. Easy to simplify wrongly:

* Quotients are rounded properly: Triton's ``/`` is approximate on a GPU.
* Kernels that transform are launched with ``enable_fp_fusion=False``: the first sums of the transform would otherwise
  be fused with the products before them, which are to be rounded where they are denormal numbers.
"""

import triton
import triton.language as tl

from mxtrain.kernels.device import INTERPRETED
from mxtrain.recipes.formats import NVFP4, NVFP4_SCALE_MAX, NVFP4_SCALE_MIN

BLOCK = NVFP4.block_size

_E2M1_MAX = tl.constexpr(NVFP4.element_max)
_SCALE_MAX = tl.constexpr(NVFP4_SCALE_MAX)
_SCALE_MIN = tl.constexpr(NVFP4_SCALE_MIN)
_INTERPRETED = tl.constexpr(INTERPRETED)
# The bits of 1.5 * 2^23, and what is left in an int32 of eight of them, each shifted by four bits more than the last.
_ABOVE_CODE = 0x4B400000
_ABOVE_CODES = tl.constexpr(sum(_ABOVE_CODE << (4 * i) for i in range(8)) & 0x7FFFFFFF)


@triton.jit
def inverse_of(tensor_scale):
    """1 / tensor_scale, an fp32 scalar: exact."""
    return tl.div_rn(1.0, tensor_scale)


@triton.jit
def _sixth(x):
    """x / 6, rounded once. x (fp32) is neither tiny nor huge."""
    if _INTERPRETED:  # whose tl.fma rounds twice
        return tl.div_rn(x, tl.full(x.shape, 6.0, tl.float32))
    # With the rounded inverse of the divisor, one correction is enough (Markstein, "Computation of elementary functions
    # on the IBM RISC System/6000 processor", 1990).
    quotient = x * (1.0 / 6.0)
    return tl.fma(tl.fma(quotient, -6.0, x), 1.0 / 6.0, quotient)


@triton.jit
def _reciprocal(scale):
    """1 / scale, rounded once, of E4M3 scales (fp32); tested for each of them."""
    if _INTERPRETED:
        return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], tl.float32, is_pure=True, pack=1)
    return tl.fma(tl.fma(inverse, -scale, 1.0), inverse, inverse)


@triton.jit
def scale_of_block(amax, inverse):
    """Code (uint8) and value (fp32) of the E4M3 scale for blocks whose largest magnitude is ``amax`` (fp32).

    ``inverse`` is ``inverse_of`` the tensor scale. The clamped scale is a normal number of E4M3, so that it is rounded
    by its bits, on any device.
    """
    wanted = amax * inverse
    is_nan = wanted != wanted
    wanted = _sixth(tl.minimum(tl.maximum(wanted, _E2M1_MAX * _SCALE_MIN), _E2M1_MAX * _SCALE_MAX))
    bits = wanted.to(tl.int32, bitcast=True)
    bits = (bits + (0x7FFFF + ((bits >> 20) & 1))) & -0x100000
    # Exponents are biased by 127 there and by 7 here, and followed by 3 bits.
    code = tl.where(is_nan, 0x7F, (bits >> 20) - (120 << 3))
    bits = tl.where(is_nan, 0x7FC00000, bits)
    return code.to(tl.uint8), bits.to(tl.float32, bitcast=True)


@triton.jit
def multiplier(scale, inverse):
    """What elements are multiplied by before they are rounded (fp32)."""
    return _reciprocal(scale) * inverse


@triton.jit
def _binade(y):
    """|y| (fp32) saturated at 6, and twice the distance of its neighbours in E2M1: 1 below 2, 2 below 4, then 4."""
    size = tl.minimum(tl.abs(y), _E2M1_MAX)
    bits = tl.maximum(size, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
    return size, bits.to(tl.float32, bitcast=True)


@triton.jit
def _with_sign(size, y):
    sign = y.to(tl.int32, bitcast=True) & -2147483648
    return (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def round_to_nearest(y):
    """The nearest E2M1 value to y (fp32), ties to even, saturating at 6.

    Adding a number whose last place is E2M1's step at y, and taking it off again, rounds to that step.
    """
    size, power = _binade(y)
    return _with_sign(tl.fma(power, -(2.0**22), tl.fma(power, 2.0**22, size)), y)


@triton.jit
def round_stochastically(y, random):
    """One of the two E2M1 values around y (fp32) by uniform ``random`` (int32, 0 to 2^16 - 1), saturating at 6.

    The same sum rounds to 2^-16 of E2M1's step; ``random`` is added there, and the fraction cut off.
    """
    size, power = _binade(y)
    steps = (tl.fma(power, 64.0, size).to(tl.int32, bitcast=True) + random) & -65536
    return _with_sign(tl.fma(power, -64.0, steps.to(tl.float32, bitcast=True)), y)


@triton.jit
def element_code(value):
    """The code (int32, 0 to 15) of an E2M1 value (fp32)."""
    # Scaled by 2^-126 the exponents of E2M1 become those of fp32, its subnormal number fp32's denormal one.
    bits = (value * 2.0**-126).to(tl.int32, bitcast=True)
    return ((bits >> 22) & 7) | ((bits >> 28) & 8)


@triton.jit
def pack(first, second):
    """Two E2M1 values (fp32) as one byte."""
    return (element_code(first) | (element_code(second) << 4)).to(tl.uint8)


@triton.jit
def _part(size, offset):
    """size / 2 + offset, cut off below 0 and above 1 (fp32)."""
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
    """The code of the nearest E2M1 value to ``size`` >= 0 (fp32), in an int32 that is larger by _ABOVE_CODE.

    Between its values the code rises by 4 from 0 to 2, by 2 from 2 to 4, by 1 from 4 to 6. Only one of the parts is
    neither at its start nor at its end, so only its sum is rounded, to an integer. All of it runs where fp32 does: the
    GPU's pipe for integers is the narrower one.
    """
    total = tl.fma(_part(size, 0.0), 4.0, 1.5 * 2.0**23)
    total = tl.fma(_part(size, -1.0), 2.0, total)
    return (total + _part(size, -2.0)).to(tl.int32, bitcast=True)


@triton.jit
def pack_nearest(first, second, HARDWARE: tl.constexpr):
    """Two numbers (fp32) rounded to nearest, as one byte; HARDWARE: by the GPU's own conversion."""
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
def eighths(x):
    """[R, C, 8] -> a tuple of eight tensors of [R, C], in order"""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], 2, 2, 2)))
    zero, two = tl.split(even)
    one, three = tl.split(odd)
    parts = (tl.split(zero), tl.split(one), tl.split(two), tl.split(three))
    return (
        parts[0][0], parts[1][0], parts[2][0], parts[3][0], parts[0][1], parts[1][1], parts[2][1], parts[3][1]
    )  # fmt: skip


@triton.jit
def pack_nearest_words(eight, rho, factor, HARDWARE: tl.constexpr):
    """x * rho * factor of a tuple of eight tensors x (fp32), rounded to nearest, as one int32."""
    if HARDWARE:
        word = pack_nearest(eight[0] * rho * factor, eight[1] * rho * factor, True).to(tl.int32)
        for i in tl.static_range(1, 4):
            pair = pack_nearest(eight[2 * i] * rho * factor, eight[2 * i + 1] * rho * factor, True)
            word |= pair.to(tl.int32) << (8 * i)
        return word
    codes = _nearest_code(tl.abs(eight[7]) * rho * factor)
    signs = eight[7].to(tl.int32, bitcast=True) >> 28
    for i in tl.static_range(1, 8):
        codes = codes * 16 + _nearest_code(tl.abs(eight[7 - i]) * rho * factor)
        # The sign and three bits that are cut off below.
        signs = (signs << 4) | (eight[7 - i].to(tl.uint32, bitcast=True) >> 28).to(tl.int32)
    # What is above the codes adds up to the same number always.
    return (codes - _ABOVE_CODES) | (signs & -0x77777778)


@triton.jit
def image_of(value, scale, tensor_scale):
    """An E2M1 value times its block's scale and the tensor scale: exact in bf16."""
    return (value * (scale * tensor_scale)).to(tl.bfloat16)


@triton.jit
def random_words(draws_ptr, row, first_four, columns, FOURS: tl.constexpr):
    """int32 [4 * FOURS]: the words of consecutive elements of one row, by the rule of ``reference.philox``.

    ``row`` is int64; ``columns`` is a multiple of 4. Key, step, microbatch and rank lie at ``draws_ptr``.
    """
    key = tl.load(draws_ptr)
    step = tl.load(draws_ptr + 1).to(tl.uint32)
    microbatch = tl.load(draws_ptr + 2).to(tl.uint32)
    rank = tl.load(draws_ptr + 3).to(tl.uint32)
    c0 = (row * (columns // 4) + (first_four + tl.arange(0, FOURS))).to(tl.uint32)
    word0, word1, word2, word3 = tl.philox(key, c0, microbatch, step, rank)
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    return tl.reshape(words.to(tl.int32, bitcast=True), (4 * FOURS,))


@triton.jit
def length_of(row, rows, columns):
    """Columns that a row has, none if there is no such row."""
    # Not the mask of columns and a scalar mask of the row, which Triton 3.9's interpreter cannot combine.
    return tl.where(row < rows, columns, 0)


@triton.jit
def load_strip(
    x_ptr, row_factor_ptr, column_factor_ptr, first_row, column, rows, columns,
    ROW_FACTOR: tl.constexpr, COLUMN_FACTOR: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sixteen rows of x, times the factors, in fp32: a tuple of 16 tensors of [COLUMNS], zero where there is no x.

    As tensors of their own, a thread has the same columns of all of them: whole blocks of 16 rows, in registers.
    """
    across = column + tl.arange(0, COLUMNS)
    if COLUMN_FACTOR:
        column_factor = tl.load(column_factor_ptr + across, mask=across < columns, other=0.0).to(tl.float32)
    strip = ()
    for i in tl.static_range(16):
        row = first_row + i
        mask = across < length_of(row, rows, columns)
        x = tl.load(x_ptr + row * columns + across, mask=mask, other=0.0).to(tl.float32)
        if ROW_FACTOR:
            x *= tl.load(row_factor_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
        if COLUMN_FACTOR:
            x *= column_factor
        if ROW_FACTOR or COLUMN_FACTOR:
            # What fills up the last block must not become a negative zero, or NaN.
            x = tl.where(mask, x, 0.0)
        strip = strip + (x,)
    return strip


@triton.jit
def hadamard(strip, signs):
    """The random Hadamard transform across a tuple of 16 tensors (fp32). Bit i of ``signs`` makes sign i -1."""
    now = ()
    for i in tl.static_range(16):
        now = now + (strip[i] * tl.where((signs >> i) & 1 != 0, -0.0625, 0.0625),)
    for level in tl.static_range(4):
        then = ()
        for i in tl.static_range(16):
            if i & (1 << level):
                then = then + (now[i - (1 << level)] - now[i],)
            else:
                then = then + (now[i] + now[i + (1 << level)],)
        now = then
    result = ()
    for i in tl.static_range(16):
        result = result + (now[i] * 4.0,)
    return result


@triton.jit
def amax_across(strip):
    """Largest magnitude of each column of a tuple of 16 tensors (fp32), NaN if any is NaN, as int32 bits."""
    largest = tl.abs(strip[0])
    for i in tl.static_range(1, 16):
        largest = tl.maximum(largest, tl.abs(strip[i]), propagate_nan=tl.PropagateNan.ALL)
    return largest.to(tl.int32, bitcast=True)
