"""MXNorm of every row and its NVFP4 cast with a tensor scale given beforehand: one read of x, one write of the result.

MXNorm's output is bounded (``reference.nvfp4.static_tensor_scale``), so the cast needs no maximum over the tensor. As
in ``mxfp8.norm_cast``, registers hold a row, or it is read twice.

Bytes per row of D elements: 2 D or 4 D read; D/2 + D/16 + 4 (codes, scales, rho) or 2 D + 4 (image, rho) written.
"""

import torch
import triton
import triton.language as tl

from mxtrain.errors import require_one_of
from mxtrain.kernels.blocks import block_amax, scale_offset
from mxtrain.kernels.cast_results import FORMS, NVFP4_STORAGE
from mxtrain.kernels.device import converts_fp4
from mxtrain.kernels.launch import Launch, register_op
from mxtrain.kernels.norm.normed_rows import (
    MXNormCast,
    block_offsets,
    contiguous_rows,
    launch_norm_cast,
    load_terms,
    normalize_and_cast,
    total_of,
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

# Estimators that bound the output. "post_round" reads rounded block scales, which here depend on the norm itself.
BOUNDED_ESTIMATORS = ("pre_round", "exact")


@triton.jit
def _load(
    x_ptr, residual_ptr, row, rows, first_block, blocks,
    FORM: tl.constexpr, RESIDUAL: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Load BLOCKS blocks of each row, eight elements per thread at once.  row [ROWS] -> see ``load_terms``

    For an image [ROWS, BLOCKS, 16], with a block in two threads, so that neighbouring threads store side by side. For
    codes two halves of blocks, [ROWS, BLOCKS, 8] each: a thread has whole blocks, and computes what belongs to a block
    only once.
    """
    if FORM == "image":
        _, offsets, _, mask = block_offsets(row, rows, first_block, blocks, BLOCKS, 16)
        return load_terms(x_ptr, residual_ptr, offsets, mask, RESIDUAL)
    else:
        _, offsets, _, mask = block_offsets(row, rows, first_block, blocks, BLOCKS, 16, 0, 8)
        first = load_terms(x_ptr, residual_ptr, offsets, mask, RESIDUAL)
        _, offsets, _, mask = block_offsets(row, rows, first_block, blocks, BLOCKS, 16, 8, 8)
        return first, load_terms(x_ptr, residual_ptr, offsets, mask, RESIDUAL)


@triton.jit
def _blocks_of(
    terms, total_ptr, row, rows, first_block, blocks,
    FORM: tl.constexpr, RESIDUAL: tl.constexpr, STORE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return the blocks that ``_load`` loaded, and their largest magnitudes [ROWS, BLOCKS].

    For codes the blocks are two tuples of eight tensors [ROWS, BLOCKS].
    """
    if FORM == "image":
        _, offsets, _, mask = block_offsets(row, rows, first_block, blocks, BLOCKS, 16)
        x = total_of(terms, total_ptr, offsets, mask, RESIDUAL, STORE)
        amax = block_amax(x, 2)
    else:
        _, offsets, _, mask = block_offsets(row, rows, first_block, blocks, BLOCKS, 16, 0, 8)
        first = eighths(total_of(terms[0], total_ptr, offsets, mask, RESIDUAL, STORE))
        _, offsets, _, mask = block_offsets(row, rows, first_block, blocks, BLOCKS, 16, 8, 8)
        second = eighths(total_of(terms[1], total_ptr, offsets, mask, RESIDUAL, STORE))
        x = (first, second)
        amax = amax_across(first + second).to(tl.float32, bitcast=True)
    return x, amax


@triton.jit
def _store_cast(
    x, amax, rho, tensor_scale, row, rows, first_block, blocks, data_ptr, scales_ptr,
    FORM: tl.constexpr, RCEIL: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Cast x * rho and store it.  x, amax: from ``_blocks_of``; rho, row [ROWS]; NVFP4 ignores RCEIL."""
    block, offsets, block_mask, mask = block_offsets(row, rows, first_block, blocks, BLOCKS, 16)
    inverse = inverse_of(tensor_scale)
    rho = rho[:, None]
    # fp32 multiplication is monotonic, so this is exactly the largest |x * rho| of the block.
    code, scale = scale_of_block(amax * rho, inverse)
    factor = multiplier(scale, inverse)
    if FORM == "image":
        value = round_to_nearest(x * rho[:, :, None] * factor[:, :, None])
        tl.store(data_ptr + offsets, image_of(value, scale[:, :, None], tensor_scale), mask=mask)
    else:
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
    HARDWARE: tl.constexpr, PERSISTENT: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    EIGHTS: tl.constexpr = 0 if FORM == "image" else 2
    normalize_and_cast(
        _load, _blocks_of, _store_cast,
        x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps, tensor_scale,
        FACTOR, P, ESTIMATOR, False, FORM, RESIDUAL, HARDWARE, EIGHTS, PERSISTENT, ROWS, BLOCKS, PARTS,
    )  # fmt: skip


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
    return launch_norm_cast(
        _nvfp4_norm_kernel, NVFP4_STORAGE, x, residual, p, estimator, eps, constant, form, tensor_scale,
        HARDWARE=converts_fp4(x),
    )  # fmt: skip


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
    """Return rho of every row of x, or of x + residual, and the NVFP4 cast of x * rho along the row, to nearest.

    Args:
        x: bf16 or fp32 [T, D], D a multiple of 16 and at most 65536.
        estimate: "pre_round" or "exact", over blocks of 16.
        tensor_scale: a power of two, at least ``NVFP4_TENSOR_SCALE_MIN``. Elements beyond
            6 * 448 * tensor_scale saturate, and with ``reference.nvfp4.static_tensor_scale`` none does.
        form: "codes" (uint8 [T, D / 2], two elements a byte, and float8_e4m3fn [T, D / 16]), "blocked" (the same codes,
            scales flat in the 128x4 layout, padding zero) or "image" (bf16 [T, D]: element * block scale *
            tensor_scale, exact).
        residual: bf16 or fp32 [T, D], added to x first; the sum is rounded to the dtype of x.

    Raises:
        ValueError: for another shape, dtype, device or estimate.
    """
    require_one_of("form", form, FORMS)
    require_one_of("estimator", estimate.estimator, BOUNDED_ESTIMATORS)
    if estimate.block_size != BLOCK:
        raise ValueError(f"estimate over blocks of {estimate.block_size}: expected {BLOCK}")
    x, residual = contiguous_rows(x, residual, BLOCK)
    results = _nvfp4_norm(
        x, residual, estimate.p, estimate.estimator, estimate.eps, estimate.constant, float(tensor_scale), form
    )
    return MXNormCast.of(results, form, residual is not None)
