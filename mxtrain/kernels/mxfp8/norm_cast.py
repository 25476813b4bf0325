"""MXNorm of every row and its MXFP8 cast: one read of x, one write of the result.

The block maxima that the scales need also give the RMS estimate, so a row is normalized and cast while it is held in
registers. A row too long for that is read twice, the second time mostly from the L2 cache.

Bytes: 2 or 4 D read a row; D + D/32 + 4 (codes, scales, rho) or 2 D + 4 (image) written.
"""

import torch
import triton
import triton.language as tl

from mxtrain.errors import require_one_of
from mxtrain.kernels.cast_results import FORMS, MXFP8_STORAGE, as_bytes, empty_cast
from mxtrain.kernels.checks import check_mxfp8
from mxtrain.kernels.device import converts_fp8
from mxtrain.kernels.integers import cdiv
from mxtrain.kernels.launch import Launch, register_op
from mxtrain.kernels.mxfp8.arithmetic import (
    BLOCK,
    block_amax,
    blocked_offset,
    e4m3_codes,
    e4m3_image,
    multiplier,
    scale_code,
    scale_value,
)
from mxtrain.kernels.norm.normed_rows import (
    MXNormCast,
    as_cast,
    check_rows,
    inverse_rms,
    load_rows,
    mean_factor,
    row_sum,
    tile,
    tile_shape,
)
from mxtrain.recipes.recipe import Recipe
from mxtrain.recipes.rms_estimate import RMSEstimate


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
        block, offsets, block_mask, mask = tile(row, rows, 0, blocks, BLOCKS, 32)
        x = load_rows(x_ptr, residual_ptr, total_ptr, offsets, mask, RESIDUAL, True)
        amax = block_amax(x, 2)
        total_of_row = row_sum(x, amax, P, ESTIMATOR, RCEIL)
        if TAIL:
            block2, offsets2, block_mask2, mask2 = tile(row, rows, BLOCKS, blocks, TAIL, 32)
            x2 = load_rows(x_ptr, residual_ptr, total_ptr, offsets2, mask2, RESIDUAL, True)
            amax2 = block_amax(x2, 2)
            total_of_row += row_sum(x2, amax2, P, ESTIMATOR, RCEIL)
        rho = inverse_rms(total_of_row, eps, FACTOR, P, ESTIMATOR)
        _store_cast(
            x, amax, rho, row, block, offsets, mask, block_mask, blocks, data_ptr, scales_ptr, FORM, RCEIL, HARDWARE
        )
        if TAIL:
            _store_cast(
                x2, amax2, rho, row, block2, offsets2, mask2, block_mask2, blocks, data_ptr, scales_ptr,
                FORM, RCEIL, HARDWARE,
            )  # fmt: skip
    else:
        total_of_row = tl.zeros((ROWS,), tl.float64)
        for first in range(0, blocks, BLOCKS):
            block, offsets, block_mask, mask = tile(row, rows, first, blocks, BLOCKS, 32)
            x = load_rows(x_ptr, residual_ptr, total_ptr, offsets, mask, RESIDUAL, False)
            total_of_row += row_sum(x, block_amax(x, 2), P, ESTIMATOR, RCEIL)
        rho = inverse_rms(total_of_row, eps, FACTOR, P, ESTIMATOR)
        for first in range(0, blocks, BLOCKS):
            block, offsets, block_mask, mask = tile(row, rows, first, blocks, BLOCKS, 32)
            x = load_rows(x_ptr, residual_ptr, total_ptr, offsets, mask, RESIDUAL, True)
            _store_cast(
                x, block_amax(x, 2), rho, row, block, offsets, mask, block_mask, blocks, data_ptr, scales_ptr,
                FORM, RCEIL, HARDWARE,
            )  # fmt: skip
    tl.store(rho_ptr + row, rho, mask=row < rows)


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
    data, scales = empty_cast(MXFP8_STORAGE, rows, columns, form, x.device)
    rho = torch.empty(rows, dtype=torch.float32, device=x.device)
    total = None if residual is None else torch.empty_like(x)
    results = [t for t in (data, scales, rho, total) if t is not None]
    if x.numel() == 0:
        return results, None
    persistent, rows_at_once, blocks, tail, warps = tile_shape(columns)
    launch = Launch(
        _mxnorm_cast_kernel,
        (cdiv(rows, rows_at_once),),
        (
            x, residual, total, as_bytes(data), as_bytes(scales), rho, rows, columns // BLOCK, eps,
        ),
        dict(
            FACTOR=mean_factor(columns, estimator, p, constant, BLOCK), P=p, ESTIMATOR=estimator,
            RCEIL=scale_rounding == "rceil", FORM=form, RESIDUAL=residual is not None, HARDWARE=converts_fp8(x),
            PERSISTENT=persistent, ROWS=rows_at_once, BLOCKS=blocks, TAIL=tail, num_warps=warps,
        ),
    )  # fmt: skip
    return results, launch


_mxnorm_cast = register_op(
    "mxnorm_cast(Tensor x, Tensor? residual, int p, str estimator, float eps, float constant, str scale_rounding,"
    " str form) -> Tensor[]",
    _implementation,
)


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
    x, residual = check_rows(x, residual, BLOCK)
    results = _mxnorm_cast(
        x, residual, estimate.p, estimate.estimator, estimate.eps, estimate.constant,
        recipe.scale_rounding, form,
    )  # fmt: skip
    return as_cast(results, form, residual is not None)
