"""MXNorm of every row and its NVFP4 cast with a tensor scale known before: one read of x, one write of the result.

MXNorm's output is bounded (``reference.nvfp4.static_tensor_scale``), so that no maximum over the tensor is needed
first. As in ``mxnorm_cast``, a row is held in registers, or read twice if it is too long for that.

Bytes: 2 or 4 D read a row; D/2 + D/16 + 4 (codes, scales, rho) or 2 D + 4 (image) written.
"""

import torch
import triton
import triton.language as tl

from mxtrain.errors import require_one_of
from mxtrain.kernels.cast_results import FORMS, NVFP4_STORAGE, as_bytes, empty_cast
from mxtrain.kernels.device import converts_fp4
from mxtrain.kernels.integers import cdiv
from mxtrain.kernels.launch import Launch, register_op
from mxtrain.kernels.mxfp8.arithmetic import block_amax, blocked_offset
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
from mxtrain.kernels.nvfp4.arithmetic import (
    BLOCK,
    amax_across,
    eighths,
    image_of,
    inverse_of,
    multiplier,
    pack_nearest_words,
    round_to_nearest,
    scale_of_block,
)
from mxtrain.recipes.rms_estimate import RMSEstimate

# What bounds the output. The rounded block scales of "post_round" need a norm before there are any.
ESTIMATORS = ("pre_round", "exact")


