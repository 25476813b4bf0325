"""MXNorm of every row and its cast to NVFP4, by one kernel. Bytes written per row: D/2 + D/16 for codes and scales.

The tensor scale is given: MXNorm's output is bounded (``static_tensor_scale``), so the cast needs no maximum over the
tensor. Or each row has a scale of its own (4 bytes more), from the block maxima that the estimate needs anyway. Without
a norm, the same kernel casts rows with such scales: 2 D or 4 D bytes read per row, and the same written but for rho.
"""

import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import scale_offset
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.mx.arithmetic import round_to_element
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
from mxtrain.formats.nvfp4.arithmetic import BLOCK, STORAGE, amax_across, pack_nearest_words, tensor_scale_bits
from mxtrain.formats.nvfp4.four_over_six import registers, scales_of_blocks
from mxtrain.formats.nvfp4.strip import separated
from mxtrain.launch.launch import Launch, cdiv, contiguous, converts_fp4, next_power_of_2, register_op

_BLOCK = tl.constexpr(BLOCK)


# A thread holds whole blocks of codes, eight elements at a time, and computes what belongs to a block only once. Of an
# image it holds half a block, so that neighboring threads store side by side.
#
# The setting is (one tensor scale, pointer to those of the rows, pointer for results of rows, ERROR). A variable cannot
# hold this tuple: Triton would make a tensor of the text.


