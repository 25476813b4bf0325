"""NVFP4 casts of a matrix along its rows, its columns, or both, from one read.

Along columns the random Hadamard transform in blocks of 16 rows can come first. Each cast rounds to nearest or
stochastically. An output gradient [T, N] becomes the operands of dgrad and wgrad in this way, and an input [T, D] with
rho as row factor becomes the operand of wgrad.

Several matrices can be cast into one image: each is read and written once, and nothing is copied. Every part has its
own tensor scale, its own random bits, and the bits that it has alone. One image holds them because its values include
the tensor scales; codes would need one scale for all.

Bytes per element: 2 or 4 read; 1/2 + 1/16 (codes and scales) or 2 (image) written for each of the two casts.
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from mxtrain.custom_op import untraced
from mxtrain.errors import require_one_of
from mxtrain.kernels.blocks import block_amax, tile_start
from mxtrain.kernels.cast_results import (
    FORMS,
    NVFP4_STORAGE,
    Cast,
    as_bytes,
    by_dim,
    empty_cast,
    empty_column_cast,
    flat,
)
from mxtrain.kernels.checks import check_number, check_parts, check_vector, check_whole_blocks, contiguous_factors
from mxtrain.kernels.device import converts_fp4
from mxtrain.kernels.integers import cdiv, round_up
from mxtrain.kernels.launch import Launch, register_op
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
from mxtrain.kernels.nvfp4.strip import WARPS, hadamard, length_of, load_strip, store_columns, store_row, tile_columns
from mxtrain.kernels.nvfp4.tensor_scale import contiguous_operands
from mxtrain.rng.rounding import MAX_ELEMENTS, Draws


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
    ALONG_ROWS: tl.constexpr, ALONG_COLUMNS: tl.constexpr, ROW_FACTOR: tl.constexpr, COLUMN_FACTOR: tl.constexpr,
    HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, FORM: tl.constexpr, HARDWARE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first_row, column = tile_start(columns, 16, COLUMNS)
    strip = load_strip(
        x_ptr, row_factor_ptr, column_factor_ptr, first_row, column, rows, columns, ROW_FACTOR, COLUMN_FACTOR, COLUMNS
    )
    words = ()
    if STOCHASTIC:
        for i in tl.static_range(16):
            words = words + (random_words(draws_ptr, first_row + i, column // 4, columns, COLUMNS // 4),)
    if ALONG_ROWS:
        _along_rows(
            strip, words, row_scale_ptr, first_row, column, rows, columns, stride, row_data_ptr, row_scales_ptr,
            STOCHASTIC, FORM, HARDWARE, COLUMNS,
        )  # fmt: skip
    if ALONG_COLUMNS:
        if HADAMARD:
            strip = hadamard(strip, tl.load(signs_ptr))
        _along_columns(
            strip, words, column_scale_ptr, first_row, column, rows, columns, stride,
            column_data_ptr, column_scales_ptr, STOCHASTIC, FORM, HARDWARE, COLUMNS,
        )  # fmt: skip


def _cast_one(
    x: torch.Tensor,
    row_factor: torch.Tensor | None,
    column_factor: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    column_scale: torch.Tensor | None,
    signs: torch.Tensor | None,
    draws: torch.Tensor | None,
    form: str,
) -> tuple[list[torch.Tensor], Launch | None]:
    rows, columns = x.shape
    by_row = by_column = (None, None)
    if row_scale is not None:
        by_row = empty_cast(NVFP4_STORAGE, rows, columns, form, x.device)
    if column_scale is not None:
        by_column = empty_column_cast(NVFP4_STORAGE, round_up(rows, BLOCK), columns, form, x.device)
    launch = _launch(x, row_factor, column_factor, row_scale, column_scale, by_row, by_column, signs, draws, form)
    return flat(*by_row, *by_column), launch


def _cast_joined(
    x: torch.Tensor,
    others: list[torch.Tensor],
    axis: int,
    column_factor: torch.Tensor | None,
    row_scales: list[torch.Tensor],
    column_scales: list[torch.Tensor],
    signs: torch.Tensor | None,
    draws: list[torch.Tensor],
) -> tuple[list[torch.Tensor], tuple[Launch, ...]]:
    parts = [x, *others]
    by_row = by_column = None
    row_places = column_places = nothing = [None] * len(parts)
    if row_scales:
        by_row, row_places = places(parts, axis)
    if column_scales:
        by_column, column_places = places(parts, axis, BLOCK)
    launches = [
        _launch(
            part, None, column_factor, row_scale, column_scale, (row_place, None), (column_place, None), signs, bits,
            "image",
        )
        for part, row_place, row_scale, column_place, column_scale, bits in zip(
            parts, row_places, row_scales or nothing, column_places, column_scales or nothing, draws or nothing
        )
    ]  # fmt: skip
    return flat(by_row, by_column), tuple(filter(None, launches))


def places(parts: list[torch.Tensor], axis: int, multiple: int = 1) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Allocate the image of all parts, its rows rounded up to a multiple; return it and the place of every part."""
    sizes = [part.shape[axis] for part in parts]
    rows, columns = (sum(sizes), parts[0].shape[1]) if axis == 0 else (parts[0].shape[0], sum(sizes))
    image = torch.empty(round_up(rows, multiple), columns, dtype=torch.bfloat16, device=parts[0].device)
    return image, list(image.split(sizes, axis))


