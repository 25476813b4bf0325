"""Cast of a matrix to an MX format, along its rows, its columns, or both, from one read.

Optional factors per row and per column are multiplied in first: x * rho for the weight gradient of a normalized input,
W diag(gamma) for a weight with the norm's gain. An fp32 matrix can be rounded to bf16 before that, which
``mxtrain.compile.kernel_inputs`` uses. A fixed Hadamard transform of each block can come before the cast along columns.

Several matrices can be cast into one operand: each is read and written once, and nothing is copied. Weights that share
their input lie one below the other, and their output gradients side by side. The operand has the bits of a cast of the
joined matrix, because every part is whole blocks: their scales need no other part.

The rows of a matrix can be read in another order, with rows of zeros in between, as the tokens of experts are.

Weights can be cast in tiles of 32 x 32 that share a scale. Both casts then have the same values, and one image serves
both.

Bytes per element: 2 or 4 read; for each cast 1 + 1/32 or 1/2 + 1/32 (codes and scales) or 2 (image) written. The image
of tiles is written once: 2 + 2 or 4 + 2 in the place of 2 + 4 or 4 + 4. Merged inputs and gradients are read once for
each cast.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import (
    MERGED_FORMS,
    Cast,
    as_bytes,
    by_dim,
    empty_casts,
    flat,
    is_merged,
    rounded,
    scale_offset,
    shares_tile,
    tile_start,
)
from mxtrain.formats.mx.arithmetic import (
    STORAGE,
    codes_of_columns,
    codes_of_rows,
    element_codes,
    element_image,
    element_of,
    hadamard,
    inverse_scale,
    scale_value,
    store_codes,
)
from mxtrain.formats.mx.merge import merge_along_columns, merge_along_rows, rows_held
from mxtrain.formats.recipe import Recipe
from mxtrain.launch.launch import Launch, cdiv, contiguous, converts_fp8, register_op


@triton.jit
def cast_along_rows(
    x, first_row, column, offsets, mask, end_row, end_column, columns, data_ptr, scales_ptr,
    FORM: tl.constexpr, ROUNDING: tl.constexpr, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr = False,
):  # fmt: skip
    """Cast a tile [ROWS, COLUMNS] in blocks of 32 columns, and store it at ``offsets``.

    x is fp32, and zero outside of ``mask``. The matrix may be a part of a larger result:
    first_row, column and offsets are positions in the whole result, end_row and end_column the ends of the part, and
    ``columns`` is the width of the whole. TILES: ROWS is 32, and all rows share the scales.
    """
    row = first_row + tl.arange(0, ROWS)
    x = tl.reshape(x, (ROWS, COLUMNS // 32, 32))
    code = codes_of_rows(x, ROUNDING, ELEMENT, TILES)
    y = x * inverse_scale(code, ROUNDING)[:, :, None]
    if FORM == "image":
        image = element_image(y, scale_value(code)[:, :, None], ELEMENT, HARDWARE)
        tl.store(data_ptr + offsets, tl.reshape(image, (ROWS, COLUMNS)), mask=mask)
    else:
        codes = tl.reshape(element_codes(y, ELEMENT, HARDWARE), (ROWS, COLUMNS))
        store_codes(data_ptr, offsets, codes, mask, ELEMENT)
        block = (column // 32 + tl.arange(0, COLUMNS // 32))[None, :]
        scale_offsets = scale_offset(row[:, None], block, columns // 32, FORM)
        scale_mask = (row < end_row)[:, None] & (block < end_column // 32)
        tl.store(scales_ptr + scale_offsets, code.to(tl.uint8), mask=scale_mask)


@triton.jit
def cast_along_columns(
    x, first_row, column, offsets, mask, end_row, end_column, rows, data_ptr, scales_ptr,
    FORM: tl.constexpr, ROUNDING: tl.constexpr, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr = False, HADAMARD: tl.constexpr = False,
):  # fmt: skip
    """Cast a tile in blocks of 32 rows. Store an image at ``offsets``, and codes and scales transposed.

    Arguments as for ``cast_along_rows``; ``rows`` is the height of the whole result.
    """
    row = first_row + tl.arange(0, ROWS)
    x = tl.reshape(x, (ROWS // 32, 32, COLUMNS))
    if HADAMARD:
        x = hadamard(x)
        # The transform gives values to the padding of the last block.
        mask = (row < (end_row + 31) // 32 * 32)[:, None] & (column + tl.arange(0, COLUMNS) < end_column)[None, :]
    code = codes_of_columns(x, ROUNDING, ELEMENT, TILES)
    y = x * inverse_scale(code, ROUNDING)[:, None, :]
    if FORM == "image":
        image = element_image(y, scale_value(code)[:, None, :], ELEMENT, HARDWARE)
        tl.store(data_ptr + offsets, tl.reshape(image, (ROWS, COLUMNS)), mask=mask)
    else:
        codes = tl.trans(tl.reshape(element_codes(y, ELEMENT, HARDWARE), (ROWS, COLUMNS)))
        out_row = (column + tl.arange(0, COLUMNS)).to(tl.int64)[:, None]
        # The last block is padded with zeros.
        blocks, end_block = (rows + 31) // 32, (end_row + 31) // 32
        out_column = row[None, :]
        out_mask = (out_row < end_column) & (out_column < end_block * 32)
        store_codes(data_ptr, out_row * (blocks * 32) + out_column, codes, out_mask, ELEMENT)
        block = (first_row // 32 + tl.arange(0, ROWS // 32))[None, :]
        scale_offsets = scale_offset(out_row, block, blocks, FORM)
        scale_mask = (out_row < end_column) & (block < end_block)
        tl.store(scales_ptr + scale_offsets, tl.trans(code.to(tl.uint8)), mask=scale_mask)


@triton.jit
def _load(
    x_ptr, row_factor_ptr, column_factor_ptr, source_ptr, row, column, rows, columns,
    ROW_FACTOR: tl.constexpr, COLUMN_FACTOR: tl.constexpr, HAS_SOURCE: tl.constexpr, TO_BF16: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of x times its factors (fp32), and its mask; row: [R]."""
    across = column + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (across < columns)[None, :]
    if HAS_SOURCE:
        source = tl.load(source_ptr + row, mask=row < rows, other=-1).to(tl.int64)
        x_offsets, x_mask = (source * columns)[:, None] + across[None, :], mask & (source >= 0)[:, None]
    else:
        x_offsets, x_mask = (row * columns)[:, None] + across[None, :], mask
    x = tl.load(x_ptr + x_offsets, mask=x_mask, other=0.0)
    if TO_BF16:
        x = rounded(x, tl.bfloat16)
    x = x.to(tl.float32)
    if ROW_FACTOR:
        x *= tl.load(row_factor_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    if COLUMN_FACTOR:
        factor = tl.load(column_factor_ptr + across, mask=across < columns, other=0.0).to(tl.float32)[None, :]
        # Zero times zero: padding must not become a negative zero. A zero in the place of the product would be a code
        # that Triton 3.8 knows: it leaves the other half of the register undefined, and ptxas may miscompile both.
        x *= tl.where(mask, factor, 0.0)
    return x, mask


@triton.jit
def _place(
    first_row, rows, columns, rows_before, columns_before, expert_rows, all_expert_rows, all_columns,
    IS_PART: tl.constexpr,
):  # fmt: skip
    """Rows and columns of the result before a tile's matrix, the ends of the matrix there, and the result's width."""
    if IS_PART:
        # x is a part of a larger matrix, whose casts are the results. A tile lies in one expert.
        rows_before += first_row // expert_rows * (all_expert_rows - expert_rows)
        return rows_before, columns_before, rows + rows_before, columns + columns_before, all_columns
    else:
        return 0, 0, rows, columns, columns


@triton.jit
def _cast_kernel(
    x_ptr, row_factor_ptr, column_factor_ptr, source_ptr,
    row_data_ptr, row_scales_ptr, column_data_ptr, column_scales_ptr, rows, columns,
    rows_before, columns_before, expert_rows, all_expert_rows, all_rows, all_columns,
    ALONG_ROWS: tl.constexpr, ALONG_COLUMNS: tl.constexpr, ROW_FACTOR: tl.constexpr, COLUMN_FACTOR: tl.constexpr,
    HAS_SOURCE: tl.constexpr, TO_BF16: tl.constexpr, IS_PART: tl.constexpr, HADAMARD: tl.constexpr, FORM: tl.constexpr,
    ROUNDING: tl.constexpr, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    first_row, column = tile_start(columns, ROWS, COLUMNS)
    AT_ONCE: tl.constexpr = 8 if ALONG_ROWS else 16
    if is_merged(FORM) and ROWS == 128:
        row = rows_held(first_row, AT_ONCE)
    else:
        row = first_row + tl.arange(0, ROWS)
    x, mask = _load(
        x_ptr, row_factor_ptr, column_factor_ptr, source_ptr, row, column, rows, columns,
        ROW_FACTOR, COLUMN_FACTOR, HAS_SOURCE, TO_BF16, COLUMNS,
    )  # fmt: skip
    rows_before, columns_before, end_row, end_column, all_columns = _place(
        first_row, rows, columns, rows_before, columns_before, expert_rows, all_expert_rows, all_columns, IS_PART
    )
    first_row, column = first_row + rows_before, column + columns_before
    offsets = ((row + rows_before) * all_columns)[:, None] + (column + tl.arange(0, COLUMNS))[None, :]
    if is_merged(FORM):
        if ALONG_ROWS:
            merge_along_rows(
                x, row + rows_before, column, mask, first_row, end_row, end_column, all_rows, all_columns, row_data_ptr,
                row_scales_ptr, FORM, ROUNDING, HARDWARE, COLUMNS, AT_ONCE, TILES,
            )  # fmt: skip
        if ALONG_COLUMNS:
            merge_along_columns(
                x, first_row, column, end_row, end_column, all_rows, all_columns, column_data_ptr, column_scales_ptr,
                FORM, ROUNDING, HARDWARE, COLUMNS, AT_ONCE, TILES,
            )  # fmt: skip
    else:
        if ALONG_ROWS:
            cast_along_rows(
                x, first_row, column, offsets, mask, end_row, end_column, all_columns, row_data_ptr, row_scales_ptr,
                FORM, ROUNDING, ELEMENT, HARDWARE, ROWS, COLUMNS, TILES,
            )  # fmt: skip
        if ALONG_COLUMNS:
            cast_along_columns(
                x, first_row, column, offsets, mask, end_row, end_column, all_rows, column_data_ptr, column_scales_ptr,
                FORM, ROUNDING, ELEMENT, HARDWARE, ROWS, COLUMNS, TILES, HADAMARD,
            )  # fmt: skip


def _cast_tile(along_rows: bool, along_columns: bool, form: str, tiles: bool, hadamard: bool) -> tuple[int, int, int]:
    """Return (rows, columns, warps) per program: the fastest measured for E4M3 in blocks."""
    if form in MERGED_FORMS and (along_columns or shares_tile(form, True)):
        # Of 128 columns only for the scale of a tile: smaller programs keep more of the memory's bandwidth busy.
        return (128, 64, 2) if form == "merged_gradient" else (128, 128, 4)
    if tiles and form == "image":
        # One warp holds whole tiles, so their maxima do not pass between warps.
        return 32, 64, 1
    if not along_columns:
        return 32, 128, 4
    if form == "image" or hadamard:
        return (32, 64, 2) if along_rows else (32, 128, 2)
    # One warp holds whole columns, so neither their maxima nor transposed codes pass between warps.
    return 32, 128, 1


def _launches(
    parts, axis: int, row_factor, column_factor, source, to_bf16: bool, experts: int, hadamard: bool,
    along_rows: bool, along_columns: bool, element: str, scale_rounding: str, form: str, tiles: bool = False,
) -> tuple[list[torch.Tensor], list[Launch]]:  # fmt: skip
    """Allocate the casts of the parts joined along ``axis``, and return them with a launch for each part.

    ``to_bf16`` rounds fp32 parts to bf16 first. With ``source``, there is one part. ``experts`` as for ``cast``.
    ``tiles`` of 32 x 32 share a scale.
    """
    whole = list(parts[0].shape)
    whole[axis] = sum(part.shape[axis] for part in parts)
    if source is not None:
        whole[0] = source.shape[0]
    results = empty_casts(STORAGE[element], *whole, along_rows, along_columns, form, parts[0].device, hadamard)
    directions = [(along_rows, along_columns)]
    if form in MERGED_FORMS and form != "merged_weight" and along_rows and along_columns:
        # Two programs that each read x are faster than one that holds it for both casts (H200: 355 and 405 us).
        directions = [(True, False), (False, True)]
    launches, before = [], [0, 0]
    for x in parts:
        rows, columns = x.shape if source is None else whole
        for by_rows, by_columns in directions if rows * columns else ():
            rows_at_once, columns_at_once, warps = _cast_tile(by_rows, by_columns, form, tiles, hadamard)
            launches.append(
                Launch(
                    _cast_kernel,
                    (cdiv(rows, rows_at_once) * cdiv(columns, columns_at_once),),
                    (
                        x, row_factor, column_factor, source, *map(as_bytes, results), rows, columns,
                        *before, rows // experts, whole[0] // experts, *whole,
                    ),
                    dict(
                        ALONG_ROWS=by_rows, ALONG_COLUMNS=by_columns, ROW_FACTOR=row_factor is not None,
                        COLUMN_FACTOR=column_factor is not None, HAS_SOURCE=source is not None,
                        TO_BF16=to_bf16 and x.dtype == torch.float32, IS_PART=len(parts) > 1, HADAMARD=hadamard,
                        FORM=form, ROUNDING=scale_rounding, ELEMENT=element, HARDWARE=converts_fp8(x),
                        ROWS=rows_at_once, COLUMNS=columns_at_once, TILES=tiles, num_warps=warps,
                    ),
                )
            )  # fmt: skip
        before[axis] += x.shape[axis] // (experts if axis == 0 else 1)
    return flat(*results), launches


CAST = register_op(
    "cast(Tensor[] parts, int axis, Tensor? row_factor, Tensor? column_factor, Tensor? source, bool to_bf16,"
    " int experts, bool hadamard, bool along_rows, bool along_columns, str element, str scale_rounding, str form)"
    " -> Tensor[]",
    _launches,
)


def _tile_launches(parts, gain, experts: int, *settings) -> tuple[list[torch.Tensor], list[Launch]]:
    return _launches(parts, 0, None, gain, None, False, experts, False, *settings, tiles=True)


CAST_TILES = register_op(
    "cast_tiles(Tensor[] parts, Tensor? gain, int experts, bool along_rows, bool along_columns, str element,"
    " str scale_rounding, str form) -> Tensor[]",
    _tile_launches,
)


def cast(
    x: torch.Tensor | Sequence[torch.Tensor],
    recipe: Recipe,
    dims: tuple[int, ...] = (1,),
    form: str = "codes",
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
    axis: int = 0,
    source: torch.Tensor | None = None,
    experts: int = 1,
    hadamard: bool = False,
) -> dict[int, Cast]:
    """Return the casts of x [R, C] in blocks of 32 along each of ``dims``.

    Args:
        x: bf16 or fp32 [R, C]; C a multiple of 32 for a cast along dimension 1. Along dimension 0 the last block may
            be incomplete: it is padded with zeros. Or several matrices of one dtype, all of them whole blocks along
            ``axis``: the results are those of ``torch.cat(x, axis)``, which is never stored. One launch for each.
        recipe: of an MX format.
        dims: (1,), (0,) or (1, 0).
        form: "codes": codes with the reduced dimension last ([R, C], and [C, R rounded up to a multiple of 32] along
            dimension 0; of 4 bits, half as wide) and row-major float8_e8m0fnu scales; "blocked": the same codes, scales
            flat in the 128x4 layout; "image": the bf16 values [R, C] of codes and scales, not transposed; of
            ``MERGED_FORMS``: as ``mxtrain.formats.mx.merged.merge``, C a multiple of 128 along dimension 1.
        row_factor, column_factor, axis, source, experts: as in ``CastSpec``. Factors are bf16 or fp32. A row factor is
            for a single matrix without ``source``; matrices side by side have no column factor.
        hadamard: transform X along dimension 0 before the cast along it. That image has R rounded up as well.

    Returns:
        (data, scales) for each dimension; scales is None for an image.
    """
    parts = contiguous(*([x] if isinstance(x, torch.Tensor) else x))
    factors = contiguous(row_factor, column_factor)
    settings = 1 in dims, 0 in dims, element_of(recipe.format), recipe.scale_rounding, form
    results = CAST(parts, axis, *factors, source, False, experts, hadamard, *settings)
    return by_dim(results, dims, form)


def cast_tiles(
    parts: Sequence[torch.Tensor],
    recipe: Recipe,
    dims: tuple[int, ...] = (1, 0),
    form: str = "codes",
    gain: torch.Tensor | None = None,
    experts: int = 1,
) -> dict[int, Cast]:
    """Return the casts of W [N, D], or of W diag(gain), in tiles of 32 x 32 that share a scale.

    Args and results as for ``cast``, for weights one below the other. The last tiles of rows may be incomplete. An
    image is the same tensor in all of ``dims``.
    """
    # Forward and backward call the op with the same arguments for an image, so a compiled graph has one call.
    along = (True, False) if form == "image" else (1 in dims, 0 in dims)
    settings = *along, element_of(recipe.format), recipe.scale_rounding, form
    results = CAST_TILES(contiguous(*parts), *contiguous(gain), experts, *settings)
    return by_dim(results * 2 if form == "image" else results, dims, form)