@triton.jit
def _eighths(
    loaded, total_ptr, row, rows, first_block, blocks, STORE: tl.constexpr,
    RESIDUAL: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As ``whole_blocks``; the blocks are two tuples of eight tensors [ROWS, BLOCKS]."""
    first = separated(
        piece_of(loaded, total_ptr, row, rows, first_block, blocks, 0, STORE, RESIDUAL, PIECES, BLOCKS, BLOCK), 3
    )
    second = separated(
        piece_of(loaded, total_ptr, row, rows, first_block, blocks, 1, STORE, RESIDUAL, PIECES, BLOCKS, BLOCK), 3
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
def _tensor_scales(amax, setting, row, rows):
    """The tensor scale of each row, fp32 [ROWS]: the same for all, given for each, or from its largest magnitude.

    For four over six, the largest magnitude itself.
    """
    scales = amax
    ERROR: tl.constexpr = setting[3]
    if setting[0] is not None:
        scales = tl.full(amax.shape, tl.cast(setting[0], tl.float32), tl.float32)
    elif setting[1] is not None:
        scales = tl.load(setting[1] + row, mask=row < rows, other=1.0)
    elif ERROR == "":
        scales = tensor_scale_bits(amax).to(tl.float32, bitcast=True)
    if setting[2] is not None:
        tl.store(setting[2] + row, scales, mask=row < rows)
    return scales


@triton.jit
def _store_image(
    x, amax, rho, tensor_scales, setting, row, rows, first_block, blocks, data_ptr, scales_ptr,
    FORM: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    _, offsets, _, mask = locate(row, rows, first_block, blocks, 0, 1, BLOCKS, _BLOCK)
    xhat = x * rho[:, None, None]
    _, factor, scale = scales_of_blocks(xhat, amax * rho[:, None], tensor_scales[:, None], "last", setting[3])
    image = round_to_element(xhat * factor[:, :, None], "e2m1") * scale[:, :, None]
    tl.store(data_ptr + offsets, image.to(tl.bfloat16), mask=mask)


@triton.jit
def _store_codes(
    x, amax, rho, tensor_scales, setting, row, rows, first_block, blocks, data_ptr, scales_ptr,
    FORM: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block, _, block_mask, _ = locate(row, rows, first_block, blocks, 0, 1, BLOCKS, _BLOCK)
    rho, first, second = rho[:, None], (), ()
    for i in tl.static_range(8):
        first, second = first + (x[0][i] * rho,), second + (x[1][i] * rho,)
    code, factor, _ = scales_of_blocks(first + second, amax * rho, tensor_scales[:, None], "across", setting[3])
    first = pack_nearest_words(first, factor, HARDWARE)
    second = pack_nearest_words(second, factor, HARDWARE)
    words = tl.reshape(tl.join(first, second), (amax.shape[0], 2 * BLOCKS))
    word = 2 * first_block + tl.arange(0, 2 * BLOCKS)
    word_offsets = (row * (blocks * 2))[:, None] + word[None, :]
    word_mask = (row < rows)[:, None] & (word < 2 * blocks)[None, :]
    tl.store(data_ptr.to(tl.pointer_type(tl.int32)) + word_offsets, words, mask=word_mask)
    scale_offsets = scale_offset(row[:, None], block[None, :], blocks, FORM)
    tl.store(scales_ptr + scale_offsets, code, mask=block_mask)


@triton.jit
def _nvfp4_norm_kernel(
    x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps,
    tensor_scale, given_ptr, row_scales_ptr,
    FACTOR: tl.constexpr, P: tl.constexpr, ESTIMATOR: tl.constexpr, FORM: tl.constexpr, RESIDUAL: tl.constexpr,
    HARDWARE: tl.constexpr, PERSISTENT: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr,
    ERROR: tl.constexpr,
):  # fmt: skip
    if FORM == "image":
        normalize_rows(
            x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps,
            (tensor_scale, given_ptr, row_scales_ptr, ERROR),
            whole_blocks, block_terms, _store_image,
            FACTOR, P, ESTIMATOR, FORM, RESIDUAL, HARDWARE, PERSISTENT, ROWS, PARTS, 1, BLOCKS, _BLOCK, _tensor_scales,
        )  # fmt: skip
    else:
        normalize_rows(
            x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps,
            (tensor_scale, given_ptr, row_scales_ptr, ERROR),
            _eighths, _terms_of_eighths, _store_codes,
            FACTOR, P, ESTIMATOR, FORM, RESIDUAL, HARDWARE, PERSISTENT, ROWS, PARTS, 2, BLOCKS, _BLOCK, _tensor_scales,
        )  # fmt: skip


def _launch(x: torch.Tensor, *settings, given: torch.Tensor | None = None) -> tuple[list[torch.Tensor], Launch | None]:
    *others, form, tensor_scale, error = settings
    makes_scales = tensor_scale is None and given is None and (form != "image" or error != "")
    row_scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device) if makes_scales else None
    scales, constants = (tensor_scale, given, row_scales), dict(HARDWARE=converts_fp4(x), ERROR=error)
    results, launch = norm_launch(_nvfp4_norm_kernel, STORAGE, x, *others, form, scales, constants, row_scales)
    if launch is not None and error:
        of = launch.constants
        blocks = of["ROWS"] * of["PARTS"] * of["BLOCKS"]
        of["maxnreg"] = registers(blocks, of["num_warps"])
        if form == "image":
            # At most 48 elements a thread: 870 instead of 1150 us at 16384 x 14336 (H200).
            of |= {"num_warps": max(of["num_warps"], next_power_of_2(cdiv(blocks, 96))), "maxnreg": 128}
    return results, launch


def _launch_rows(parts, given, form: str, error: str) -> tuple[list[torch.Tensor], Launch | None]:
    return _launch(*parts, None, 2, "none", 0.0, 1.0, form, None, error, given=given)


NORM = register_op(
    "nvfp4_norm(Tensor x, Tensor? residual, int p, str estimator, float eps, float constant, str form,"
    " float? tensor_scale, str error) -> Tensor[]",
    _launch,
)
ROWS = register_op("nvfp4_rows(Tensor[] parts, Tensor? row_scales, str form, str error) -> Tensor[]", _launch_rows)


def nvfp4_norm(
    x: torch.Tensor,
    estimate: RMSEstimate,
    tensor_scale: float | None,
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
            6 * 448 * tensor_scale saturate, and with ``formats.nvfp4.static_tensor_scale`` none does. None: each row
            has its own, ``reference.power_of_two_tensor_scale`` of the row, a result for "codes" and "blocked".
        form, error: as for ``nvfp4_cast`` along dimension 1.

    Raises:
        ValueError: for longer rows.
    """
    number = None if tensor_scale is None else float(tensor_scale)
    return call_norm(NORM, x, residual, estimate, form, number, error)


def nvfp4_rows(
    x: torch.Tensor, row_scales: torch.Tensor | None = None, form: str = "codes", error: str = ""
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the NVFP4 cast of x along its rows, to nearest, and a tensor scale for each row. Rest as above.

    Args:
        x: bf16 or fp32 [T, D], D a multiple of 16.
        row_scales: the tensor scales, powers of two, fp32 [T]; None takes each from the row's largest magnitude.

    Returns:
        data, scales, row_scales; for an image data, and row_scales for an ``error`` only.
    """
    data, *others = ROWS(contiguous(x), *contiguous(row_scales), form, error)
    if row_scales is None and (form != "image" or error):
        row_scales = others[-1]
    return (data, None, row_scales if error else None) if form == "image" else (data, others[0], row_scales)
