"""MXNorm of every row and its cast to NVFP4, by one kernel. Bytes written per row: D/2 + D/16 for codes and scales.

The tensor scale is given: MXNorm's output is bounded (``static_tensor_scale``), so the cast needs no maximum over the
tensor.
"""

import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import scale_offset
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.norm_kernel import (
    MXNormCast,
    block_terms,
    call_norm,
    locate,
    norm_launch,
    normalize_rows,
    piece_of,
    powers_near,
    whole_blocks,
)
from mxtrain.formats.nvfp4 import FOUR_OVER_SIX_RANGE
from mxtrain.formats.nvfp4.arithmetic import (
    BLOCK,
    STORAGE,
    amax_across,
    eighths,
    image_of,
    inverse_of,
    multiplier,
    pack_nearest_words,
    round_to_nearest,
    scale_of_block,
)
from mxtrain.formats.nvfp4.four_over_six import four_over_six
from mxtrain.launch.launch import Launch, converts_fp4, register_op

_BLOCK, _FOUR_OVER_SIX = tl.constexpr(BLOCK), tl.constexpr(FOUR_OVER_SIX_RANGE)


# A thread holds whole blocks of codes, eight elements at a time, and computes what belongs to a block only once. Of an
# image it holds half a block, so that neighbouring threads store side by side.