def _launch(
    x: torch.Tensor,
    row_factor: torch.Tensor | None,
    column_factor: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    column_scale: torch.Tensor | None,
    by_row: tuple[torch.Tensor | None, torch.Tensor | None],
    by_column: tuple[torch.Tensor | None, torch.Tensor | None],
    signs: torch.Tensor | None,
    draws: torch.Tensor | None,
    form: str,
) -> Launch | None:
    """Return the launch that stores the casts of x; None if x is empty. An image may be columns of a wider matrix."""
    if x.numel() == 0:
        return None
    rows, columns = x.shape
    image = by_column[0] if row_scale is None else by_row[0]
    tile = tile_columns(columns)
    return Launch(
        _nvfp4_cast_kernel,
        (cdiv(rows, BLOCK) * cdiv(columns, tile),),
        (
            x, row_factor, column_factor, row_scale, column_scale,
            *(as_bytes(t) for t in (*by_row, *by_column)), rows, columns, image.stride(0),
            signs, draws,
        ),
        dict(
            ALONG_ROWS=row_scale is not None, ALONG_COLUMNS=column_scale is not None,
            ROW_FACTOR=row_factor is not None, COLUMN_FACTOR=column_factor is not None, HADAMARD=signs is not None,
            STOCHASTIC=draws is not None, FORM=form, HARDWARE=converts_fp4(x), COLUMNS=tile, num_warps=WARPS,
            enable_fp_fusion=False,
        ),
    )  # fmt: skip


_nvfp4_cast = register_op(
    "nvfp4_cast(Tensor x, Tensor? row_factor, Tensor? column_factor, Tensor? row_scale, Tensor? column_scale,"
    " Tensor? signs, Tensor? draws, str form) -> Tensor[]",
    _cast_one,
)
_nvfp4_joined_cast = register_op(
    "nvfp4_joined_cast(Tensor x, Tensor[] others, int axis, Tensor? column_factor, Tensor[] row_scales,"
    " Tensor[] column_scales, Tensor? signs, Tensor[] draws) -> Tensor[]",
    _cast_joined,
)


