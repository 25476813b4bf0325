"""NVFP4 casts of a matrix along its rows, its columns, or both, from one read.

Along columns the random Hadamard transform in blocks of 16 rows can come first. Each cast rounds to nearest or
stochastically. An output gradient [T, N] becomes the operands of dgrad and wgrad in this way, and an input [T, D] with
rho as row factor becomes the operand of wgrad.

Several matrices can be cast into one image: each is read and written once, and nothing is copied. Every part has its
own tensor scale, its own random bits, and the bits that it has alone. One image holds them because its values include
the tensor scales; codes would need one scale for all.

Groups of rows of one matrix can likewise be as matrices of their own. Only the device knows where they end.

Bytes per element: 2 or 4 read; 1/2 + 1/16 (codes and scales) or 2 (image) written for each of the two casts.
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from mxtrain.kernels.casts import (
    NVFP4_STORAGE,
    Cast,
    as_bytes,
    block_amax,
    by_dim,
    empty_cast,
    empty_column_cast,
    flat,
    tile_start,
)
from mxtrain.kernels.device import cdiv, converts_fp4, next_power_of_2, round_up
from mxtrain.kernels.launch import Launch, contiguous, register_op
from mxtrain.kernels.nvfp4.arithmetic import (
    BLOCK,
    amax_across,
    image_of,
    inverse_of,
    multiplier,
    pack,
    pack_nearest,
    random_words,
    round_stochastically,
    round_to_nearest,
    scale_of_block,
)
from mxtrain.kernels.nvfp4.strip import (
    WARPS,
    group_of,
    hadamard,
    length_of,
    load_strip,
    store_columns,
    store_row,
    tile_columns,
)


@triton.jit
def _along_rows(
    strip, words, tensor_scale_ptr, first_row, column, rows, columns, stride, data_ptr, scales_ptr,
    STOCHASTIC: tl.constexpr, FORM: tl.constexpr, HARDWARE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast each row of a strip in blocks of 16 columns and store it."""
    tensor_scale = tl.load(tensor_scale_ptr)
    inverse = inverse_of(tensor_scale)
    block, blocks = column // 16 + tl.arange(0, COLUMNS // 16), columns // 16
    across = column + tl.arange(0, COLUMNS)
    for i in tl.static_range(16):
        row = first_row + i
        length = length_of(row, rows, columns)
        x = tl.reshape(strip[i], (COLUMNS // 16, 16))
        code, scale = scale_of_block(block_amax(x, 1), inverse)
        y = x * multiplier(scale, inverse)[:, None]
        if STOCHASTIC:
            y = round_stochastically(y, tl.reshape(words[i] & 0xFFFF, (COLUMNS // 16, 16)))
        if FORM == "image":
            if not STOCHASTIC:
                y = round_to_nearest(y)
            image = tl.reshape(image_of(y, scale[:, None], tensor_scale), (COLUMNS,))
            tl.store(data_ptr + row * stride + across, image, mask=across < length)
        else:
            first, second = tl.split(tl.reshape(y, (COLUMNS // 2, 2)))
            if STOCHASTIC:
                packed = pack(first, second)
            else:
                packed = pack_nearest(first, second, HARDWARE)
            byte = column // 2 + tl.arange(0, COLUMNS // 2)
            store_row(packed, code, byte, block, blocks, row, length, columns, data_ptr, scales_ptr, FORM)


@triton.jit
def _along_columns(
    strip, words, tensor_scale_ptr, first_row, column, rows, columns, stride, data_ptr, scales_ptr,
    STOCHASTIC: tl.constexpr, FORM: tl.constexpr, HARDWARE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast a strip in blocks of its 16 rows. Store an image at the offsets of x, and codes and scales transposed."""
    tensor_scale = tl.load(tensor_scale_ptr)
    inverse = inverse_of(tensor_scale)
    across = column + tl.arange(0, COLUMNS)
    inside = across < columns
    code, scale = scale_of_block(amax_across(strip).to(tl.float32, bitcast=True), inverse)
    factor = multiplier(scale, inverse)
    if FORM != "image":
        eight = tl.zeros((COLUMNS,), tl.int64)
    for j in tl.static_range(8):
        first, second = strip[2 * j] * factor, strip[2 * j + 1] * factor
        row = first_row + 2 * j
        if STOCHASTIC:
            first = round_stochastically(first, (words[2 * j] >> 16) & 0xFFFF)
            second = round_stochastically(second, (words[2 * j + 1] >> 16) & 0xFFFF)
        if FORM == "image":
            if not STOCHASTIC:
                first, second = round_to_nearest(first), round_to_nearest(second)
            # Store all 16 rows: the transform gives values to the padding of the last block.
            at = data_ptr + row * stride + across
            tl.store(at, image_of(first, scale, tensor_scale), mask=inside)
            tl.store(at + stride, image_of(second, scale, tensor_scale), mask=inside)
        else:
            if STOCHASTIC:
                packed = pack(first, second)
            else:
                packed = pack_nearest(first, second, HARDWARE)
            eight |= packed.to(tl.int64) << (8 * j)
    if FORM != "image":
        store_columns(eight, code, across, inside, first_row, rows, data_ptr, scales_ptr, FORM)


# These two are views into larger tensors, with any alignment.
@triton.jit(do_not_specialize=["signs_ptr", "draws_ptr"])
def _nvfp4_cast_kernel(
    x_ptr, row_factor_ptr, column_factor_ptr, row_scale_ptr, column_scale_ptr,
    row_data_ptr, row_scales_ptr, column_data_ptr, column_scales_ptr, rows, columns, stride, signs_ptr, draws_ptr,
    ends_ptr, groups, before, ALONG_ROWS: tl.constexpr, ALONG_COLUMNS: tl.constexpr, ROW_FACTOR: tl.constexpr,
    COLUMN_FACTOR: tl.constexpr, HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, FORM: tl.constexpr,
    HARDWARE: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first_row, column = tile_start(columns, 16, COLUMNS)
    group, start = 0, 0
    if GROUPS:
        group, start = group_of(first_row, ends_ptr, groups, GROUPS)
    strip = load_strip(
        x_ptr, row_factor_ptr, column_factor_ptr, first_row, column, rows, columns, ROW_FACTOR, COLUMN_FACTOR, COLUMNS
    )
    words = ()
    if STOCHASTIC:
        own_draws, row = draws_ptr + 4 * group, first_row - start
        for i in tl.static_range(16):
            words = words + (random_words(own_draws, row + i, column // 4, columns, COLUMNS // 4),)
    if ALONG_ROWS:
        _along_rows(
            strip, words, row_scale_ptr + group, first_row, column, rows, columns, stride,
            row_data_ptr + before, row_scales_ptr, STOCHASTIC, FORM, HARDWARE, COLUMNS,
        )  # fmt: skip
    if ALONG_COLUMNS:
        if HADAMARD:
            strip = hadamard(strip, tl.load(signs_ptr))
        _along_columns(
            strip, words, column_scale_ptr + group, first_row, column, rows, columns, stride,
            column_data_ptr + before, column_scales_ptr, STOCHASTIC, FORM, HARDWARE, COLUMNS,
        )  # fmt: skip


def _launches(
    parts: list[torch.Tensor],
    axis: int,
    row_factor: torch.Tensor | None,
    column_factor: torch.Tensor | None,
    row_scales: list[torch.Tensor],
    column_scales: list[torch.Tensor],
    signs: torch.Tensor | None,
    draws: list[torch.Tensor],
    ends: torch.Tensor | None,
    form: str,
) -> tuple[list[torch.Tensor], list[Launch]]:
    """Allocate the casts of the parts joined along ``axis``, and return them with a launch for each part."""
    whole = list(parts[0].shape)
    whole[axis] = sum(part.shape[axis] for part in parts)
    rows, columns = whole
    by_row = by_column = Cast(None, None)
    if row_scales:
        by_row = empty_cast(NVFP4_STORAGE, rows, columns, form, parts[0].device)
    if column_scales:
        by_column = empty_column_cast(NVFP4_STORAGE, round_up(rows, BLOCK), columns, form, parts[0].device)
    nothing, groups = [None] * len(parts), 0 if ends is None else ends.shape[0]
    launches, before = [], 0  # elements of the whole before a part: only images are cast in several parts
    for x, row_scale, column_scale, bits in zip(
        parts, row_scales or nothing, column_scales or nothing, draws or nothing
    ):
        tile = tile_columns(x.shape[1])
        launch = Launch(
            _nvfp4_cast_kernel,
            (cdiv(x.shape[0], BLOCK) * cdiv(x.shape[1], tile),),
            (
                x, row_factor, column_factor, row_scale, column_scale,
                *(as_bytes(t) for t in (*by_row, *by_column)), *x.shape, columns, signs, bits, ends, groups, before,
            ),
            dict(
                ALONG_ROWS=bool(row_scales), ALONG_COLUMNS=bool(column_scales), ROW_FACTOR=row_factor is not None,
                COLUMN_FACTOR=column_factor is not None, HADAMARD=signs is not None, STOCHASTIC=bits is not None,
                FORM=form, HARDWARE=converts_fp4(x), GROUPS=groups and next_power_of_2(groups), COLUMNS=tile,
                num_warps=WARPS,
            ),
        )  # fmt: skip
        if x.numel():
            launches.append(launch)
        before += x.numel() if axis == 0 else x.shape[1]
    return flat(*by_row, *by_column), launches


_nvfp4_cast = register_op(
    "nvfp4_cast(Tensor[] parts, int axis, Tensor? row_factor, Tensor? column_factor, Tensor[] row_scales,"
    " Tensor[] column_scales, Tensor? signs, Tensor[] draws, Tensor? ends, str form) -> Tensor[]",
    _launches,
)


def nvfp4_cast(
    parts: Sequence[torch.Tensor],
    tensor_scales: Mapping[int, Sequence[torch.Tensor]],
    form: str = "codes",
    *,
    signs: torch.Tensor | None = None,
    draws: Sequence[torch.Tensor] = (),
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
    axis: int = 0,
    ends: torch.Tensor | None = None,
) -> dict[int, Cast]:
    """Return the NVFP4 casts of X [R, C] in blocks of 16 along dimension 1, 0 or both, all from one read of X.

    Args:
        parts: X alone, bf16 or fp32 [R, C], C a multiple of 16. For the cast along dimension 0, rows are padded with
            zeros to a multiple of 16. Or, for form "image", several matrices of one dtype, all of them whole blocks
            along ``axis``, which joined are X.
        tensor_scales: for each dimension to cast along, 1 or 0, one fp32 number for each part, a power of two.
        form: with R' = R rounded up to a multiple of 16: "codes": uint8 codes, two a byte, with the reduced dimension
            last ([R, C / 2] along dimension 1, [C, R' / 2] along dimension 0) and row-major float8_e4m3fn scales
            [R, C / 16] and [C, R' / 16]; "blocked": the same codes, scales flat in the 128x4 layout; "image": bf16
            values, element * block scale * tensor scale, not transposed: [R, C] and [R', C].
        signs: int64, one number, from ``rng.seeds.sign_mask``. Transforms along dimension 0 before the cast along it.
            None skips the transform.
        draws: int64 [4] for each part, the key and position of the random bits with which every cast rounds
            stochastically (``mxtrain.rng.rounding.Draws``). Empty: rounds to nearest.
        row_factor: bf16 or fp32 [R], multiplied in first, in fp32. For a single matrix only.
        column_factor: bf16 or fp32 [C], likewise. Not for matrices side by side.
        axis: 0 for matrices one below the other, 1 for matrices side by side.
        ends: int32 [G], multiples of 16, the ends of groups of rows of a single matrix, for form "image". Each group is
            cast as a matrix of its own: tensor scales are fp32 [G], draws int64 [G, 4]. Rows beyond the last end: any
            values.

    Returns:
        (data, scales) for each dimension; scales is None for an image.
    """
    parts, factors = contiguous(*parts), contiguous(row_factor, column_factor)
    scales = [list(tensor_scales.get(dim, ())) for dim in (1, 0)]
    results = _nvfp4_cast(parts, axis, *factors, *scales, signs, list(draws), *contiguous(ends), form)
    return by_dim(results, tensor_scales, form)
