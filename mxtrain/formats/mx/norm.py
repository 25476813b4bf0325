"""MXNorm of every row and its cast to an MX format, by one kernel. Bytes written per row: D + D/32 for 8-bit codes."""

import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import is_merged, scale_offset
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.mx.arithmetic import (
    BLOCK,
    STORAGE,
    code_in_group,
    element_codes,
    element_image,
    element_of,
    inverse_scale,
    merged_codes,
    rounded_amax,
    scale_code,
    scale_value,
    store_codes,
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
def _terms(x, amax, setting, P: tl.constexpr, ESTIMATOR: tl.constexpr):
    if ESTIMATOR == "post_round":
        amax = rounded_amax(amax, setting[0], setting[1])
    return block_terms(x, amax, setting, P, ESTIMATOR)


@triton.jit
def _store(
    x, amax, rho, scales, setting, row, rows, first_block, blocks, data_ptr, scales_ptr,
    FORM: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    ROUNDING: tl.constexpr = setting[0]
    ELEMENT: tl.constexpr = setting[1]
    block, offsets, block_mask, mask = locate(row, rows, first_block, blocks, 0, 1, BLOCKS, _BLOCK)
    # fp32 multiplication is monotonic, so this is exactly the largest |x * rho| of the block.
    code = scale_code(amax * rho[:, None], ROUNDING, ELEMENT)
    y = x * rho[:, None, None] * inverse_scale(code, ROUNDING)[:, :, None]
    if FORM == "image":
        tl.store(data_ptr + offsets, element_image(y, scale_value(code)[:, :, None], ELEMENT, HARDWARE), mask=mask)
    elif is_merged(FORM):
        by_group: tl.constexpr = (code.shape[0], BLOCKS // 4, 4)
        group_code = tl.max(tl.reshape(code_in_group(code), by_group), 2)
        of_blocks = tl.reshape(tl.broadcast_to(group_code[:, :, None], by_group), code.shape)
        codes = merged_codes(y, code[:, :, None], of_blocks[:, :, None], HARDWARE)
        tl.store(data_ptr + offsets, codes, mask=mask)
        group = (first_block // 4 + tl.arange(0, BLOCKS // 4))[None, :]
        scale = (group_code << 23).to(tl.float32, bitcast=True)
        scale_mask = (row < rows)[:, None] & (group < blocks // 4)
        tl.store(scales_ptr + group.to(tl.int64) * rows + row[:, None], scale, mask=scale_mask)
    else:
        store_codes(data_ptr, offsets, element_codes(y, ELEMENT, HARDWARE), mask, ELEMENT)
        scale_offsets = scale_offset(row[:, None], block[None, :], blocks, FORM)
        tl.store(scales_ptr + scale_offsets, code.to(tl.uint8), mask=block_mask)


@triton.jit
def _mxnorm_cast_kernel(
    x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps,
    FACTOR: tl.constexpr, P: tl.constexpr, ESTIMATOR: tl.constexpr, ROUNDING: tl.constexpr, ELEMENT: tl.constexpr,
    FORM: tl.constexpr, RESIDUAL: tl.constexpr, HARDWARE: tl.constexpr, PERSISTENT: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    normalize_rows(
        x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps,
        (ROUNDING, ELEMENT),
        whole_blocks, _terms, _store,
        FACTOR, P, ESTIMATOR, FORM, RESIDUAL, HARDWARE, PERSISTENT, ROWS, PARTS, 1, BLOCKS, _BLOCK,
    )  # fmt: skip


def _launch(x: torch.Tensor, *settings) -> tuple[list[torch.Tensor], Launch | None]:
    *others, element, scale_rounding = settings
    constants = dict(ROUNDING=scale_rounding, ELEMENT=element, HARDWARE=converts_fp8(x))
    return norm_launch(_mxnorm_cast_kernel, STORAGE[element], x, *others, (), constants)


NORM = register_op(
    "mxnorm_cast(Tensor x, Tensor? residual, int p, str estimator, float eps, float constant, str form,"
    " str element, str scale_rounding) -> Tensor[]",
    _launch,
)


def mxnorm_cast(
    x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, form: str = "codes", residual: torch.Tensor | None = None
) -> MXNormCast:
    """Return rho of every row of x, or of x + residual, and the cast of x * rho along the row.

    Args:
        x: bf16 or fp32 [T, D], D a multiple of 32 and at most 65536.
        estimate: how the RMS is estimated, over blocks of 32.
        recipe: of an MX format.
        form: as for ``mxtrain.formats.mx.cast.cast`` along dimension 1; of ``MERGED_FORMS`` "merged_input".
        residual: bf16 or fp32 [T, D], added to x first; the sum is rounded to the dtype of x.

    Raises:
        ValueError: for longer rows.
    """
    return call_norm(NORM, x, residual, estimate, form, element_of(recipe.format), recipe.scale_rounding)
