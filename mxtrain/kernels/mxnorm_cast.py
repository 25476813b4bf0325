"""MXNorm of every row and its MXFP8 cast: one read of x, one write of the result.

The block maxima that the scales need also give the RMS estimate, so a row is normalized and cast while it is held in
registers. A row too long for that is read twice, the second time mostly from the L2 cache.

Bytes: 2 or 4 D read a row; D + D/32 + 4 (codes, scales, rho) or 2 D + 4 (image) written.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mxtrain.errors import require_one_of
from mxtrain.kernels.mx import (
    block_amax,
    blocked_offset,
    e4m3_codes,
    e4m3_image,
    magnitude_bits,
    multiplier,
    rounded_amax,
    scale_code,
    scale_value,
)
from mxtrain.kernels.runtime import (
    BLOCK,
    FORMS,
    Launch,
    as_bytes,
    check_matrix,
    check_mxfp8,
    check_same,
    converts_fp8,
    empty_cast,
    register_op,
)
from mxtrain.recipe import Recipe, RMSEstimate

# The longest row that is held in registers, and the longest there is.
MAX_PERSISTENT_COLUMNS = 16384
MAX_COLUMNS = 65536


@triton.jit
def _tile(row, rows, first_block, blocks, BLOCKS: tl.constexpr):
    """Where BLOCKS blocks of these rows lie: block [K], offsets [R, K, 32], and masks of [R, K] and [R, K, 32]."""
    block = first_block + tl.arange(0, BLOCKS)
    element = tl.arange(0, 32)
    offsets = (row * (blocks * 32))[:, None, None] + (block * 32)[None, :, None] + element[None, None, :]
    block_mask = (row < rows)[:, None] & (block < blocks)[None, :]
    return block, offsets, block_mask, block_mask[:, :, None] & (element >= 0)[None, None, :]


@triton.jit
def _load(x_ptr, residual_ptr, total_ptr, offsets, mask, RESIDUAL: tl.constexpr, STORE: tl.constexpr):
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
def _row_sum(x, amax, P: tl.constexpr, ESTIMATOR: tl.constexpr, RCEIL: tl.constexpr):
    """What the estimate sums over a row, x^2, m or m^2, or a part of it, in fp64.  x [R, K, 32], amax [R, K] -> [R]

    There is one number a block to add: fp64 costs nothing, and rho does not depend on the order of the sum.
    """
    if ESTIMATOR == "exact":
        # In fp32, squares of large and small numbers do not fit: a power of two brings the block's maximum near 1.
        exponent = tl.minimum(tl.maximum(magnitude_bits(amax) >> 23, 1), 253)
        down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        up = (exponent << 23).to(tl.float32, bitcast=True).to(tl.float64)
        scaled = x * down[:, :, None]
        terms = tl.sum(scaled * scaled, 2).to(tl.float64) * (up * up)
    else:
        if ESTIMATOR == "post_round":
            amax = rounded_amax(amax, RCEIL)
        terms = amax.to(tl.float64)
        if P == 2:
            terms *= terms
    return tl.sum(terms, 1)


@triton.jit
def _inverse_rms(row_sum, eps, FACTOR: tl.constexpr, P: tl.constexpr, ESTIMATOR: tl.constexpr):
    """rho = 1 / sqrt(r^2 + eps) in fp32, from the sum of a row; FACTOR makes a mean of it and divides by c."""
    mean_square = row_sum * FACTOR
    if P == 1 and ESTIMATOR != "exact":
        mean_square *= mean_square
    return (1.0 / tl.sqrt(mean_square + eps)).to(tl.float32)


@triton.jit
def _store_cast(
    x, amax, rho, row, block, offsets, mask, block_mask, blocks, data_ptr, scales_ptr,
    FORM: tl.constexpr, RCEIL: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Cast x * rho and store it.  x, offsets, mask [rows, blocks, 32]; amax, block_mask [rows, blocks]; rho [rows]"""
    # fp32 multiplication is monotonic: this is the largest |x * rho| of the block, exactly.
    code = scale_code(amax * rho[:, None], RCEIL)
    y = x * rho[:, None, None] * multiplier(code, RCEIL)[:, :, None]
    if FORM == "image":
        tl.store(data_ptr + offsets, e4m3_image(y, scale_value(code)[:, :, None], HARDWARE), mask=mask)
    else:
        tl.store(data_ptr + offsets, e4m3_codes(y, HARDWARE), mask=mask)
        if FORM == "blocked":
            scale_offsets = blocked_offset(row[:, None], block[None, :], blocks)
        else:
            scale_offsets = row[:, None] * blocks + block[None, :]
        tl.store(scales_ptr + scale_offsets, code.to(tl.uint8), mask=block_mask)


