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
of tiles is written once: 2 + 2 or 4 + 2 in the place of 2 + 4 or 4 + 4.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import (
    MERGED_FORMS,
    Cast,
    as_bytes,
    block_amax,
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
    code_in_group,
    element_codes,
    element_image,
    element_of,
    hadamard,
    inverse_scale,
    merged_codes,
    scale_code,
    scale_value,
    store_codes,
)
from mxtrain.formats.recipe import Recipe
from mxtrain.launch.launch import Launch, cdiv, contiguous, converts_fp8, register_op


@triton.jit
def store_group_scales(
    ptr, group_code, row, group, rows, groups, end_row, end_group, FORM: tl.constexpr, ALONG_ROWS: tl.constexpr
):
    """Store the fp32 scales of merged groups in an operand [rows, groups of 128]. row and group: [R, 1] and [1, G].

    group_code (int32) broadcasts to [R, G]. Of tiles, row and group are the first of each.
    """
    scale = (group_code << 23).to(tl.float32, bitcast=True) + tl.zeros((row.shape[0], group.shape[1]), tl.float32)
    if shares_tile(FORM, ALONG_ROWS):
        offsets = row // 128 * ((groups + 3) // 4 * 4) + group
    else:
        offsets = group * rows + row
    tl.store(ptr + offsets, scale, mask=(row < end_row) & (group < end_group))


