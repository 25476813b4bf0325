"""Four over six inside kernels: the better of two scales for each block, from elements that registers hold.

The choice has the bits of ``reference.cast_four_over_six``, whose errors are rounded at every step and added in the
order of the elements. Divisions and that order are expensive, and hardly ever matter. So there are two ways:

1. For all blocks, errors in units of the block's scale, in any order: 6 instructions for each element and scale.
2. Where two errors are closer than rounding could have moved them: the reference's operations, for a quarter of the
   program's blocks at a time, or for a strip. 3 % of the programs of 64 Gaussian blocks do so ("mse": 1 %). Where no
   block is clear, as where all elements are equal, a cast takes two to three times as many instructions.
"""

import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import rounded_product
from mxtrain.formats.nvfp4 import FOUR_OVER_SIX_RANGE, NVFP4, SCALE_MAX
from mxtrain.formats.nvfp4.arithmetic import magnitude_to_nearest, multiplier, quotient_of, reciprocal, scale_of_block
from mxtrain.formats.nvfp4.strip import joined, repeat_16, separated

_E2M1_MAX, _SCALE_MAX = tl.constexpr(NVFP4.element_max), tl.constexpr(SCALE_MAX)
_FOUR_OVER_SIX = tl.constexpr(FOUR_OVER_SIX_RANGE)
_FP32_MAX = tl.constexpr(2.0**128 - 2.0**104)
# 2^22, whose last place is half, and enough that the difference to a number below 2 has this place too.
_ABOVE = tl.constexpr(2.0**22 + 4)


def registers(blocks: int, warps: int) -> int:
    """Return the most registers per thread for a program of so many blocks. The compiler would take more for way 2."""
    return 96 if blocks <= 64 * warps else 128


