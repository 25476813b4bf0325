"""MXNorm of every row and its MXFP8 cast: one read of x, one write of the result.

The block maxima that the scales need also give the RMS estimate, so a row is normalized and cast while registers hold
it. A row too long for that is read twice, the second time mostly from the L2 cache.

Bytes per row of D elements: 2 D or 4 D read; D + D/32 + 4 (codes, scales, rho) or 2 D + 4 (image, rho) written.
"""

import torch
import triton
import triton.language as tl

from mxtrain.errors import require_one_of
from mxtrain.kernels.blocks import block_amax, scale_offset
from mxtrain.kernels.cast_results import FORMS, MXFP8_STORAGE
from mxtrain.kernels.checks import check_mxfp8
from mxtrain.kernels.device import converts_fp8
from mxtrain.kernels.launch import Launch, register_op
from mxtrain.kernels.mxfp8.arithmetic import BLOCK, e4m3_codes, e4m3_image, multiplier, scale_code, scale_value
from mxtrain.kernels.norm.normed_rows import (
    MXNormCast,
    block_offsets,
    contiguous_rows,
    launch_norm_cast,
    load_terms,
    normalize_and_cast,
    total_of,
)
from mxtrain.recipes.recipe import Recipe
from mxtrain.recipes.rms_estimate import RMSEstimate


@triton.jit
def _load(
    x_ptr, residual_ptr, row, rows, first_block, blocks,
    FORM: tl.constexpr, RESIDUAL: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Load BLOCKS blocks of each row.  row [ROWS] -> see ``load_terms``"""
    _, offsets, _, mask = block_offsets(row, rows, first_block, blocks, BLOCKS, 32)
    return load_terms(x_ptr, residual_ptr, offsets, mask, RESIDUAL)


@triton.jit
def _blocks_of(
    terms, total_ptr, row, rows, first_block, blocks,
    FORM: tl.constexpr, RESIDUAL: tl.constexpr, STORE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return the blocks that ``_load`` loaded, [ROWS, BLOCKS, 32], and their largest magnitudes, [ROWS, BLOCKS]."""
    _, offsets, _, mask = block_offsets(row, rows, first_block, blocks, BLOCKS, 32)
    x = total_of(terms, total_ptr, offsets, mask, RESIDUAL, STORE)
    return x, block_amax(x, 2)


@triton.jit
def _store_cast(
    x, amax, rho, tensor_scale, row, rows, first_block, blocks, data_ptr, scales_ptr,
    FORM: tl.constexpr, RCEIL: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Cast x * rho and store it.  x, amax: from ``_blocks_of``; rho, row [ROWS]; MXFP8 has no tensor scale."""
    block, offsets, block_mask, mask = block_offsets(row, rows, first_block, blocks, BLOCKS, 32)
    # fp32 multiplication is monotonic, so this is exactly the largest |x * rho| of the block.
    code = scale_code(amax * rho[:, None], RCEIL)
    y = x * rho[:, None, None] * multiplier(code, RCEIL)[:, :, None]
    if FORM == "image":
        tl.store(data_ptr + offsets, e4m3_image(y, scale_value(code)[:, :, None], HARDWARE), mask=mask)
    else:
        tl.store(data_ptr + offsets, e4m3_codes(y, HARDWARE), mask=mask)
        scale_offsets = scale_offset(row[:, None], block[None, :], blocks, FORM)
        tl.store(scales_ptr + scale_offsets, code.to(tl.uint8), mask=block_mask)


@triton.jit
def _mxnorm_cast_kernel(
    x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps,
    FACTOR: tl.constexpr, P: tl.constexpr, ESTIMATOR: tl.constexpr, RCEIL: tl.constexpr, FORM: tl.constexpr,
    RESIDUAL: tl.constexpr, HARDWARE: tl.constexpr, PERSISTENT: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    normalize_and_cast(
        _load, _blocks_of, _store_cast,
        x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps, None,
        FACTOR, P, ESTIMATOR, RCEIL, FORM, RESIDUAL, HARDWARE, 0, PERSISTENT, ROWS, BLOCKS, PARTS,
    )  # fmt: skip


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
    return launch_norm_cast(
        _mxnorm_cast_kernel, MXFP8_STORAGE, x, residual, p, estimator, eps, constant, form,
        RCEIL=scale_rounding == "rceil", HARDWARE=converts_fp8(x),
    )  # fmt: skip


_mxnorm_cast = register_op(
    "mxnorm_cast(Tensor x, Tensor? residual, int p, str estimator, float eps, float constant, str scale_rounding,"
    " str form) -> Tensor[]",
    _implementation,
)


def mxnorm_cast(
    x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, form: str = "codes", residual: torch.Tensor | None = None
) -> MXNormCast:
    """Return rho of every row of x, or of x + residual, and the MXFP8 cast of x * rho along the row.

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
    x, residual = contiguous_rows(x, residual, BLOCK)
    results = _mxnorm_cast(
        x, residual, estimate.p, estimate.estimator, estimate.eps, estimate.constant, recipe.scale_rounding, form
    )
    return MXNormCast.of(results, form, residual is not None)