@triton.jit
def _codes_of_rows(x, ROUNDING: tl.constexpr, ELEMENT: tl.constexpr, TILES: tl.constexpr):
    """Scale codes (int32) [R, C / 32] of x (fp32) [R, C / 32, 32]. TILES: 32 rows share the scales."""
    amax = block_amax(x, 2)
    if TILES:
        rows: tl.constexpr = amax.shape[0]
        blocks: tl.constexpr = amax.shape[1]
        of_tiles = block_amax(tl.reshape(amax, (rows // 32, 32, blocks)), 1)[:, None, :]
        amax = tl.reshape(tl.broadcast_to(of_tiles, (rows // 32, 32, blocks)), (rows, blocks))
    return scale_code(amax, ROUNDING, ELEMENT)


@triton.jit
def _codes_of_columns(x, ROUNDING: tl.constexpr, ELEMENT: tl.constexpr, TILES: tl.constexpr):
    """Scale codes (int32) [R / 32, C] of x (fp32) [R / 32, 32, C]. TILES: 32 columns share the scales."""
    amax = block_amax(x, 1)
    if TILES:
        blocks: tl.constexpr = amax.shape[0]
        columns: tl.constexpr = amax.shape[1]
        of_tiles = block_amax(tl.reshape(amax, (blocks * columns // 32, 32)), 1)[:, None]
        amax = tl.reshape(tl.broadcast_to(of_tiles, (blocks * columns // 32, 32)), (blocks, columns))
    return scale_code(amax, ROUNDING, ELEMENT)


@triton.jit
def cast_along_rows(
    x, first_row, column, offsets, mask, end_row, end_column, rows, columns, data_ptr, scales_ptr,
    FORM: tl.constexpr, ROUNDING: tl.constexpr, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr = False, merged_code=0,
):  # fmt: skip
    """Cast a tile [ROWS, COLUMNS] in blocks of 32 columns, and store it at ``offsets``.

    x is fp32, and zero outside of ``mask``. The matrix may be a part of a larger result:
    first_row, column and offsets are positions in the whole result, end_row and end_column the ends of the part, and
    rows and columns the size of the whole. TILES: 32 rows share the scales.
    A merged form needs whole groups: COLUMNS is a multiple of 128, and with tiles ``merged_code`` is that of the tile.
    """
    row = first_row + tl.arange(0, ROWS)
    x = tl.reshape(x, (ROWS, COLUMNS // 32, 32))
    code = _codes_of_rows(x, ROUNDING, ELEMENT, TILES)
    y = x * inverse_scale(code, ROUNDING)[:, :, None]
    if FORM == "image":
        image = element_image(y, scale_value(code)[:, :, None], ELEMENT, HARDWARE)
        tl.store(data_ptr + offsets, tl.reshape(image, (ROWS, COLUMNS)), mask=mask)
    elif is_merged(FORM):
        if shares_tile(FORM, True):
            of_blocks = tl.full((ROWS, COLUMNS // 32), 0, tl.int32) + merged_code
        else:
            by_group: tl.constexpr = (ROWS, COLUMNS // 128, 4)
            group_code = tl.max(tl.reshape(code_in_group(code), by_group), 2)
            of_blocks = tl.reshape(tl.broadcast_to(group_code[:, :, None], by_group), (ROWS, COLUMNS // 32))
            group = (column // 128 + tl.arange(0, COLUMNS // 128))[None, :]
            store_group_scales(
                scales_ptr,
                group_code,
                row[:, None],
                group,
                rows,
                columns // 128,
                end_row,
                end_column // 128,
                FORM,
                True,
            )
        codes = merged_codes(y, code[:, :, None], of_blocks[:, :, None], ELEMENT, HARDWARE)
        tl.store(data_ptr + offsets, tl.reshape(codes, (ROWS, COLUMNS)), mask=mask)
    else:
        codes = tl.reshape(element_codes(y, ELEMENT, HARDWARE), (ROWS, COLUMNS))
        store_codes(data_ptr, offsets, codes, mask, ELEMENT)
        block = (column // 32 + tl.arange(0, COLUMNS // 32))[None, :]
        scale_offsets = scale_offset(row[:, None], block, columns // 32, FORM)
        scale_mask = (row < end_row)[:, None] & (block < end_column // 32)
        tl.store(scales_ptr + scale_offsets, code.to(tl.uint8), mask=scale_mask)


@triton.jit
def cast_along_columns(
    x, first_row, column, offsets, mask, end_row, end_column, rows, columns, data_ptr, scales_ptr,
    FORM: tl.constexpr, ROUNDING: tl.constexpr, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr = False, HADAMARD: tl.constexpr = False,
    merged_codes_of_columns=0,
):  # fmt: skip
    """Cast a tile in blocks of 32 rows. Store an image at ``offsets``, and codes and scales transposed.

    Arguments as for ``cast_along_rows``. A merged form needs the codes [COLUMNS] of the groups, whose scales are not
    stored here.
    """
    row = first_row + tl.arange(0, ROWS)
    x = tl.reshape(x, (ROWS // 32, 32, COLUMNS))
    if HADAMARD:
        x = hadamard(x)
        # The transform gives values to the padding of the last block.
        mask = (row < (end_row + 31) // 32 * 32)[:, None] & (column + tl.arange(0, COLUMNS) < end_column)[None, :]
    code = _codes_of_columns(x, ROUNDING, ELEMENT, TILES)
    y = x * inverse_scale(code, ROUNDING)[:, None, :]
    if FORM == "image":
        image = element_image(y, scale_value(code)[:, None, :], ELEMENT, HARDWARE)
        tl.store(data_ptr + offsets, tl.reshape(image, (ROWS, COLUMNS)), mask=mask)
    else:
        # The last block or group is padded with zeros.
        size: tl.constexpr = 128 if is_merged(FORM) else 32
        blocks, end_block = (rows + size - 1) // size, (end_row + size - 1) // size
        if is_merged(FORM):
            codes = merged_codes(y, code[:, None, :], merged_codes_of_columns[None, None, :], ELEMENT, HARDWARE)
        else:
            codes = element_codes(y, ELEMENT, HARDWARE)
        codes = tl.trans(tl.reshape(codes, (ROWS, COLUMNS)))
        out_row = (column + tl.arange(0, COLUMNS)).to(tl.int64)[:, None]
        out_column = row[None, :]
        out_mask = (out_row < end_column) & (out_column < end_block * size)
        store_codes(data_ptr, out_row * (blocks * size) + out_column, codes, out_mask, ELEMENT)
        if not is_merged(FORM):
            block = (first_row // 32 + tl.arange(0, ROWS // 32))[None, :]
            scale_offsets = scale_offset(out_row, block, blocks, FORM)
            scale_mask = (out_row < end_column) & (block < end_block)
            tl.store(scales_ptr + scale_offsets, tl.trans(code.to(tl.uint8)), mask=scale_mask)


@triton.jit
def no_groups(COLUMNS: tl.constexpr):
    """Codes of merged groups before their first block: that of a tile along rows, and those along columns [COLUMNS]."""
    return tl.full((), 1, tl.int32), tl.full((COLUMNS,), 1, tl.int32)


@triton.jit
def grow_columns(
    x, of_columns, ROUNDING: tl.constexpr, ELEMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILES: tl.constexpr = False,
):  # fmt: skip
    """Codes of merged groups along columns, after the blocks of x (fp32) [ROWS, COLUMNS]."""
    code = _codes_of_columns(tl.reshape(x, (ROWS // 32, 32, COLUMNS)), ROUNDING, ELEMENT, TILES)
    return tl.maximum(of_columns, tl.max(code_in_group(code), 0))


@triton.jit
def store_groups(
    of_tile, of_columns, first_row, column, end_row, end_column, rows, columns, row_scales_ptr, column_scales_ptr,
    ALONG_ROWS: tl.constexpr, ALONG_COLUMNS: tl.constexpr, FORM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the scales of these groups. Return the codes along columns, with tiles the largest."""
    if ALONG_ROWS and shares_tile(FORM, True):
        row, group = (first_row + tl.arange(0, 1))[:, None], (column // 128 + tl.arange(0, 1))[None, :]
        store_group_scales(
            row_scales_ptr, of_tile, row, group, rows, columns // 128, end_row, end_column // 128, FORM, True
        )
    if ALONG_COLUMNS:
        count: tl.constexpr = 1 if shares_tile(FORM, False) else COLUMNS
        stored = of_columns
        if shares_tile(FORM, False):
            stored = tl.max(of_columns, 0) + tl.zeros((1,), tl.int32)
            of_columns = tl.max(of_columns, 0) + tl.zeros((COLUMNS,), tl.int32)
        row, group = (column + tl.arange(0, count))[:, None], (first_row // 128 + tl.arange(0, 1))[None, :]
        store_group_scales(
            column_scales_ptr, stored[:, None], row, group, columns, (rows + 127) // 128,
            end_column, (end_row + 127) // 128, FORM, False,
        )  # fmt: skip
    return of_columns


@triton.jit
def _load(
    x_ptr, row_factor_ptr, column_factor_ptr, source_ptr, first_row, column, rows, columns,
    ROW_FACTOR: tl.constexpr, COLUMN_FACTOR: tl.constexpr, HAS_SOURCE: tl.constexpr, TO_BF16: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of x times its factors (fp32), and its mask."""
    row = first_row + tl.arange(0, ROWS)
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
def _cast_kernel(
    x_ptr, row_factor_ptr, column_factor_ptr, source_ptr,
    row_data_ptr, row_scales_ptr, column_data_ptr, column_scales_ptr, rows, columns,
    rows_before, columns_before, expert_rows, all_expert_rows, all_rows, all_columns,
    ALONG_ROWS: tl.constexpr, ALONG_COLUMNS: tl.constexpr, ROW_FACTOR: tl.constexpr, COLUMN_FACTOR: tl.constexpr,
    HAS_SOURCE: tl.constexpr, TO_BF16: tl.constexpr, IS_PART: tl.constexpr, HADAMARD: tl.constexpr, FORM: tl.constexpr,
    ROUNDING: tl.constexpr, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """CHUNKS: read a program's tile in so many parts of ROWS rows, twice: first for the scales of merged groups."""
    first_row, column = tile_start(columns, ROWS * CHUNKS, COLUMNS)
    if IS_PART:
        # x is a part of a larger matrix, whose casts are the results. A tile lies in one expert.
        rows_before += first_row // expert_rows * (all_expert_rows - expert_rows)
        end_row, end_column = rows + rows_before, columns + columns_before
    else:
        rows_before, columns_before, end_row, end_column = 0, 0, rows, columns
    of_tile, of_columns = no_groups(COLUMNS)
    if CHUNKS > 1:
        for chunk in range(CHUNKS):
            x, _ = _load(
                x_ptr, row_factor_ptr, column_factor_ptr, source_ptr, first_row + chunk * ROWS, column, rows, columns,
                ROW_FACTOR, COLUMN_FACTOR, HAS_SOURCE, TO_BF16, ROWS, COLUMNS,
            )  # fmt: skip
            if ALONG_ROWS and shares_tile(FORM, True):
                code = _codes_of_rows(tl.reshape(x, (ROWS, COLUMNS // 32, 32)), ROUNDING, ELEMENT, TILES)
                of_tile = tl.maximum(of_tile, tl.max(tl.max(code_in_group(code), 1), 0))
            if ALONG_COLUMNS:
                of_columns = grow_columns(x, of_columns, ROUNDING, ELEMENT, ROWS, COLUMNS, TILES)
        of_columns = store_groups(
            of_tile, of_columns, first_row + rows_before, column + columns_before, end_row, end_column,
            all_rows, all_columns, row_scales_ptr, column_scales_ptr, ALONG_ROWS, ALONG_COLUMNS, FORM, COLUMNS,
        )  # fmt: skip
    for chunk in range(CHUNKS):
        row = first_row + chunk * ROWS
        x, mask = _load(
            x_ptr, row_factor_ptr, column_factor_ptr, source_ptr, row, column, rows, columns,
            ROW_FACTOR, COLUMN_FACTOR, HAS_SOURCE, TO_BF16, ROWS, COLUMNS,
        )  # fmt: skip
        row += rows_before
        offsets = ((row + tl.arange(0, ROWS)) * all_columns)[:, None]
        offsets += (column + columns_before + tl.arange(0, COLUMNS))[None, :]
        if ALONG_ROWS:
            cast_along_rows(
                x, row, column + columns_before, offsets, mask, end_row, end_column, all_rows, all_columns,
                row_data_ptr, row_scales_ptr, FORM, ROUNDING, ELEMENT, HARDWARE, ROWS, COLUMNS, TILES, of_tile,
            )  # fmt: skip
        if ALONG_COLUMNS:
            cast_along_columns(
                x, row, column + columns_before, offsets, mask, end_row, end_column, all_rows, all_columns,
                column_data_ptr, column_scales_ptr,
                FORM, ROUNDING, ELEMENT, HARDWARE, ROWS, COLUMNS, TILES, HADAMARD, of_columns,
            )  # fmt: skip


def _cast_tile(along_rows: bool, along_columns: bool, form: str, tiles: bool, hadamard: bool) -> tuple[int, int, int]:
    """Return (rows, columns, warps) per program and chunk: the fastest measured for E4M3 in blocks."""
    if is_read_twice(along_columns, form):
        return 32, 128, 1
    if tiles and form == "image":
        # One warp holds whole tiles, so their maxima do not pass between warps.
        return 32, 64, 1
    if not along_columns:
        return 32, 128, 4
    if form == "image" or hadamard:
        return (32, 64, 2) if along_rows else (32, 128, 2)
    # One warp holds whole columns, so neither their maxima nor transposed codes pass between warps.
    return 32, 128, 1


def is_read_twice(along_columns: bool, form: str) -> bool:
    """Return whether a cast needs the scales of 128 rows before it writes the first."""
    return form in MERGED_FORMS and (along_columns or shares_tile(form, True))


def _launches(
    parts: list[torch.Tensor],
    axis: int,
    row_factor: torch.Tensor | None,
    column_factor: torch.Tensor | None,
    source: torch.Tensor | None,
    to_bf16: bool,
    experts: int,
    hadamard: bool,
    along_rows: bool,
    along_columns: bool,
    element: str,
    scale_rounding: str,
    form: str,
    tiles: bool = False,
) -> tuple[list[torch.Tensor], list[Launch]]:
    """Allocate the casts of the parts joined along ``axis``, and return them with a launch for each part.

    ``to_bf16`` rounds fp32 parts to bf16 first. With ``source``, there is one part. ``experts`` as for ``cast``.
    ``tiles`` of 32 x 32 share a scale.
    """
    whole = list(parts[0].shape)
    whole[axis] = sum(part.shape[axis] for part in parts)
    if source is not None:
        whole[0] = source.shape[0]
    results = empty_casts(STORAGE[element], *whole, along_rows, along_columns, form, parts[0].device, hadamard)
    rows_at_once, columns_at_once, warps = _cast_tile(along_rows, along_columns, form, tiles, hadamard)
    chunks = 128 // rows_at_once if is_read_twice(along_columns, form) else 1
    launches, before = [], [0, 0]
    for x in parts:
        rows, columns = x.shape if source is None else whole
        launch = Launch(
            _cast_kernel,
            (cdiv(rows, rows_at_once * chunks) * cdiv(columns, columns_at_once),),
            (
                x, row_factor, column_factor, source, *map(as_bytes, results), rows, columns,
                *before, rows // experts, whole[0] // experts, *whole,
            ),
            dict(
                ALONG_ROWS=along_rows, ALONG_COLUMNS=along_columns, ROW_FACTOR=row_factor is not None,
                COLUMN_FACTOR=column_factor is not None, HAS_SOURCE=source is not None,
                TO_BF16=to_bf16 and x.dtype == torch.float32, IS_PART=len(parts) > 1, HADAMARD=hadamard,
                FORM=form, ROUNDING=scale_rounding, ELEMENT=element, HARDWARE=converts_fp8(x), ROWS=rows_at_once,
                COLUMNS=columns_at_once, TILES=tiles, CHUNKS=chunks, num_warps=warps,
            ),
        )  # fmt: skip
        if rows * columns:
            launches.append(launch)
        before[axis] += x.shape[axis] // (experts if axis == 0 else 1)
    return flat(*results), launches


CAST = register_op(
    "cast(Tensor[] parts, int axis, Tensor? row_factor, Tensor? column_factor, Tensor? source, bool to_bf16,"
    " int experts, bool hadamard, bool along_rows, bool along_columns, str element, str scale_rounding, str form)"
    " -> Tensor[]",
    _launches,
)


def _tile_launches(
    parts: list[torch.Tensor], gain: torch.Tensor | None, experts: int, *settings
) -> tuple[list[torch.Tensor], list[Launch]]:
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
    """Return the casts of x [R, C] in blocks of 32 along each of ``dims``, all from one read of x.

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
        row_factor: bf16 or fp32 [R], multiplied in before the cast, in fp32. For a single matrix only.
        column_factor: bf16 or fp32 [C], likewise. Not for matrices side by side.
        axis: 0 for matrices one below the other, 1 for matrices side by side.
        source: int64 [S]. The matrix that is cast is then [S, C], and its row i is row source[i] of x; a row of zeros
            where source[i] is negative. For a single matrix without row_factor.
        experts: every matrix is so many stacked experts of equal height, each of whole blocks. Matrices one below the
            other are then joined expert by expert.
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
