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

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import Cast, as_bytes, block_amax, by_dim, empty_casts, flat, tile_start
from mxtrain.formats.mx.arithmetic import round_to_element
from mxtrain.formats.nvfp4.arithmetic import (
    BLOCK,
    STORAGE,
    amax_across,
    load_draws,
    pack,
    pack_nearest,
    random_words,
    round_stochastically,
)
from mxtrain.formats.nvfp4.four_over_six import registers, scales_of_blocks
from mxtrain.formats.nvfp4.strip import (
    WARPS,
    group_of,
    hadamard,
    length_of,
    load_strip,
    store_columns,
    store_row,
    tile_columns,
)
from mxtrain.launch.launch import Launch, cdiv, contiguous, converts_fp4, next_power_of_2, register_op

# Of a thread that makes both images of a gradient. With the 205 that the compiler takes, fewer programs run at a time:
# 99.9 instead of 90.5 us at 16384 x 2048 (H200).
REGISTERS = 168


@triton.jit
def _rounded(y, words, UPPER: tl.constexpr, STOCHASTIC: tl.constexpr):
    if STOCHASTIC:
        y = round_stochastically(y, words, UPPER)
    return y


@triton.jit
def _image(y, scale, STOCHASTIC: tl.constexpr):
    """Image of y from ``_rounded``, exact in bf16."""
    if not STOCHASTIC:
        y = round_to_element(y, "e2m1")
    return (y * scale).to(tl.bfloat16)


