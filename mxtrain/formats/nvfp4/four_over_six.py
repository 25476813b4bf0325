"""Four over six inside kernels: the better of two scales for each block, from elements that registers hold.

The choice has the bits of ``reference.cast_four_over_six``, whose errors are rounded at every step and added in the
order of the elements. Divisions and that order are expensive, and hardly ever matter. So errors are computed twice:

1. For all blocks, with one multiply-add in the place of two divisions and two products, in any order: 8 instructions
   for each element and scale, beside the 12 of a plain cast to an image.
2. Where the two errors are closer than rounding could have moved them, as the reference computes them. A program of 128
   Gaussian blocks does so in 3 of 100 cases.
"""

import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import rounded_product
from mxtrain.formats.nvfp4 import FOUR_OVER_SIX_RANGE, NVFP4, SCALE_MAX
from mxtrain.formats.nvfp4.arithmetic import magnitude_to_nearest, multiplier, quotient_of, scale_of_block
from mxtrain.formats.nvfp4.strip import repeat_16
from mxtrain.launch.launch import INTERPRETED

_E2M1_MAX, _SCALE_MAX = tl.constexpr(NVFP4.element_max), tl.constexpr(SCALE_MAX)
_FOUR_OVER_SIX = tl.constexpr(FOUR_OVER_SIX_RANGE)
_INTERPRETED = tl.constexpr(INTERPRETED)
_FP32_MAX = tl.constexpr(2.0**128 - 2.0**104)


@triton.jit
def _at_most(x, most):
    """min(x, most), and NaN for NaN. Not a minimum: see ``amax_across``."""
    return tl.where(x > most, most, x)


@triton.jit
def _nearest_e4m3(x):
    """Nearest E4M3 number to x (fp32), which is in [0, 448], or NaN: as ``magnitude_to_nearest`` for E2M1."""
    power = (tl.maximum(x, 2.0**-6).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.fma(power, -(2.0**20), tl.fma(power, 2.0**20, x))


@triton.jit
def _candidate(wanted, inverse):
    """The scale of a block (fp32), and the factor for its elements before rounding."""
    scale = _nearest_e4m3(_at_most(wanted, _SCALE_MAX))
    return scale, _at_most(tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale * inverse), _FP32_MAX)


@triton.jit
def _errors(x, scale, factor, amax, SQUARES: tl.constexpr, EXACT: tl.constexpr):
    """Magnitude or square of the error of each element x (fp32) under the scale of its block."""
    value = magnitude_to_nearest(x * factor)
    if EXACT:
        error = quotient_of(value * scale * amax, _FOUR_OVER_SIX) - tl.abs(x)
    else:
        error = tl.fma(value, scale * (amax * (1.0 / _FOUR_OVER_SIX)), -tl.abs(x))
    if SQUARES:
        return rounded_product(error, error)
    return tl.abs(error)


@triton.jit
def _sum(x, EXACT: tl.constexpr):
    """Sum over the last dimension, of 16; EXACT: in order. A sum of one number and zeros is exact in any order."""
    axis: tl.constexpr = len(x.shape) - 1
    if EXACT:
        place = tl.reshape(tl.arange(0, 16), (1, 16) if axis == 1 else (1, 1, 16))
        total = tl.sum(tl.where(place == 0, x, 0.0), axis)
        for i in tl.static_range(1, 16):
            total += tl.sum(tl.where(place == i, x, 0.0), axis)
        return total
    else:
        return tl.sum(x, axis)