@triton.jit
def _eighths(
    loaded, total_ptr, row, rows, first_block, blocks, STORE: tl.constexpr,
    RESIDUAL: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As ``whole_blocks``; the blocks are two tuples of eight tensors [ROWS, BLOCKS]."""
    first = eighths(
        piece_of(loaded, total_ptr, row, rows, first_block, blocks, 0, STORE, RESIDUAL, PIECES, BLOCKS, BLOCK)
    )
    second = eighths(
        piece_of(loaded, total_ptr, row, rows, first_block, blocks, 1, STORE, RESIDUAL, PIECES, BLOCKS, BLOCK)
    )
    return (first, second), amax_across(first + second).to(tl.float32, bitcast=True)


@triton.jit
def _terms_of_eighths(x, amax, setting, P: tl.constexpr, ESTIMATOR: tl.constexpr):
    if ESTIMATOR != "exact":
        return block_terms(x, amax, setting, P, ESTIMATOR)
    else:
        down, up = powers_near(amax)
        squares = tl.zeros(amax.shape, tl.float32)
        for i in tl.static_range(2):
            eight = tl.zeros(amax.shape, tl.float32)
            for j in tl.static_range(8):
                scaled = x[i][j] * down
                eight += scaled * scaled
            squares += eight
        return squares.to(tl.float64) * (up * up)


@triton.jit
def _store_image(
    x, amax, rho, setting, row, rows, first_block, blocks, data_ptr, scales_ptr,
    FORM: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    _, offsets, _, mask = locate(row, rows, first_block, blocks, 0, 1, BLOCKS, _BLOCK)
    tensor_scale, xhat = tl.cast(setting[0], tl.float32), x * rho[:, None, None]
    if setting[1] != "":
        _, scale, factor = four_over_six(xhat, amax * rho[:, None], tensor_scale * _FOUR_OVER_SIX, "last", setting[1])
        tensor_scale = 1.0  # not in the image
    else:
        inverse = inverse_of(tensor_scale)
        _, scale = scale_of_block(amax * rho[:, None], inverse)
        factor = multiplier(scale, inverse)
    value = round_to_nearest(xhat * factor[:, :, None])
    tl.store(data_ptr + offsets, image_of(value, scale[:, :, None], tensor_scale), mask=mask)


@triton.jit
def _store_codes(
    x, amax, rho, setting, row, rows, first_block, blocks, data_ptr, scales_ptr,
    FORM: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block, _, block_mask, _ = locate(row, rows, first_block, blocks, 0, 1, BLOCKS, _BLOCK)
    tensor_scale, rho = tl.cast(setting[0], tl.float32), rho[:, None]
    if setting[1] != "":
        xhat = ()
        for i in tl.static_range(16):
            xhat = xhat + (x[i // 8][i % 8] * rho,)
        code, _, factor = four_over_six(xhat, amax * rho, tensor_scale * _FOUR_OVER_SIX, "across", setting[1])
    else:
        inverse = inverse_of(tensor_scale)
        code, scale = scale_of_block(amax * rho, inverse)
        factor = multiplier(scale, inverse)
    first = pack_nearest_words(x[0], rho, factor, HARDWARE)
    second = pack_nearest_words(x[1], rho, factor, HARDWARE)
    words = tl.reshape(tl.join(first, second), (amax.shape[0], 2 * BLOCKS))
    word = 2 * first_block + tl.arange(0, 2 * BLOCKS)
    word_offsets = (row * (blocks * 2))[:, None] + word[None, :]
    word_mask = (row < rows)[:, None] & (word < 2 * blocks)[None, :]
    tl.store(data_ptr.to(tl.pointer_type(tl.int32)) + word_offsets, words, mask=word_mask)
    scale_offsets = scale_offset(row[:, None], block[None, :], blocks, FORM)
    tl.store(scales_ptr + scale_offsets, code, mask=block_mask)


@triton.jit
def _nvfp4_norm_kernel(
    x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps, tensor_scale,
    FACTOR: tl.constexpr, P: tl.constexpr, ESTIMATOR: tl.constexpr, FORM: tl.constexpr, RESIDUAL: tl.constexpr,
    HARDWARE: tl.constexpr, PERSISTENT: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr,
    ERROR: tl.constexpr,
):  # fmt: skip
    if FORM == "image":
        normalize_rows(
            x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps, (tensor_scale, ERROR),
            whole_blocks, block_terms, _store_image,
            FACTOR, P, ESTIMATOR, FORM, RESIDUAL, HARDWARE, PERSISTENT, ROWS, PARTS, 1, BLOCKS, _BLOCK,
        )  # fmt: skip
    else:
        normalize_rows(
            x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps, (tensor_scale, ERROR),
            _eighths, _terms_of_eighths, _store_codes,
            FACTOR, P, ESTIMATOR, FORM, RESIDUAL, HARDWARE, PERSISTENT, ROWS, PARTS, 2, BLOCKS, _BLOCK,
        )  # fmt: skip


def _launch(x: torch.Tensor, *settings) -> tuple[list[torch.Tensor], Launch | None]:
    *others, tensor_scale, error = settings
    constants = dict(HARDWARE=converts_fp4(x), ERROR=error)
    return norm_launch(_nvfp4_norm_kernel, STORAGE, x, *others, (tensor_scale,), constants)


NORM = register_op(
    "nvfp4_norm(Tensor x, Tensor? residual, int p, str estimator, float eps, float constant, str form,"
    " float tensor_scale, str error) -> Tensor[]",
    _launch,
)


def nvfp4_norm(
    x: torch.Tensor,
    estimate: RMSEstimate,
    tensor_scale: float,
    form: str = "codes",
    residual: torch.Tensor | None = None,
    error: str = "",
) -> MXNormCast:
    """Return rho of every row of x, or of x + residual, and the NVFP4 cast of x * rho along the row, to nearest.

    Args:
        x, residual: bf16 or fp32 [T, D], D a multiple of 16 and at most 65536; the residual is added to x first,
            and the sum is rounded to the dtype of x.
        estimate: "pre_round" or "exact", over blocks of 16. (The block scales that "post_round" reads would depend on
            the norm itself.)
        tensor_scale: a power of two, at least ``TENSOR_SCALE_MIN``. Elements beyond
            6 * 448 * tensor_scale saturate, and with ``formats.nvfp4.static_tensor_scale`` none does.
        form: "codes" (uint8 [T, D / 2], two elements a byte, and float8_e4m3fn [T, D / 16]), "blocked" (the same codes,
            scales flat in the 128x4 layout, padding zero) or "image" (bf16 [T, D]: element * block scale *
            tensor_scale, exact).
        error: "mae" or "mse": the cast is that of four over six, whose ``error`` that is, for a largest magnitude of
            6 * 256 * tensor_scale. An image is then element * block scale.

    Raises:
        ValueError: for longer rows.
    """
    return call_norm(NORM, x, residual, estimate, form, float(tensor_scale), error)
