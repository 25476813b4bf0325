"""NVFP4 inside kernels: E4M3 block scales, E2M1 rounding to nearest and stochastic, packing, the Hadamard transform.

Every function gives the bits of ``mxtrain.reference.nvfp4`` and ``mxtrain.reference.hadamard`` for any tensor scale,
special values included; only the codes of a block whose scale is NaN mean nothing, as there. Easy to simplify wrongly:

* Divisions are ``tl.div_rn``: Triton's ``/`` is approximate on a GPU.
* Kernels that transform are launched with ``enable_fp_fusion=False``: the first sums of the transform would otherwise
  be fused with the products before them, which are to be rounded where they are denormal numbers.
"""

import torch
import triton
import triton.language as tl

from mxtrain.formats import NVFP4, NVFP4_SCALE_MAX, NVFP4_SCALE_MIN
from mxtrain.kernels.mx import magnitude_bits
from mxtrain.kernels.runtime import INTERPRETED, _capability, cdiv, scales_shape

BLOCK = NVFP4.block_size

_E2M1_MAX = tl.constexpr(NVFP4.element_max)
_SCALE_MAX = tl.constexpr(NVFP4_SCALE_MAX)
_SCALE_MIN = tl.constexpr(NVFP4_SCALE_MIN)


@triton.jit
def scale_of_block(amax, tensor_scale):
    """Code (uint8) and value (fp32) of the E4M3 scale for blocks whose largest magnitude is ``amax`` (fp32).

    ``tensor_scale`` is an fp32 scalar. The clamped scale is a normal number of E4M3, so that it is rounded by its bits,
    on any device.
    """
    wanted = tl.div_rn(amax, tl.full(amax.shape, _E2M1_MAX, tl.float32))
    wanted = tl.div_rn(wanted, tl.zeros(amax.shape, tl.float32) + tensor_scale)
    # A NaN is neither.
    wanted = tl.where(wanted > _SCALE_MAX, _SCALE_MAX, wanted)
    wanted = tl.where(wanted < _SCALE_MIN, _SCALE_MIN, wanted)
    bits = wanted.to(tl.int32, bitcast=True)
    bits = (bits + (0x7FFFF + ((bits >> 20) & 1))) & -0x100000
    is_nan = wanted != wanted
    # Exponents are biased by 127 there and by 7 here, and followed by 3 bits.
    code = tl.where(is_nan, 0x7F, (bits >> 20) - (120 << 3))
    bits = tl.where(is_nan, 0x7FC00000, bits)
    return code.to(tl.uint8), bits.to(tl.float32, bitcast=True)


@triton.jit
def multiplier(scale, tensor_scale):
    """What elements are multiplied by before they are rounded (fp32)."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.zeros(scale.shape, tl.float32) + tensor_scale)
    return tl.div_rn(inverse, scale)


@triton.jit
def _binade(y):
    """|y| (fp32) saturated at 6, and the biased exponent that the distance of its neighbours in E2M1 goes by."""
    bits = magnitude_bits(y)
    size = bits.to(tl.float32, bitcast=True)
    # 0.5 apart below 2, 1 below 4, then 2.
    exponent = tl.minimum(tl.maximum(bits >> 23, 127), 129)
    return tl.where(size > _E2M1_MAX, _E2M1_MAX, size), exponent


@triton.jit
def _with_sign(size, y):
    sign = y.to(tl.int32, bitcast=True) & -2147483648
    return (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def round_to_nearest(y):
    """The nearest E2M1 value to y (fp32), ties to even, saturating at 6. NaN stays NaN.

    Adding a number whose last place is E2M1's step at y, and taking it off again, rounds to that step.
    """
    size, exponent = _binade(y)
    magic = ((exponent + 22) << 23).to(tl.float32, bitcast=True)
    return _with_sign((size + magic) - magic, y)


@triton.jit
def round_stochastically(y, random):
    """One of the two E2M1 values around y (fp32) by uniform ``random`` (uint32), saturating at 6.

    The fraction of the way to the larger magnitude, in units of 2^-32 and cut off, plus ``random``: where the sum
    overflows 32 bits, the larger is taken.
    """
    size, exponent = _binade(y)
    steps = size * ((255 - exponent) << 23).to(tl.float32, bitcast=True)
    # Of positive numbers, and not tl.floor, which flushes denormal ones.
    whole = steps.to(tl.int32)
    fraction = ((steps - whole.to(tl.float32)) * 4294967296.0).to(tl.uint32)
    whole = tl.where(fraction + random < fraction, whole + 1, whole)
    return _with_sign(whole.to(tl.float32) * ((exponent - 1) << 23).to(tl.float32, bitcast=True), y)


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
    return pack(round_to_nearest(first), round_to_nearest(second))


@triton.jit
def image_of(value, scale, tensor_scale):
    """An E2M1 value times its block's scale and the tensor scale: exact in bf16 if that is a power of two."""
    return ((value * scale) * tensor_scale).to(tl.bfloat16)


@triton.jit
def random_words(key, row, first_four, columns, step, rank, microbatch, FOURS: tl.constexpr):
    """uint32 [4 * FOURS]: the bits of consecutive elements of one row, by the rule of ``reference.philox``.

    ``row`` is int64; ``columns`` is a multiple of 4.
    """
    c0 = (row * (columns // 4) + (first_four + tl.arange(0, FOURS))).to(tl.uint32)
    word0, word1, word2, word3 = tl.philox(key, c0, microbatch, step, rank)
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    return tl.reshape(words.to(tl.uint32), (4 * FOURS,))


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
    largest = magnitude_bits(strip[0])
    for i in tl.static_range(1, 16):
        largest = tl.maximum(largest, magnitude_bits(strip[i]))
    return largest


def converts_fp4(x: torch.Tensor) -> bool:
    """Whether the device of ``x`` rounds to E2M1 by an instruction of its own (compute capability 10.0 and up)."""
    return x.is_cuda and not INTERPRETED and _capability(x.device.index) >= (10, 0)


def check_number(name: str, number: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless ``number`` is a tensor of one number of this dtype, on ``device``."""
    if number.numel() != 1 or number.dtype != dtype or number.device != device:
        found = f"{tuple(number.shape)} of {number.dtype} on {number.device}"
        raise ValueError(f"{name} {found}: expected one number of {dtype} on {device}")


def empty_cast(rows: int, columns: int, form: str, device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Uninitialised results of a cast of [rows, columns] along columns: codes and scales, or image and None."""
    if form == "image":
        return torch.empty(rows, columns, dtype=torch.bfloat16, device=device), None
    blocks = columns // BLOCK
    shape = scales_shape(rows, blocks, form)
    # The tensor cores read the padding of the blocked layout, so it must not hold NaN.
    padded = form == "blocked" and shape[0] != rows * blocks
    allocate = torch.zeros if padded else torch.empty
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
    return codes, allocate(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)


def padded(rows: int) -> int:
    """Rows in whole blocks along them."""
    return cdiv(rows, BLOCK) * BLOCK