@triton.jit
def _loss(x, scale, factor, amax, BLOCKS: tl.constexpr, SQUARES: tl.constexpr, EXACT: tl.constexpr):
    """What each block loses; x, BLOCKS: as for ``_four_over_six``."""
    if BLOCKS == "last":
        axis: tl.constexpr = len(x.shape) - 1
        amax = tl.expand_dims(amax + tl.zeros(scale.shape, tl.float32), axis)
        of_elements = _errors(x, tl.expand_dims(scale, axis), tl.expand_dims(factor, axis), amax, SQUARES, EXACT)
        return _sum(of_elements, EXACT)
    elif BLOCKS == "across":
        total = _errors(x[0], scale, factor, amax, SQUARES, EXACT)
        for i in tl.static_range(1, 16):
            total += _errors(x[i], scale, factor, amax, SQUARES, EXACT)
        return total
    else:
        columns: tl.constexpr = x[0].shape[0]
        scale, factor, rows = repeat_16(scale, columns), repeat_16(factor, columns), ()
        for i in tl.static_range(16):
            of_row = _errors(x[i], scale, factor, amax, SQUARES, EXACT)
            rows = rows + (_sum(tl.reshape(of_row, (columns // 16, 16)), EXACT),)
        for level in tl.static_range(4):
            halves = ()
            for i in tl.static_range(8 >> level):
                halves = halves + (rows[i] + rows[i + (8 >> level)],)
            rows = halves
        return rows[0]


@triton.jit
def _unseen(x):
    """x (fp32), as a value that the compiler cannot trace back to x."""
    if _INTERPRETED:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], tl.float32, is_pure=False, pack=1)


@triton.jit
def scales_of_blocks(x, largest, tensor_scale, BLOCKS: tl.constexpr, ERROR: tl.constexpr):
    """Code (uint8) of each block's scale, the factor (fp32) before rounding, and the factor for the image after it.

    ERROR "" is a cast without four over six. With an error, ``tensor_scale`` is a largest magnitude, which the image
    leaves out. Other arguments as for ``_four_over_six``.
    """
    if ERROR != "":
        code, scale, factor = _four_over_six(x, largest, tensor_scale, BLOCKS, ERROR)
    else:
        inverse = tl.div_rn(1.0, tensor_scale)
        code, scale = scale_of_block(largest, inverse)
        factor = multiplier(scale, inverse)
        scale *= tensor_scale
    return code, factor, scale


@triton.jit
def _four_over_six(x, largest, amax, BLOCKS: tl.constexpr, ERROR: tl.constexpr):
    """Choose the scale of each block: code (uint8), value (fp32), and the factor for elements before rounding.

    largest: the largest magnitude of each block. amax: that of the matrix or of its rows, a number or in a shape that
    broadcasts to that of ``largest``. ERROR: "mae" or "mse".

    BLOCKS: where the 16 elements of a block are in x (fp32). "last": in the last dimension. "across": in a tuple of 16
    tensors, each of the shape of ``largest``. "tiles": x is a strip, and a tile has 16 columns of all its rows.
    """
    up = _at_most(tl.div_rn(_FOUR_OVER_SIX, amax), _FP32_MAX)
    up = tl.where((amax == 0) | (up == 0), 1.0, up)
    inverse = tl.div_rn(1.0, up)
    wanted = quotient_of(largest, _E2M1_MAX) * up
    six, six_factor = _candidate(wanted, inverse)
    four, four_factor = _candidate(wanted * 1.5, inverse)
    squares: tl.constexpr = ERROR == "mse"
    loss_of_six = _loss(x, six, six_factor, amax, BLOCKS, squares, False)
    loss_of_four = _loss(x, four, four_factor, amax, BLOCKS, squares, False)
    # Each decoded value is off by at most 5 * 2^-24 of itself, and a sum of n errors by n * 2^-24 of itself. For
    # squares, the mixed terms are at most the square of ``largest`` and the sum.
    count: tl.constexpr = 256 if BLOCKS == "tiles" else 16
    size = largest * largest * (1.0 / count) if squares else largest
    # In other matrices, products overflow or lose bits.
    share = tl.where(amax > 2.0**-40, tl.where(amax < 2.0**60, count * 2.0**-20, _FP32_MAX), _FP32_MAX)
    is_clear = tl.abs(loss_of_six - loss_of_four) > (size + loss_of_six + loss_of_four) * share
    if tl.max(tl.where(is_clear, 0, (largest > 0).to(tl.int32))) > 0:
        loss_of_six = _loss(x, six, _unseen(six_factor), amax, BLOCKS, squares, True)
        loss_of_four = _loss(x, four, _unseen(four_factor), amax, BLOCKS, squares, True)
    takes_four = loss_of_four < loss_of_six
    scale = tl.where(takes_four, four, six)
    # Times 2^-120, the exponents of E4M3 become those of fp32, and its subnormal numbers fp32 denormals.
    code = (scale * 2.0**-120).to(tl.int32, bitcast=True) >> 20
    return tl.where(scale != scale, 0x7F, code).to(tl.uint8), scale, tl.where(takes_four, four_factor, six_factor)
