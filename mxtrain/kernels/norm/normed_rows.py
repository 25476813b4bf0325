"""What the casts of normalized rows share, MXFP8's and NVFP4's: tiles of rows, how they are loaded, and their RMS.

A row is held in registers, or read twice if it is too long for that, the second time mostly from the L2 cache.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mxtrain.kernels.checks import check_matrix, check_same
from mxtrain.kernels.mxfp8.arithmetic import BLOCK, magnitude_bits, rounded_amax

# The longest row that is held in registers, and the longest there is.
MAX_PERSISTENT_COLUMNS = 16384
MAX_COLUMNS = 65536


@triton.jit
def tile(
    row, rows, first_block, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    FIRST: tl.constexpr = 0, COUNT: tl.constexpr = None,
):  # fmt: skip
    """Where BLOCKS blocks of these rows lie: block [K], offsets [R, K, B], and masks of [R, K] and [R, K, B].

    FIRST, COUNT: the same for a part of each block, of so many elements.
    """
    block = first_block + tl.arange(0, BLOCKS)
    element = FIRST + tl.arange(0, BLOCK if COUNT is None else COUNT)
    offsets = (row * (blocks * BLOCK))[:, None, None] + (block * BLOCK)[None, :, None] + element[None, None, :]
    block_mask = (row < rows)[:, None] & (block < blocks)[None, :]
    return block, offsets, block_mask, block_mask[:, :, None] & (element >= 0)[None, None, :]


@triton.jit
def load_rows(x_ptr, residual_ptr, total_ptr, offsets, mask, RESIDUAL: tl.constexpr, STORE: tl.constexpr):
    """x, or x + residual rounded to the dtype of x and stored: what is stored is what is normalized."""
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        total = x.to(x_ptr.dtype.element_ty)
        if STORE:
            tl.store(total_ptr + offsets, total, mask=mask)
        x = total.to(tl.float32)
    return x


@triton.jit
def row_sum(x, amax, P: tl.constexpr, ESTIMATOR: tl.constexpr, RCEIL: tl.constexpr, EIGHTS: tl.constexpr = 0):
    """What the estimate sums over a row, x^2, m or m^2, or a part of it, in fp64.  x [R, K, B], amax [R, K] -> [R]

    There is one number a block to add: fp64 costs nothing, and rho does not depend on the order of the sum. With EIGHTS
    x is a tuple of so many tuples of eight tensors [R, K], and their squares are added up in that order.
    """
    if ESTIMATOR == "exact":
        # In fp32, squares of large and small numbers do not fit: a power of two brings the block's maximum near 1.
        exponent = tl.minimum(tl.maximum(magnitude_bits(amax) >> 23, 1), 253)
        down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        up = (exponent << 23).to(tl.float32, bitcast=True).to(tl.float64)
        if EIGHTS:
            squares = tl.zeros(amax.shape, tl.float32)
            for i in tl.static_range(EIGHTS):
                eight = tl.zeros(amax.shape, tl.float32)
                for j in tl.static_range(8):
                    scaled = x[i][j] * down
                    eight += scaled * scaled
                squares += eight
        else:
            scaled = x * down[:, :, None]
            squares = tl.sum(scaled * scaled, 2)
        terms = squares.to(tl.float64) * (up * up)
    else:
        if ESTIMATOR == "post_round":
            amax = rounded_amax(amax, RCEIL)
        terms = amax.to(tl.float64)
        if P == 2:
            terms *= terms
    return tl.sum(terms, 1)


@triton.jit
def inverse_rms(row_sum, eps, FACTOR: tl.constexpr, P: tl.constexpr, ESTIMATOR: tl.constexpr):
    """rho = 1 / sqrt(r^2 + eps) in fp32, from the sum of a row; FACTOR makes a mean of it and divides by c."""
    mean_square = row_sum * FACTOR
    if P == 1 and ESTIMATOR != "exact":
        mean_square *= mean_square
    return (1.0 / tl.sqrt(mean_square + eps)).to(tl.float32)


def tile_shape(columns: int, three_quarters: bool = False) -> tuple[bool, int, int, int, int]:
    """(persistent, rows of a program, blocks of a tile, of its tail, warps) for rows this long, by measurement.

    Blocks are those of MXFP8. Of shorter ones a tile has as many more. ``three_quarters``: 4096 elements and more may
    have half as many behind them; a whole tile is faster for most, 45 against 49 us at 8192 x 6144 (H200).
    """
    blocks = columns // BLOCK
    if columns > MAX_PERSISTENT_COLUMNS:
        return False, 1, 256, 0, 8
    tile = triton.next_power_of_2(blocks)
    rows = max(1, 64 // tile)
    if tile > blocks:
        half = tile // 2
        tail = triton.next_power_of_2(blocks - half)
        warps = 1 if half <= 128 else half // 64
        if tail < (half if half < 128 or three_quarters else half // 2):
            return True, rows, half, tail, warps
    return True, rows, tile, 0, 8 if tile > 256 else max(1, min(4, tile // 32))


def mean_factor(columns: int, estimator: str, p: int, constant: float, block: int) -> float:
    """What the sum over a row is multiplied by to be r^2, or for p = 1 to be r."""
    if estimator == "exact":
        return 1.0 / columns
    return 1.0 / (columns // block * constant**p)


class MXNormCast(NamedTuple):
    """Result of ``mxnorm_cast`` and ``nvfp4_norm``: the cast's data and scales (None for an image), rho, and
    x + residual if asked for."""

    data: torch.Tensor
    scales: torch.Tensor | None
    rho: torch.Tensor
    total: torch.Tensor | None


def check_rows(x: torch.Tensor, residual: torch.Tensor | None, block: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The two, contiguous; ValueError unless kernels can read them, in whole blocks."""
    check_matrix("x", x)
    if not 0 < x.shape[1] <= MAX_COLUMNS or x.shape[1] % block:
        raise ValueError(f"x {tuple(x.shape)}: expected rows of a multiple of {block} elements, {MAX_COLUMNS} at most")
    if residual is None:
        return x.contiguous(), None
    check_matrix("residual", residual)
    check_same("residual", residual, "x", x)
    return x.contiguous(), residual.contiguous()


def as_cast(results: list[torch.Tensor], form: str, has_residual: bool) -> MXNormCast:
    """What an op returns, without what there is none of, by name."""
    data, *scales = results[: 1 if form == "image" else 2]
    rho = results[1 + len(scales)]
    return MXNormCast(data, *(scales or [None]), rho, results[-1] if has_residual else None)