def nvfp4_cast(
    x: torch.Tensor | Sequence[torch.Tensor],
    tensor_scales: Mapping[int, torch.Tensor | Sequence[torch.Tensor]],
    form: str = "codes",
    *,
    signs: torch.Tensor | None = None,
    draws: torch.Tensor | Sequence[torch.Tensor] | None = None,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
    axis: int = 0,
) -> dict[int, Cast]:
    """Return the NVFP4 casts of x [R, C] in blocks of 16 along dimension 1, 0 or both, all from one read of x.

    Args:
        x: bf16 or fp32 [R, C], C a multiple of 16. For the cast along dimension 0, rows are padded with zeros to a
            multiple of 16. Or several matrices of one dtype, all of them whole blocks along ``axis``, whose images are
            joined: ``form`` must be "image", and ``tensor_scales`` and ``draws`` have one tensor for each matrix.
        tensor_scales: for each dimension to cast along, 1 or 0, one fp32 number on the device of x, a power of two.
        form: with R' = R rounded up to a multiple of 16: "codes": uint8 codes, two a byte, with the reduced dimension
            last ([R, C / 2] along dimension 1, [C, R' / 2] along dimension 0) and row-major float8_e4m3fn scales
            [R, C / 16] and [C, R' / 16]; "blocked": the same codes, scales flat in the 128x4 layout; "image": bf16
            values, element * block scale * tensor scale, not transposed: [R, C] and [R', C].
        signs: int64, one number, from ``rng.seeds.sign_mask``. Transforms along dimension 0 before the cast along it.
            None skips the transform.
        draws: int64 [4], the key and position of the random bits with which every cast rounds stochastically
            (``Draws``). None rounds to nearest.
        row_factor: bf16 or fp32 [R], multiplied in first, in fp32. For a single matrix only.
        column_factor: bf16 or fp32 [C], likewise. Not for matrices side by side.
        axis: 0 for matrices one below the other, 1 for matrices side by side.

    Returns:
        (data, scales) for each dimension; scales is None for an image.

    Raises:
        ValueError: for another shape, dtype or device.
    """
    dims = sorted(tensor_scales, reverse=True)
    if not dims or not {*dims} <= {0, 1}:
        raise ValueError(f"tensor_scales for dimensions {dims}: expected 0, 1 or both")
    scales = tensor_scales.get(1), tensor_scales.get(0)
    if isinstance(x, torch.Tensor):
        results = _checked_cast(x, row_factor, column_factor, *scales, signs, draws, form)
    else:
        require_one_of("form", form, ("image",))
        results = _checked_joined_cast(list(x), axis, column_factor, *map(_listed, (*scales, draws)), signs)
    return by_dim(results, dims, form)


def _listed(tensors: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
    return list(tensors or ())


@untraced
def _checked_cast(x, row_factor, column_factor, row_scale, column_scale, signs, draws, form):
    require_one_of("form", form, FORMS)
    x, row_factor, column_factor = contiguous_operands(x, row_factor, column_factor, signs)
    _check_scales_and_draws([x], [row_scale], [column_scale], [draws])
    return _nvfp4_cast(x, row_factor, column_factor, row_scale, column_scale, signs, draws, form)


@untraced
def _checked_joined_cast(parts, axis, column_factor, row_scales, column_scales, draws, signs):
    require_one_of("axis", axis, (0, 1) if column_factor is None else (0,))
    check_parts(parts, axis, BLOCK)
    check_whole_blocks("parts[0]", parts[0], BLOCK)
    if signs is not None:
        check_number("signs", signs, torch.int64, parts[0].device)
    _check_scales_and_draws(parts, row_scales, column_scales, draws)
    _, column_factor = contiguous_factors(parts[0], None, column_factor)
    first, *others = (part.contiguous() for part in parts)
    return _nvfp4_joined_cast(first, others, axis, column_factor, row_scales, column_scales, signs, draws)


def _check_scales_and_draws(parts: list[torch.Tensor], row_scales: list, column_scales: list, draws: list) -> None:
    """Require a tensor scale for each part along each dimension that is cast along, and draws for each or for none."""
    for name, given in (("tensor_scales[1]", row_scales), ("tensor_scales[0]", column_scales), ("draws", draws)):
        if given and len(given) != len(parts):
            raise ValueError(f"{name} has {len(given)} tensors for {len(parts)} parts: expected one for each")
    for scale in (*row_scales, *column_scales):
        if scale is not None:
            check_number("tensor scale", scale, torch.float32, parts[0].device)
    for part, bits in zip(parts, draws):
        if bits is not None:
            check_vector("draws", bits, len(Draws), part.device, (torch.int64,))
            if part.numel() > MAX_ELEMENTS:
                raise ValueError(f"x {tuple(part.shape)}: more than the {MAX_ELEMENTS} elements that have random bits")