@triton.jit
def _mxnorm_cast_kernel(
    x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps,
    FACTOR: tl.constexpr, P: tl.constexpr, ESTIMATOR: tl.constexpr, RCEIL: tl.constexpr, FORM: tl.constexpr,
    RESIDUAL: tl.constexpr, HARDWARE: tl.constexpr, PERSISTENT: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    if PERSISTENT:
        # Tensors in a kernel have powers of two elements: a row of 24 blocks is a tile of 16 and a tail of 8.
        block, offsets, block_mask, mask = _tile(row, rows, 0, blocks, BLOCKS)
        x = _load(x_ptr, residual_ptr, total_ptr, offsets, mask, RESIDUAL, True)
        amax = block_amax(x, 2)
        row_sum = _row_sum(x, amax, P, ESTIMATOR, RCEIL)
        if TAIL:
            block2, offsets2, block_mask2, mask2 = _tile(row, rows, BLOCKS, blocks, TAIL)
            x2 = _load(x_ptr, residual_ptr, total_ptr, offsets2, mask2, RESIDUAL, True)
            amax2 = block_amax(x2, 2)
            row_sum += _row_sum(x2, amax2, P, ESTIMATOR, RCEIL)
        rho = _inverse_rms(row_sum, eps, FACTOR, P, ESTIMATOR)
        _store_cast(
            x, amax, rho, row, block, offsets, mask, block_mask, blocks, data_ptr, scales_ptr, FORM, RCEIL, HARDWARE
        )
        if TAIL:
            _store_cast(
                x2, amax2, rho, row, block2, offsets2, mask2, block_mask2, blocks, data_ptr, scales_ptr,
                FORM, RCEIL, HARDWARE,
            )  # fmt: skip
    else:
        row_sum = tl.zeros((ROWS,), tl.float64)
        for first in range(0, blocks, BLOCKS):
            block, offsets, block_mask, mask = _tile(row, rows, first, blocks, BLOCKS)
            x = _load(x_ptr, residual_ptr, total_ptr, offsets, mask, RESIDUAL, False)
            row_sum += _row_sum(x, block_amax(x, 2), P, ESTIMATOR, RCEIL)
        rho = _inverse_rms(row_sum, eps, FACTOR, P, ESTIMATOR)
        for first in range(0, blocks, BLOCKS):
            block, offsets, block_mask, mask = _tile(row, rows, first, blocks, BLOCKS)
            x = _load(x_ptr, residual_ptr, total_ptr, offsets, mask, RESIDUAL, True)
            _store_cast(
                x, block_amax(x, 2), rho, row, block, offsets, mask, block_mask, blocks, data_ptr, scales_ptr,
                FORM, RCEIL, HARDWARE,
            )  # fmt: skip
    tl.store(rho_ptr + row, rho, mask=row < rows)


def tile_shape(columns: int) -> tuple[bool, int, int, int, int]:
    """(persistent, rows of a program, blocks of a tile, of its tail, warps) for rows this long, by measurement."""
    blocks = columns // BLOCK
    if columns > MAX_PERSISTENT_COLUMNS:
        return False, 1, 256, 0, 8
    tile = triton.next_power_of_2(blocks)
    tail = 0
    if tile > blocks:
        tail = triton.next_power_of_2(blocks - tile // 2)
        tile, tail = (tile // 2, tail) if tail < tile // 2 else (tile, 0)
    rows = max(1, 64 // triton.next_power_of_2(blocks))
    if tail:
        warps = 1 if tile <= 128 else tile // 64
    else:
        warps = 8 if tile > 256 else max(1, min(4, tile // 32))
    return True, rows, tile, tail, warps


def _mean_factor(columns: int, p: int, estimator: str, constant: float) -> float:
    """What the sum over a row is multiplied by to be r^2, or for p = 1 to be r."""
    if estimator == "exact":
        return 1.0 / columns
    return 1.0 / (columns // BLOCK * constant**p)


def _implementation(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    p: int,
    estimator: str,
    eps: float,
    constant: float,
    scale_rounding: str,
    form: str,
) -> tuple[list[torch.Tensor], Launch | None]:
    rows, columns = x.shape
    data, scales = empty_cast(rows, columns, form, x.device)
    rho = torch.empty(rows, dtype=torch.float32, device=x.device)
    total = None if residual is None else torch.empty_like(x)
    results = [t for t in (data, scales, rho, total) if t is not None]
    if x.numel() == 0:
        return results, None
    persistent, rows_at_once, tile, tail, warps = tile_shape(columns)
    launch = Launch(
        _mxnorm_cast_kernel,
        (triton.cdiv(rows, rows_at_once),),
        (
            x, residual, total, as_bytes(data), as_bytes(scales), rho, rows, columns // BLOCK, eps,
        ),
        dict(
            FACTOR=_mean_factor(columns, p, estimator, constant), P=p, ESTIMATOR=estimator,
            RCEIL=scale_rounding == "rceil", FORM=form, RESIDUAL=residual is not None, HARDWARE=converts_fp8(x),
            PERSISTENT=persistent, ROWS=rows_at_once, BLOCKS=tile, TAIL=tail, num_warps=warps,
        ),
    )  # fmt: skip
    return results, launch


_mxnorm_cast = register_op(
    "mxnorm_cast(Tensor x, Tensor? residual, int p, str estimator, float eps, float constant, str scale_rounding,"
    " str form) -> Tensor[]",
    _implementation,
)


class MXNormCast(NamedTuple):
    """Result of ``mxnorm_cast``: the cast's data and scales (None for an image), rho, and x + residual if asked for."""

    data: torch.Tensor
    scales: torch.Tensor | None
    rho: torch.Tensor
    total: torch.Tensor | None


def mxnorm_cast(
    x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, form: str = "codes", residual: torch.Tensor | None = None
) -> MXNormCast:
    """rho of every row of x (or of x + residual), and the MXFP8 cast of x * rho along the row.

    Args:
        x: bf16 or fp32 [T, D], D a multiple of 32 and at most 65536.
        estimate: how the RMS is estimated, over blocks of 32.
        recipe: an MXFP8 recipe; gives the scale rounding.
        form: "codes" (float8_e4m3fn [T, D] and float8_e8m0fnu [T, D / 32]), "blocked" (the same codes, scales flat in
            the 128x4 layout, padding zero) or "image" (the bf16 values [T, D] that codes and scales stand for).
        residual: bf16 or fp32 [T, D], added to x first; the sum is rounded to the dtype of x.

    Raises:
        ValueError: for another shape, dtype or device.
    """
    require_one_of("form", form, FORMS)
    check_mxfp8(recipe, estimate.block_size)
    check_matrix("x", x)
    columns = x.shape[1]
    if not 0 < columns <= MAX_COLUMNS or columns % BLOCK:
        raise ValueError(f"x {tuple(x.shape)}: expected rows of a multiple of {BLOCK} elements, {MAX_COLUMNS} at most")
    if residual is not None:
        check_matrix("residual", residual)
        check_same("residual", residual, "x", x)
        residual = residual.contiguous()
    results = _mxnorm_cast(
        x.contiguous(), residual, estimate.p, estimate.estimator, estimate.eps, estimate.constant,
        recipe.scale_rounding, form,
    )  # fmt: skip
    scales = results[1] if form != "image" else None
    rho = results[1 if form == "image" else 2]
    return MXNormCast(results[0], scales, rho, results[-1] if residual is not None else None)