@triton.jit
def _load_blocks(
    x_ptr, residual_ptr, total_ptr, row, rows, first_block, blocks,
    CODES: tl.constexpr, RESIDUAL: tl.constexpr, STORE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """x of these blocks, and their largest magnitudes [ROWS, BLOCKS].

    A thread loads eight elements at once. For an image x is [ROWS, BLOCKS, 16], and a block is in two threads, so that
    the stores of all are side by side. For codes x is two tuples of eight tensors [ROWS, BLOCKS]: a thread has whole
    blocks, and what is computed once a block is not computed twice.
    """
    if CODES:
        _, offsets, _, mask = tile(row, rows, first_block, blocks, BLOCKS, 16, 0, 8)
        first = eighths(load_rows(x_ptr, residual_ptr, total_ptr, offsets, mask, RESIDUAL, STORE))
        _, offsets, _, mask = tile(row, rows, first_block, blocks, BLOCKS, 16, 8, 8)
        second = eighths(load_rows(x_ptr, residual_ptr, total_ptr, offsets, mask, RESIDUAL, STORE))
        x = (first, second)
        amax = amax_across(first + second).to(tl.float32, bitcast=True)
    else:
        _, offsets, _, mask = tile(row, rows, first_block, blocks, BLOCKS, 16)
        x = load_rows(x_ptr, residual_ptr, total_ptr, offsets, mask, RESIDUAL, STORE)
        amax = block_amax(x, 2)
    return x, amax


@triton.jit
def _store_cast(
    x, amax, rho, tensor_scale, row, rows, first_block, blocks, data_ptr, scales_ptr,
    FORM: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Cast x * rho and store it.  x, amax [ROWS, BLOCKS]: of ``_load_blocks``; rho, row [ROWS]"""
    block, offsets, block_mask, mask = tile(row, rows, first_block, blocks, BLOCKS, 16)
    inverse = inverse_of(tensor_scale)
    rho = rho[:, None]
    # fp32 multiplication is monotonic: this is the largest |x * rho| of the block, exactly.
    code, scale = scale_of_block(amax * rho, inverse)
    factor = multiplier(scale, inverse)
    if FORM == "image":
        value = round_to_nearest(x * rho[:, :, None] * factor[:, :, None])
        tl.store(data_ptr + offsets, image_of(value, scale[:, :, None], tensor_scale), mask=mask)
    else:
        first = pack_nearest_words(x[0], rho, factor, HARDWARE)
        second = pack_nearest_words(x[1], rho, factor, HARDWARE)
        words = tl.reshape(tl.join(first, second), (ROWS, 2 * BLOCKS))
        word = 2 * first_block + tl.arange(0, 2 * BLOCKS)
        word_offsets = (row * (blocks * 2))[:, None] + word[None, :]
        word_mask = (row < rows)[:, None] & (word < 2 * blocks)[None, :]
        tl.store(data_ptr.to(tl.pointer_type(tl.int32)) + word_offsets, words, mask=word_mask)
        if FORM == "blocked":
            scale_offsets = blocked_offset(row[:, None], block[None, :], blocks)
        else:
            scale_offsets = row[:, None] * blocks + block[None, :]
        tl.store(scales_ptr + scale_offsets, code, mask=block_mask)


@triton.jit
def _nvfp4_norm_kernel(
    x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps, tensor_scale,
    FACTOR: tl.constexpr, P: tl.constexpr, ESTIMATOR: tl.constexpr, FORM: tl.constexpr, RESIDUAL: tl.constexpr,
    HARDWARE: tl.constexpr, PERSISTENT: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    CODES: tl.constexpr = FORM != "image"
    EIGHTS: tl.constexpr = 2 if CODES else 0
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    if PERSISTENT:
        x, amax = _load_blocks(
            x_ptr, residual_ptr, total_ptr, row, rows, 0, blocks, CODES, RESIDUAL, True, BLOCKS
        )  # fmt: skip
        total_of_row = row_sum(x, amax, P, ESTIMATOR, False, EIGHTS)
        if TAIL:
            x2, amax2 = _load_blocks(
                x_ptr, residual_ptr, total_ptr, row, rows, BLOCKS, blocks, CODES, RESIDUAL, True, TAIL
            )  # fmt: skip
            total_of_row += row_sum(x2, amax2, P, ESTIMATOR, False, EIGHTS)
        rho = inverse_rms(total_of_row, eps, FACTOR, P, ESTIMATOR)
        _store_cast(
            x, amax, rho, tensor_scale, row, rows, 0, blocks, data_ptr, scales_ptr,
            FORM, HARDWARE, ROWS, BLOCKS,
        )  # fmt: skip
        if TAIL:
            _store_cast(
                x2, amax2, rho, tensor_scale, row, rows, BLOCKS, blocks, data_ptr, scales_ptr,
                FORM, HARDWARE, ROWS, TAIL,
            )  # fmt: skip
    else:
        total_of_row = tl.zeros((ROWS,), tl.float64)
        for first in range(0, blocks, BLOCKS):
            x, amax = _load_blocks(
                x_ptr, residual_ptr, total_ptr, row, rows, first, blocks, CODES, RESIDUAL, False, BLOCKS
            )  # fmt: skip
            total_of_row += row_sum(x, amax, P, ESTIMATOR, False, EIGHTS)
        rho = inverse_rms(total_of_row, eps, FACTOR, P, ESTIMATOR)
        for first in range(0, blocks, BLOCKS):
            x, amax = _load_blocks(
                x_ptr, residual_ptr, total_ptr, row, rows, first, blocks, CODES, RESIDUAL, True, BLOCKS
            )  # fmt: skip
            _store_cast(
                x, amax, rho, tensor_scale, row, rows, first, blocks, data_ptr, scales_ptr,
                FORM, HARDWARE, ROWS, BLOCKS,
            )  # fmt: skip
    tl.store(rho_ptr + row, rho, mask=row < rows)


def _tile_shape(columns: int, form: str, plain: bool) -> tuple[bool, int, int, int, int]:
    """As ``normed_rows.tile_shape``: blocks are those of MXFP8, which are twice as long, so that elements are as many.

    Codes are bound by arithmetic, a good part of which is done once a thread, however much it holds: they have fewer
    warps where registers last, and fewer elements that are masked off. On an H200, microseconds with the tiles of
    images and with these: 59 and 54 at 16384 x 4096, 112 and 104 at 8192 x 16384 (both ``plain``: p-mean, no residual),
    54 and 48 at 8192 x 6144, 108 and 87 at 8192 x 12288.
    """
    codes = form != "image"
    persistent, rows, blocks, tail, warps = tile_shape(32 * cdiv(columns, 32), three_quarters=codes)
    if codes and persistent and tail:
        # From 5120 elements on they do not fit the registers of one warp.
        warps = 2 if blocks == 128 and tail > 16 else warps
    elif codes and persistent:
        warps = {64: 1, 128: 1 if plain else 2, 512: 4 if plain else 8}.get(blocks, warps)
    return persistent, rows, blocks, tail, warps


def _implementation(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    p: int,
    estimator: str,
    eps: float,
    constant: float,
    tensor_scale: float,
    form: str,
) -> tuple[list[torch.Tensor], Launch | None]:
    rows, columns = x.shape
    data, scales = empty_cast(NVFP4_STORAGE, rows, columns, form, x.device)
    rho = torch.empty(rows, dtype=torch.float32, device=x.device)
    total = None if residual is None else torch.empty_like(x)
    results = [t for t in (data, scales, rho, total) if t is not None]
    if x.numel() == 0:
        return results, None
    plain = residual is None and estimator == "pre_round"
    persistent, rows_at_once, blocks, tail, warps = _tile_shape(columns, form, plain)
    launch = Launch(
        _nvfp4_norm_kernel,
        (cdiv(rows, rows_at_once),),
        (x, residual, total, as_bytes(data), as_bytes(scales), rho, rows, columns // BLOCK, eps, tensor_scale),
        dict(
            FACTOR=mean_factor(columns, estimator, p, constant, BLOCK), P=p, ESTIMATOR=estimator, FORM=form,
            RESIDUAL=residual is not None, HARDWARE=converts_fp4(x),
            PERSISTENT=persistent, ROWS=rows_at_once, BLOCKS=2 * blocks, TAIL=2 * tail, num_warps=warps,
        ),
    )  # fmt: skip
    return results, launch


_nvfp4_norm = register_op(
    "nvfp4_norm(Tensor x, Tensor? residual, int p, str estimator, float eps, float constant, float tensor_scale,"
    " str form) -> Tensor[]",
    _implementation,
)


def nvfp4_norm(
    x: torch.Tensor,
    estimate: RMSEstimate,
    tensor_scale: float,
    form: str = "codes",
    residual: torch.Tensor | None = None,
) -> MXNormCast:
    """rho of every row of x (or of x + residual), and the NVFP4 cast of x * rho along the row, to nearest.

    Args:
        x: bf16 or fp32 [T, D], D a multiple of 16 and at most 65536.
        estimate: "pre_round" or "exact", over blocks of 16.
        tensor_scale: from ``reference.nvfp4.static_tensor_scale`` for this D and estimate, for example; at least
            ``MIN_TENSOR_SCALE`` there, and a power of two. What exceeds 6 * 448 * tensor_scale saturates.
        form: "codes" (uint8 [T, D / 2], two elements a byte, and float8_e4m3fn [T, D / 16]), "blocked" (the same codes,
            scales flat in the 128x4 layout, padding zero) or "image" (bf16 [T, D]: element * block scale *
            tensor_scale, exact).
        residual: bf16 or fp32 [T, D], added to x first; the sum is rounded to the dtype of x.

    Raises:
        ValueError: for another shape, dtype, device or estimate.
    """
    require_one_of("form", form, FORMS)
    require_one_of("estimator", estimate.estimator, ESTIMATORS)
    if estimate.block_size != BLOCK:
        raise ValueError(f"estimate over blocks of {estimate.block_size}: expected {BLOCK}")
    x, residual = check_rows(x, residual, BLOCK)
    results = _nvfp4_norm(
        x, residual, estimate.p, estimate.estimator, estimate.eps, estimate.constant,
        float(tensor_scale), form,
    )  # fmt: skip
    return as_cast(results, form, residual is not None)