@triton.jit
def _nearest_e4m3(x):
    """Nearest E4M3 number to x (fp32), which is in [0, 448], or NaN: as ``magnitude_to_nearest`` for E2M1."""
    power = (tl.maximum(x, 2.0**-6).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.fma(power, -(2.0**20), tl.fma(power, 2.0**20, x))


@triton.jit
def _distance(x, factor, SQUARES: tl.constexpr):
    """Distance of x * factor (fp32) from the nearest E2M1 number, or its square; x * factor is in (-7, 7).

    The last place of ``above`` - |x| * factor is E2M1's step there. With x instead of |x|, the last place of a sum just
    above a power of two would be coarser than that of ``above``.
    """
    size = tl.abs(x)
    above = tl.maximum(size * (factor * _ABOVE), _ABOVE)
    rest = tl.fma(size, -factor, above)
    distance = tl.fma(size, -factor, above - rest)
    return distance * distance if SQUARES else tl.abs(distance)


@triton.jit
def _distances(x, factor, BLOCKS: tl.constexpr, SQUARES: tl.constexpr):
    """Sum of the distances of each block; x, BLOCKS: as for ``scales_of_blocks``."""
    if BLOCKS == "last":
        return tl.sum(_distance(x, factor[:, :, None], SQUARES), 2)
    else:
        columns: tl.constexpr = x[0].shape[0]
        factor = repeat_16(factor, columns) if BLOCKS == "tiles" else factor
        total = _distance(x[0], factor, SQUARES)
        for i in tl.static_range(1, 16):
            total += _distance(x[i], factor, SQUARES)
        return tl.sum(tl.reshape(total, (columns // 16, 16)), 1) if BLOCKS == "tiles" else total


@triton.jit
def _candidate(wanted, inverse):
    """The scale of a block (fp32), and the factor for its elements before rounding, as in the reference."""
    scale = _nearest_e4m3(tl.where(wanted > _SCALE_MAX, _SCALE_MAX, wanted))  # keeps NaN, unlike tl.minimum
    return scale, tl.minimum(tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale * inverse), _FP32_MAX)


@triton.jit
def _by_reference(x, wanted, inverse, amax, SQUARES: tl.constexpr):
    """Scale and factor [N, 1] of blocks x [N, 16], or of tiles x [16, N, 16], as in the reference."""
    best_scale, best_factor, least = wanted, wanted, wanted
    for growth in range(2):  # one copy of the code to compile
        scale, factor = _candidate(wanted * (1.0 + 0.5 * growth), inverse)
        value = magnitude_to_nearest(x * factor) * scale * amax
        # A product in fp64, because divisions branch. The bits are the same: a quotient by 3 * 2^9 is a tie of fp32 and
        # the product exact, or it is farther from every tie than from the product.
        value = (value.to(tl.float64) * tl.full((), 1.0 / _FOUR_OVER_SIX, tl.float64)).to(tl.float32)
        error = value - tl.abs(x)
        errors = separated(rounded_product(error, error) if SQUARES else tl.abs(error), 4)
        loss = errors[0]
        for i in tl.static_range(1, 16):
            loss += errors[i]
        for level in tl.static_range(4 if len(x.shape) == 3 else 0):  # halves of a tile's rows
            loss = tl.sum(tl.reshape(loss, (2, 8 >> level, x.shape[1])), 0)
        loss = tl.reshape(loss, wanted.shape)
        is_better = (growth == 0) | (loss < least)
        best_scale, best_factor = tl.where(is_better, scale, best_scale), tl.where(is_better, factor, best_factor)
        least = tl.where(is_better, loss, least)
    return best_scale, best_factor


@triton.jit
def _quarter(x, i):
    """Quarter i of x [R, K, M]: [R * K / 4, M]"""
    x = tl.reshape(x, (4, x.shape[0] * x.shape[1] // 4, x.shape[2]))
    return tl.sum(tl.where(tl.arange(0, 4)[:, None, None] == i, x, 0), 0)  # exact, because all other terms are zero


@triton.jit
def _second_way(x, wanted, inverse, amax, unclear, scale, factor, BLOCKS: tl.constexpr, SQUARES: tl.constexpr):
    """Scale and factor of each block, by the reference in strips, and in quarters of [R, K] blocks that are unclear."""
    shape: tl.constexpr = wanted.shape
    if BLOCKS != "last":
        x = joined(x)
    if BLOCKS == "tiles":
        x = tl.reshape(tl.trans(x), (16, shape[0], 16))
    if len(shape) == 1:
        scale, factor = _by_reference(x, wanted[:, None], inverse, amax, SQUARES)
    else:
        # One unclear block costs what a quarter does: a thread holds elements of one or two blocks of each quarter.
        quarters: tl.constexpr = (4, shape[0] * shape[1] // 4, 1)
        scale, factor = tl.reshape(scale, quarters), tl.reshape(factor, quarters)
        each = tl.zeros(shape, tl.float32)
        wanted, inverse, amax = wanted[:, :, None], (inverse + each)[:, :, None], (amax + each)[:, :, None]
        for i in range(4):
            if tl.max(_quarter(unclear[:, :, None], i)) > 0:
                some_wanted, some_inverse = _quarter(wanted, i), _quarter(inverse, i)
                found = _by_reference(_quarter(x, i), some_wanted, some_inverse, _quarter(amax, i), SQUARES)
                is_found = tl.arange(0, 4)[:, None, None] == i
                scale, factor = tl.where(is_found, found[0][None], scale), tl.where(is_found, found[1][None], factor)
    return tl.reshape(scale, shape), tl.reshape(factor, shape)


@triton.jit
def scales_of_blocks(x, largest, tensor_scale, BLOCKS: tl.constexpr, ERROR: tl.constexpr):
    """Code (uint8) of each block's scale, the factor (fp32) before rounding, and the factor for the image after it.

    largest: the largest magnitude of each block. tensor_scale: that of the matrix or of its rows, a number or in a
    shape that broadcasts to that of ``largest``.

    ERROR "" is a cast without four over six, and needs no x. With "mae" or "mse", ``tensor_scale`` is a largest
    magnitude, which the image leaves out. BLOCKS: where the 16 elements of a block are in x (fp32). "last": in the last
    of three dimensions. "across": in a tuple of 16 tensors, each of the shape of ``largest``. "tiles": x is a strip,
    and a tile has 16 columns of all its rows.
    """
    if ERROR == "":
        inverse = tl.div_rn(1.0, tensor_scale)
        code, scale = scale_of_block(largest, inverse)
        return code, multiplier(scale, inverse), scale * tensor_scale
    else:
        amax = tensor_scale
        squares: tl.constexpr = ERROR == "mse"
        up = tl.div_rn(_FOUR_OVER_SIX, amax)
        up = tl.where((amax == 0) | (up == 0), 1.0, tl.where(up > _FP32_MAX, _FP32_MAX, up))
        inverse = tl.div_rn(1.0, up)
        wanted = quotient_of(largest, _E2M1_MAX) * up
        six, four = _nearest_e4m3(wanted), _nearest_e4m3(wanted * 1.5)
        six_factor, four_factor = reciprocal(six * inverse), reciprocal(four * inverse)
        loss_of_six = _distances(x, six_factor, BLOCKS, squares) * (six * six if squares else six)
        loss_of_four = _distances(x, four_factor, BLOCKS, squares) * (four * four if squares else four)
        takes_four = loss_of_four < loss_of_six
        scale = tl.where(takes_four, four, six)
        factor = tl.minimum(tl.where(takes_four, four_factor, six_factor), _FP32_MAX)
        # The two ways differ by at most 8 * 2^-24 of each element (9 where tl.fma rounds twice), and by n * 2^-24 of a
        # sum of n errors. For squares, mixed terms are at most the square of the largest element and n times the sum.
        count: tl.constexpr = 256 if BLOCKS == "tiles" else 16
        largest_term = wanted * wanted * (1.25 * 36) if squares else wanted * (1.25 * 6 * count)
        # Outside these bounds, numbers leave fp32's normal range, the scale is above 448, or x * factor leaves (-7, 7).
        lowest: tl.constexpr = 2.0**-30 if squares else 2.0**-100
        highest: tl.constexpr = 2.0**60 if squares else 2.0**100
        share = tl.where((amax > lowest) & (amax < highest), 2.0**-20, _FP32_MAX)
        least = tl.fma(loss_of_six + loss_of_four, count if squares else 4.0, largest_term) * share
        is_clear = (tl.abs(loss_of_six - loss_of_four) > least) & (wanted > 2.5 * 2.0**-9) & (wanted < 288.0)
        unclear = ((largest > 0) & (is_clear == 0)).to(tl.int32)
        if tl.max(unclear) > 0:
            wanted = tl.div_rn(largest, tl.full(largest.shape, _E2M1_MAX, tl.float32)) * up
            scale, factor = _second_way(x, wanted, inverse, amax, unclear, scale, factor, BLOCKS, squares)
        # Times 2^-120, the exponents of E4M3 become those of fp32, and its subnormal numbers fp32 denormals.
        code = (scale * 2.0**-120).to(tl.int32, bitcast=True) >> 20
        return tl.where(scale != scale, 0x7F, code).to(tl.uint8), factor, scale
