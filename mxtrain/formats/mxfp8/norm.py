"""MXNorm of every row and its cast to MXFP8, by one kernel. Bytes written per row: D + D/32 for codes and scales."""

import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import scale_offset
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.mxfp8.arithmetic import (
    BLOCK,
    STORAGE,
    e4m3_codes,
    e4m3_image,
    inverse_scale,
    rounded_amax,
    scale_code,
    scale_value,
)
from mxtrain.formats.norm_kernel import (
    MXNormCast,
    block_terms,
    call_norm,
    locate,
    norm_launch,
    normalize_rows,
    whole_blocks,
)
from mxtrain.formats.recipe import Recipe
from mxtrain.launch.launch import Launch, converts_fp8, register_op

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _terms(x, amax, RCEIL: tl.constexpr, P: tl.constexpr, ESTIMATOR: tl.constexpr):
    if ESTIMATOR == "post_round":
        amax = rounded_amax(amax, RCEIL)
    return block_terms(x, amax, RCEIL, P, ESTIMATOR)


@triton.jit
def _store(
    x, amax, rho, RCEIL: tl.constexpr, row, rows, first_block, blocks, data_ptr, scales_ptr,
    FORM: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block, offsets, block_mask, mask = locate(row, rows, first_block, blocks, 0, 1, BLOCKS, _BLOCK)
    # fp32 multiplication is monotonic, so this is exactly the largest |x * rho| of the block.
    code = scale_code(amax * rho[:, None], RCEIL)
    y = x * rho[:, None, None] * inverse_scale(code, RCEIL)[:, :, None]
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
    RESIDUAL: tl.constexpr, HARDWARE: tl.constexpr, PERSISTENT: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    normalize_rows(
        x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps, RCEIL,
        whole_blocks, _terms, _store,
        FACTOR, P, ESTIMATOR, FORM, RESIDUAL, HARDWARE, PERSISTENT, ROWS, PARTS, 1, BLOCKS, _BLOCK,
    )  # fmt: skip


def _launch(x: torch.Tensor, *settings) -> tuple[list[torch.Tensor], Launch | None]:
    *others, scale_rounding = settings
    return norm_launch(
        _mxnorm_cast_kernel, STORAGE, x, *others, (), dict(RCEIL=scale_rounding == "rceil", HARDWARE=converts_fp8(x))
    )


NORM = register_op(
    "mxnorm_cast(Tensor x, Tensor? residual, int p, str estimator, float eps, float constant, str form,"
    " str scale_rounding) -> Tensor[]",
    _launch,
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
        ValueError: for longer rows.
    """
    return call_norm(NORM, x, residual, estimate, form, recipe.scale_rounding)