@triton.jit
def _packed(first, second, STOCHASTIC: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes of numbers from ``_rounded``, two a byte."""
    if STOCHASTIC:
        return pack(first, second)
    else:
        return pack_nearest(first, second, HARDWARE)


# These two are views into larger tensors, with any alignment.
@triton.jit(do_not_specialize=["signs_ptr", "draws_ptr"])
def _nvfp4_cast_kernel(
    x_ptr, row_factor_ptr, column_factor_ptr, tensor_scales_ptr, slot,
    row_data_ptr, row_scales_ptr, column_data_ptr, column_scales_ptr, rows, columns, stride, signs_ptr, draws_ptr,
    ends_ptr, groups, before, ALONG_ROWS: tl.constexpr, ALONG_COLUMNS: tl.constexpr, ROW_FACTOR: tl.constexpr,
    COLUMN_FACTOR: tl.constexpr, HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, FORM: tl.constexpr,
    HARDWARE: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, ERROR: tl.constexpr,
):  # fmt: skip
    """Cast a strip in blocks of its 16 rows, in blocks of 16 columns of each row, or both.

    The cast along columns stores an image at the offsets of x, and codes and scales transposed. One loop over the rows
    makes both casts: random words need not stay in registers, and the two chains of instructions run side by side.
    """
    first_row, column = tile_start(columns, 16, COLUMNS)
    group, start = 0, 0
    if GROUPS:
        group, start = group_of(first_row, ends_ptr, groups, GROUPS)
    tensor_scales_ptr += (slot // 16 + group) * SCALES
    # Every load comes before the first store, across which the compiler moves no load.
    if ALONG_ROWS:
        row_scale = tl.load(tensor_scales_ptr)
    if ALONG_COLUMNS:
        column_scale = tl.load(tensor_scales_ptr + SCALES - 1)
    if HADAMARD:
        signs = tl.load(signs_ptr)
    if STOCHASTIC:
        draws = load_draws(draws_ptr + 4 * group)
        four = (((first_row - start) * columns + column) // 4 + tl.arange(0, COLUMNS // 4)).to(tl.uint32)
    across, byte = column + tl.arange(0, COLUMNS), column // 2 + tl.arange(0, COLUMNS // 2)
    block, blocks = column // 16 + tl.arange(0, COLUMNS // 16), columns // 16
    if FORM == "image":
        before += first_row * stride + column
        if ALONG_ROWS:
            row_data_ptr += before
        if ALONG_COLUMNS:
            column_data_ptr += before
    if ALONG_ROWS and ERROR != "":
        # All rows at once: the code makes one choice of scales, and a thread holds half a block of bf16 numbers.
        below, right = tl.arange(0, 16)[:, None], tl.arange(0, COLUMNS)
        row = first_row + below
        inside = (row < rows) & (across < columns)
        start_ptr = x_ptr + first_row * columns + column  # offsets from here fit into 32 bits
        x = tl.load(start_ptr + (below * columns + right), mask=inside, other=0.0).to(tl.float32)
        if ROW_FACTOR:
            x *= tl.load(row_factor_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
        if COLUMN_FACTOR:
            x *= tl.load(column_factor_ptr + across, mask=across < columns, other=0.0).to(tl.float32)
        if ROW_FACTOR or COLUMN_FACTOR:
            x = tl.where(inside, x, 0.0)
        x = tl.reshape(x, (16, COLUMNS // 16, 16))
        code, factor, scale = scales_of_blocks(x, block_amax(x, 2), row_scale, "last", ERROR)
        y = x * factor[:, :, None]
        if FORM == "image":
            image = tl.reshape(_image(y, scale[:, :, None], False), (16, COLUMNS))
            tl.store(row_data_ptr + (below * stride + right), image, mask=inside)
        else:
            first, second = tl.split(tl.reshape(y, (16, COLUMNS // 2, 2)))
            packed, length = pack_nearest(first, second, HARDWARE), length_of(row, rows, columns)
            store_row(packed, code, byte, block, blocks, row, length, columns, row_data_ptr, row_scales_ptr, FORM)
    strip = load_strip(
        x_ptr, row_factor_ptr, column_factor_ptr, first_row, column, rows, columns, ROW_FACTOR, COLUMN_FACTOR, COLUMNS
    )
    if ALONG_COLUMNS:
        inside = across < columns
        transformed = strip
        if HADAMARD:
            exact: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16 and not (ROW_FACTOR or COLUMN_FACTOR)
            transformed = hadamard(strip, signs, exact)
        amax = amax_across(transformed, FORM != "image").to(tl.float32, bitcast=True)
        code_of_column, column_factor, scale_of_column = scales_of_blocks(
            transformed, amax, column_scale, "across", ERROR
        )
        eight, even = tl.zeros((COLUMNS,), tl.int64), transformed[0]
    for i in tl.static_range(16):
        row, words = first_row + i, tl.zeros((COLUMNS,), tl.int32)
        if STOCHASTIC:
            words = random_words(draws, four)
            four = (four + columns // 4).to(tl.uint32)
        if ALONG_ROWS and ERROR == "":
            length = length_of(row, rows, columns)
            x = tl.reshape(strip[i], (COLUMNS // 16, 16))
            code, factor, scale = scales_of_blocks(x, block_amax(x, 1), row_scale, "last", "")
            y = _rounded(x * factor[:, None], tl.reshape(words, (COLUMNS // 16, 16)), False, STOCHASTIC)
            if FORM == "image":
                image = tl.reshape(_image(y, scale[:, None], STOCHASTIC), (COLUMNS,))
                tl.store(row_data_ptr + tl.arange(0, COLUMNS), image, mask=across < length)
                row_data_ptr += stride
            else:
                first, second = tl.split(tl.reshape(y, (COLUMNS // 2, 2)))
                packed = _packed(first, second, STOCHASTIC, HARDWARE)
                store_row(packed, code, byte, block, blocks, row, length, columns, row_data_ptr, row_scales_ptr, FORM)
        if ALONG_COLUMNS:
            y = _rounded(transformed[i] * column_factor, words, True, STOCHASTIC)
            if FORM == "image":
                # Store all 16 rows: the transform gives values to the padding of the last block.
                image = _image(y, scale_of_column, STOCHASTIC)
                tl.store(column_data_ptr + tl.arange(0, COLUMNS), image, mask=inside)
                column_data_ptr += stride
            elif i % 2:
                eight |= _packed(even, y, STOCHASTIC, HARDWARE).to(tl.int64) << (4 * (i - 1))
            else:
                even = y
    if ALONG_COLUMNS and FORM != "image":
        store_columns(eight, code_of_column, across, inside, first_row, rows, column_data_ptr, column_scales_ptr, FORM)


def _launches(
    parts, axis: int, row_factor, column_factor, tensor_scales, dims, signs, draws, ends, form: str, error: str = ""
) -> tuple[list[torch.Tensor], list[Launch]]:
    """Allocate the casts of the parts joined along ``axis``, and return them with a launch for each part."""
    whole = list(parts[0].shape)
    whole[axis] = sum(part.shape[axis] for part in parts)
    results = empty_casts(STORAGE, *whole, 1 in dims, 0 in dims, form, parts[0].device, pads_image=True)
    groups = 0 if ends is None else ends.shape[0]
    launches, before = [], 0  # elements of the whole before a part: only images are cast in several parts
    for i, (x, bits) in enumerate(zip(parts, draws or [None] * len(parts))):
        tile = tile_columns(x.shape[1], error)
        limit = {"maxnreg": REGISTERS} if bits is not None and len(dims) == 2 and form == "image" else {}
        if error:
            limit = {"maxnreg": registers(tile, WARPS)}
        launch = Launch(
            _nvfp4_cast_kernel,
            (cdiv(x.shape[0], BLOCK) * cdiv(x.shape[1], tile),),
            (
                x, row_factor, column_factor, tensor_scales, 16 * i,  # as in ``tensor_scale.py``
                *map(as_bytes, results), *x.shape, whole[1], signs, bits, ends, groups, before,
            ),
            dict(
                ALONG_ROWS=1 in dims, ALONG_COLUMNS=0 in dims, ROW_FACTOR=row_factor is not None,
                COLUMN_FACTOR=column_factor is not None, HADAMARD=signs is not None, STOCHASTIC=bits is not None,
                FORM=form, HARDWARE=converts_fp4(x), SCALES=tensor_scales.shape[1],
                GROUPS=groups and next_power_of_2(groups), COLUMNS=tile, ERROR=error, num_warps=WARPS,
                **limit,
            ),
        )  # fmt: skip
        if x.numel():
            launches.append(launch)
        before += x.numel() if axis == 0 else x.shape[1]
    return flat(*results), launches


CAST = register_op(
    "nvfp4_cast(Tensor[] parts, int axis, Tensor? row_factor, Tensor? column_factor, Tensor tensor_scales,"
    " int[] dims, Tensor? signs, Tensor[] draws, Tensor? ends, str form, str error='') -> Tensor[]",
    _launches,
)


def nvfp4_cast(
    parts: Sequence[torch.Tensor],
    tensor_scales: torch.Tensor,
    form: str = "codes",
    dims: tuple[int, ...] = (1, 0),
    *,
    signs: torch.Tensor | None = None,
    draws: Sequence[torch.Tensor] = (),
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
    axis: int = 0,
    ends: torch.Tensor | None = None,
    error: str = "",
) -> dict[int, Cast]:
    """Return the NVFP4 casts of X [R, C] in blocks of 16 along dimension 1, 0 or both, all from one read of X.

    Args:
        parts: X alone, bf16 or fp32 [R, C], C a multiple of 16. For the cast along dimension 0, rows are padded with
            zeros to a multiple of 16. Or, for form "image", several matrices of one dtype, all of them whole blocks
            along ``axis``, which joined are X.
        tensor_scales: powers of two, one for each part, fp32 [n, 1], or [n, 2] for the casts along dimensions 1 and 0.
        form: with R' = R rounded up to a multiple of 16: "codes": uint8 codes, two a byte, with the reduced dimension
            last ([R, C / 2] along dimension 1, [C, R' / 2] along dimension 0) and row-major float8_e4m3fn scales
            [R, C / 16] and [C, R' / 16]; "blocked": the same codes, scales flat in the 128x4 layout; "image": bf16
            values, element * block scale * tensor scale, not transposed: [R, C] and [R', C].
        dims: the dimensions to cast along.
        signs: int64, one number, from ``rng.seeds.sign_mask``. Transforms along dimension 0 before the cast along it.
            None skips the transform.
        draws: as in ``CastSpec``, for every cast. Empty: rounds to nearest.
        row_factor, column_factor, axis: as in ``CastSpec``. Factors are bf16 or fp32. A row factor is for a single
            matrix; matrices side by side have no column factor.
        ends: as in ``CastSpec``, for a single matrix and form "image". Tensor scales are then [G, 1 or 2].
        error: "mae" or "mse": rounds to nearest with four over six, whose ``error`` that is. Tensor scales are then
            replaced by largest magnitudes, and an image is element * block scale.

    Returns:
        (data, scales) for each dimension; scales is None for an image.
    """
    parts, factors = contiguous(*parts), contiguous(row_factor, column_factor)
    scales = tensor_scales.contiguous()
    results = CAST(parts, axis, *factors, scales, dims, signs, list(draws), *contiguous(ends), form, error)
    return by_dim(results, dims, form)
