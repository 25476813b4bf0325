"""NVFP4 casts of a matrix along its rows, its columns, or both, from one read; and the maxima they need before.

Along rows it is cast as it is, along columns after the random Hadamard transform in blocks of 16 rows, if wanted; each
to nearest or stochastically. An output gradient [T, N] becomes the operands of dgrad and wgrad in this way, and an
input [T, D], with rho as factor of its rows, that of wgrad.

A program holds 16 rows as 16 tensors, so that the transform, block maxima along columns and packing of two rows are
elementwise: nothing passes between threads.

Bytes an element: 2 or 4 read; 1/2 + 1/16 (codes and scales) or 2 (image) written for each of the two casts. The maxima
are a pass of their own, which reads the matrix once more: 2 or 4.
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from mxtrain.errors import require_one_of
from mxtrain.kernels.cast_results import FORMS, NVFP4_STORAGE, as_bytes, empty_cast
from mxtrain.kernels.checks import check_matrix, check_number, check_vector
from mxtrain.kernels.device import converts_fp4
from mxtrain.kernels.integers import cdiv, next_power_of_2, round_up
from mxtrain.kernels.launch import Launch, register_op
from mxtrain.kernels.mxfp8.arithmetic import block_amax, blocked_offset
from mxtrain.kernels.nvfp4.arithmetic import (
    BLOCK,
    amax_across,
    hadamard,
    image_of,
    inverse_of,
    length_of,
    load_strip,
    multiplier,
    pack,
    pack_nearest,
    random_words,
    round_stochastically,
    round_to_nearest,
    scale_of_block,
)
from mxtrain.rng.rounding_position import MAX_ELEMENTS, Draws

# Of a program: a thread has four columns of all 16 rows. With eight there are too few registers: images of both casts
# took 75 instead of 62 us at 16384 x 2048 (H200).
COLUMNS, WARPS = 128, 1


@triton.jit
def _along_rows(
    strip, words, tensor_scale_ptr, first_row, column, rows, columns, data_ptr, scales_ptr,
    STOCHASTIC: tl.constexpr, FORM: tl.constexpr, HARDWARE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast each row of a strip in blocks of 16 columns and store it."""
    tensor_scale = tl.load(tensor_scale_ptr)
    inverse = inverse_of(tensor_scale)
    block = column // 16 + tl.arange(0, COLUMNS // 16)
    blocks = columns // 16
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
            tl.store(data_ptr + row * columns + across, image, mask=across < length)
        else:
            first, second = tl.split(tl.reshape(y, (COLUMNS // 2, 2)))
            if STOCHASTIC:
                packed = pack(first, second)
            else:
                packed = pack_nearest(first, second, HARDWARE)
            byte = column // 2 + tl.arange(0, COLUMNS // 2)
            tl.store(data_ptr + row * (columns // 2) + byte, packed, mask=byte < length // 2)
            if FORM == "blocked":
                scale_offsets = blocked_offset(row, block, blocks)
            else:
                scale_offsets = row * blocks + block
            tl.store(scales_ptr + scale_offsets, code, mask=block < length // 16)


@triton.jit
def _along_columns(
    strip, words, tensor_scale_ptr, first_row, column, rows, columns, data_ptr, scales_ptr,
    STOCHASTIC: tl.constexpr, FORM: tl.constexpr, HARDWARE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast a strip in blocks of its 16 rows. An image is stored as it lies, codes and scales transposed."""
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
            # All 16 rows: transformed, those that fill up the last block have values.
            at = data_ptr + row * columns + across
            tl.store(at, image_of(first, scale, tensor_scale), mask=inside)
            tl.store(at + columns, image_of(second, scale, tensor_scale), mask=inside)
        else:
            if STOCHASTIC:
                packed = pack(first, second)
            else:
                packed = pack_nearest(first, second, HARDWARE)
            eight |= packed.to(tl.int64) << (8 * j)
    if FORM != "image":
        # Sixteen rows are eight bytes of a column's codes.
        block, blocks = first_row // 16, (rows + 15) // 16
        across = across.to(tl.int64)
        tl.store(data_ptr.to(tl.pointer_type(tl.int64)) + across * blocks + block, eight, mask=inside)
        if FORM == "blocked":
            scale_offsets = blocked_offset(across, block, blocks)
        else:
            scale_offsets = across * blocks + block
        tl.store(scales_ptr + scale_offsets, code, mask=inside)


# What these two point to may be anywhere in a larger tensor.
@triton.jit(do_not_specialize=["signs_ptr", "draws_ptr"])
def _nvfp4_cast_kernel(
    x_ptr, row_factor_ptr, column_factor_ptr, row_scale_ptr, column_scale_ptr,
    row_data_ptr, row_scales_ptr, column_data_ptr, column_scales_ptr, rows, columns, signs_ptr, draws_ptr,
    ALONG_ROWS: tl.constexpr, ALONG_COLUMNS: tl.constexpr, ROW_FACTOR: tl.constexpr, COLUMN_FACTOR: tl.constexpr,
    HADAMARD: tl.constexpr, ROWS_STOCHASTIC: tl.constexpr, COLUMNS_STOCHASTIC: tl.constexpr,
    FORM: tl.constexpr, HARDWARE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs take neighbouring tiles of the same rows.
    tiles = (columns + COLUMNS - 1) // COLUMNS
    first_row = (tl.program_id(0) // tiles).to(tl.int64) * 16
    column = (tl.program_id(0) % tiles) * COLUMNS
    strip = load_strip(
        x_ptr, row_factor_ptr, column_factor_ptr, first_row, column, rows, columns, ROW_FACTOR, COLUMN_FACTOR, COLUMNS
    )
    words = ()
    if ROWS_STOCHASTIC or COLUMNS_STOCHASTIC:
        for i in tl.static_range(16):
            words = words + (random_words(draws_ptr, first_row + i, column // 4, columns, COLUMNS // 4),)
    if ALONG_ROWS:
        _along_rows(
            strip, words, row_scale_ptr, first_row, column, rows, columns, row_data_ptr, row_scales_ptr,
            ROWS_STOCHASTIC, FORM, HARDWARE, COLUMNS,
        )  # fmt: skip
    if ALONG_COLUMNS:
        if HADAMARD:
            strip = hadamard(strip, tl.load(signs_ptr))
        _along_columns(
            strip, words, column_scale_ptr, first_row, column, rows, columns, column_data_ptr, column_scales_ptr,
            COLUMNS_STOCHASTIC, FORM, HARDWARE, COLUMNS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["signs_ptr"])
def _nvfp4_amax_kernel(
    x_ptr, row_factor_ptr, column_factor_ptr, amax_ptr, transformed_ptr, rows, columns, signs_ptr,
    ROW_FACTOR: tl.constexpr, COLUMN_FACTOR: tl.constexpr, HADAMARD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tiles = (columns + COLUMNS - 1) // COLUMNS
    first_row = (tl.program_id(0) // tiles).to(tl.int64) * 16
    column = (tl.program_id(0) % tiles) * COLUMNS
    strip = load_strip(
        x_ptr, row_factor_ptr, column_factor_ptr, first_row, column, rows, columns, ROW_FACTOR, COLUMN_FACTOR, COLUMNS
    )
    tl.store(amax_ptr + tl.program_id(0), tl.max(amax_across(strip), 0).to(tl.float32, bitcast=True))
    if HADAMARD:
        transformed = tl.max(amax_across(hadamard(strip, tl.load(signs_ptr))), 0)
        tl.store(transformed_ptr + tl.program_id(0), transformed.to(tl.float32, bitcast=True))


def tile_columns(columns: int) -> int:
    """Columns of a program, which one warp works on."""
    return min(COLUMNS, next_power_of_2(columns))


def _implementation(
    x: torch.Tensor,
    row_factor: torch.Tensor | None,
    column_factor: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    column_scale: torch.Tensor | None,
    signs: torch.Tensor | None,
    draws: torch.Tensor | None,
    stochastic: list[int],
    form: str,
) -> tuple[list[torch.Tensor], Launch | None]:
    rows, columns = x.shape
    by_row = by_column = (None, None)
    if row_scale is not None:
        by_row = empty_cast(NVFP4_STORAGE, rows, columns, form, x.device)
    if column_scale is not None and form == "image":
        by_column = empty_cast(NVFP4_STORAGE, round_up(rows, BLOCK), columns, form, x.device)
    elif column_scale is not None:
        by_column = empty_cast(NVFP4_STORAGE, columns, round_up(rows, BLOCK), form, x.device)
    results = [t for t in (*by_row, *by_column) if t is not None]
    if x.numel() == 0:
        return results, None
    tile = tile_columns(columns)
    launch = Launch(
        _nvfp4_cast_kernel,
        (cdiv(rows, BLOCK) * cdiv(columns, tile),),
        (
            x, row_factor, column_factor, row_scale, column_scale,
            *(as_bytes(t) for t in (*by_row, *by_column)), rows, columns,
            signs, draws,
        ),
        dict(
            ALONG_ROWS=row_scale is not None, ALONG_COLUMNS=column_scale is not None,
            ROW_FACTOR=row_factor is not None, COLUMN_FACTOR=column_factor is not None, HADAMARD=signs is not None,
            ROWS_STOCHASTIC=1 in stochastic, COLUMNS_STOCHASTIC=0 in stochastic,
            FORM=form, HARDWARE=converts_fp4(x), COLUMNS=tile, num_warps=WARPS, enable_fp_fusion=False,
        ),
    )  # fmt: skip
    return results, launch


def _amax_implementation(
    x: torch.Tensor, row_factor: torch.Tensor | None, column_factor: torch.Tensor | None, signs: torch.Tensor | None
) -> tuple[list[torch.Tensor], Launch | None]:
    rows, columns = x.shape
    tile = tile_columns(columns) if columns else 1
    programs = cdiv(rows, BLOCK) * cdiv(columns, tile)
    amax = torch.empty(programs, dtype=torch.float32, device=x.device)
    transformed = None if signs is None else torch.empty_like(amax)
    results = [amax] if signs is None else [amax, transformed]
    if x.numel() == 0:
        return results, None
    launch = Launch(
        _nvfp4_amax_kernel,
        (programs,),
        (x, row_factor, column_factor, amax, transformed, rows, columns, signs),
        dict(
            ROW_FACTOR=row_factor is not None, COLUMN_FACTOR=column_factor is not None, HADAMARD=signs is not None,
            COLUMNS=tile, num_warps=WARPS, enable_fp_fusion=False,
        ),
    )  # fmt: skip
    return results, launch


_nvfp4_cast = register_op(
    "nvfp4_cast(Tensor x, Tensor? row_factor, Tensor? column_factor, Tensor? row_scale, Tensor? column_scale,"
    " Tensor? signs, Tensor? draws, int[] stochastic, str form) -> Tensor[]",
    _implementation,
)
_nvfp4_amax = register_op(
    "nvfp4_amax(Tensor x, Tensor? row_factor, Tensor? column_factor, Tensor? signs) -> Tensor[]", _amax_implementation
)


def nvfp4_cast(
    x: torch.Tensor,
    tensor_scales: Mapping[int, torch.Tensor],
    form: str = "codes",
    *,
    signs: torch.Tensor | None = None,
    draws: torch.Tensor | None = None,
    stochastic: Sequence[int] = (1, 0),
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
    """NVFP4 casts of x [R, C] in blocks of 16 along dimension 1, 0 or both, all from one read of x.

    Args:
        x: bf16 or fp32 [R, C], C a multiple of 16. Rows are filled up with zeros to a multiple of 16 for the cast along
            dimension 0.
        tensor_scales: for each dimension to cast along, 1 or 0, one fp32 number on the device of x, a power of two.
        form: with R' = R rounded up to a multiple of 16: "codes": uint8 codes, two a byte, with the reduced dimension
            last ([R, C / 2] along dimension 1, [C, R' / 2] along dimension 0) and row-major float8_e4m3fn scales
            [R, C / 16] and [C, R' / 16]; "blocked": the same codes, scales flat in the 128x4 layout; "image": bf16
            values, element * block scale * tensor scale, not transposed: [R, C] and [R', C].
        signs: int64, one number, from ``rng.seeds.sign_mask``: transform along dimension 0 before the cast along
            it. None: no transform.
        draws: what random bits follow from (``Draws``), int64 [4]. None: every cast is to nearest.
        stochastic: with ``draws``, the dimensions along which casts round stochastically.
        row_factor: bf16 or fp32 [R], multiplied in first, in fp32.
        column_factor: bf16 or fp32 [C], likewise.

    Returns:
        For each of the dimensions (data, scales); scales is None for an image.

    Raises:
        ValueError: for another shape, dtype or device.
    """
    require_one_of("form", form, FORMS)
    dims = sorted(tensor_scales, reverse=True)
    if not dims or not {*dims} <= {0, 1}:
        raise ValueError(f"tensor_scales for dimensions {dims}: expected 0, 1 or both")
    _check(x, row_factor, column_factor)
    for dim in dims:
        check_number(f"tensor_scales[{dim}]", tensor_scales[dim], torch.float32, x.device)
    if signs is not None:
        check_number("signs", signs, torch.int64, x.device)
    if draws is None:
        stochastic = ()
    else:
        check_vector("draws", draws, len(Draws), x.device, (torch.int64,))
        if x.numel() > MAX_ELEMENTS:
            raise ValueError(f"x {tuple(x.shape)}: more than the {MAX_ELEMENTS} elements that have random bits")
    results = _nvfp4_cast(
        x.contiguous(),
        None if row_factor is None else row_factor.contiguous(),
        None if column_factor is None else column_factor.contiguous(),
        tensor_scales.get(1), tensor_scales.get(0), signs,
        draws, [dim for dim in dims if dim in stochastic], form,
    )  # fmt: skip
    if form == "image":
        pairs = [(data, None) for data in results]
    else:
        pairs = list(zip(results[::2], results[1::2]))
    return dict(zip(dims, pairs))


def nvfp4_amax(
    x: torch.Tensor,
    signs: torch.Tensor | None = None,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Largest magnitudes of x and, with ``signs``, of x transformed along dimension 0, from one read of x.

    Arguments as of ``nvfp4_cast``.

    Returns:
        Two fp32 vectors, the second None without ``signs``, each of the maxima of parts of the matrix: NaN if a part
        holds one. They are meant for ``reference.nvfp4.dynamic_tensor_scale``.

    Raises:
        ValueError: for another shape, dtype or device.
    """
    _check(x, row_factor, column_factor)
    if signs is not None:
        check_number("signs", signs, torch.int64, x.device)
    results = _nvfp4_amax(
        x.contiguous(),
        None if row_factor is None else row_factor.contiguous(),
        None if column_factor is None else column_factor.contiguous(),
        signs,
    )
    return results[0], None if signs is None else results[1]


def _check(x: torch.Tensor, row_factor: torch.Tensor | None, column_factor: torch.Tensor | None) -> None:
    check_matrix("x", x)
    if x.shape[1] % BLOCK:
        raise ValueError(f"x {tuple(x.shape)}: expected a row length that is a multiple of {BLOCK}")
    for name, factor, length in (("row_factor", row_factor, x.shape[0]), ("column_factor", column_factor, x.shape[1])):
        if factor is not None:
            check_vector(name, factor, length, x.device)
