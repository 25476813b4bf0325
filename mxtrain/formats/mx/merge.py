"""Casts to merged forms inside a kernel: codes on the grid of their group of 128 (``mxtrain.formats.mx.merged``).

A group's scale follows from all its blocks. A program holds whole groups along rows. For groups along columns and for
tiles it reads 128 rows twice, 32 at a time: first for the scale codes of the blocks, of which it keeps four in a word,
then for the codes. The second read comes from the caches.
"""

import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import shares_tile
from mxtrain.formats.mx.arithmetic import code_in_group, codes_of_columns, codes_of_rows, inverse_scale, merged_codes


@triton.jit
def rows_in_words(first_row):
    """32 rows in the order in which a program holds them.

    Four warps that load 128 columns give every eighth place to a thread. So its rows are consecutive, it packs four
    codes of a column into one word, and not bytes but words pass between threads.
    """
    place = tl.arange(0, 32)
    return first_row + place % 8 * 4 + place // 8


@triton.jit
def codes_of_32_rows(x, ROUNDING: tl.constexpr, TILES: tl.constexpr = False):
    """Scale codes (int32) [C] of x (fp32) [32, C] in blocks along columns. TILES: 32 columns share the scales."""
    columns: tl.constexpr = x.shape[1]
    return tl.reshape(codes_of_columns(tl.reshape(x, (1, 32, columns)), ROUNDING, "e4m3", TILES), (columns,))


@triton.jit
def store_group_scales(
    ptr, group_code, row, group, rows, groups, end_row, end_group, FORM: tl.constexpr, ALONG_ROWS: tl.constexpr
):
    """Store the fp32 scales of groups in an operand [rows, groups of 128]. row and group: [R, 1] and [1, G].

    group_code (int32) broadcasts to [R, G]. Of tiles, row and group are the first of each.
    """
    scale = (group_code << 23).to(tl.float32, bitcast=True) + tl.zeros((row.shape[0], group.shape[1]), tl.float32)
    if shares_tile(FORM, ALONG_ROWS):
        offsets = row // 128 * ((groups + 3) // 4 * 4) + group
    else:
        offsets = group * rows + row
    tl.store(ptr + offsets, scale, mask=(row < end_row) & (group < end_group))


@triton.jit
def store_groups_of_columns(
    four_codes, first_row, column, end_row, end_column, rows, columns, scales_ptr,
    FORM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the scales of groups along columns, from four scale codes per column in words. Return the groups' codes."""
    groups = tl.full((COLUMNS,), 1, tl.int32)
    for i in tl.static_range(4):
        groups = tl.maximum(groups, code_in_group((four_codes >> i * 8) & 255))
    group = (first_row // 128 + tl.zeros((1, 1), tl.int64)).to(tl.int64)
    size, end_group = (rows + 127) // 128, (end_row + 127) // 128
    if shares_tile(FORM, False):
        of_tile = tl.max(groups, 0)
        row = column + tl.zeros((1, 1), tl.int64)
        store_group_scales(scales_ptr, of_tile, row, group, columns, size, end_column, end_group, FORM, False)
        groups = of_tile + tl.zeros((COLUMNS,), tl.int32)
    else:
        row = (column + tl.arange(0, COLUMNS)).to(tl.int64)[:, None]
        store_group_scales(scales_ptr, groups[:, None], row, group, columns, size, end_column, end_group, FORM, False)
    return groups


@triton.jit
def merge_along_columns(
    x, code, group_code, first_row, column, end_row, end_column, rows, data_ptr,
    ROUNDING: tl.constexpr, HARDWARE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the codes of x (fp32) [32, COLUMNS] along columns, transposed; x has its rows in words.

    code, group_code: int32 [COLUMNS], of the blocks and of their groups. Positions as for ``cast_along_columns``.
    """
    y = x * inverse_scale(code, ROUNDING)[None, :]
    codes = merged_codes(y, code[None, :], group_code[None, :], HARDWARE)
    four = tl.reshape(codes, (4, 8, COLUMNS)).to(tl.int32) << (tl.arange(0, 4) * 8)[:, None, None]
    words = tl.trans(tl.sum(four, 0))
    out_row = (column + tl.arange(0, COLUMNS)).to(tl.int64)[:, None]
    word = (first_row // 4 + tl.arange(0, 8))[None, :]
    # The last group is padded with zeros.
    mask = (out_row < end_column) & (word < (end_row + 127) // 128 * 32)
    tl.store(data_ptr.to(tl.pointer_type(tl.int32)) + out_row * ((rows + 127) // 128 * 32) + word, words, mask=mask)


@triton.jit
def merge_along_rows(
    x, of_tile, row, column, mask, end_row, end_column, rows, columns, data_ptr, scales_ptr,
    FORM: tl.constexpr, ROUNDING: tl.constexpr, HARDWARE: tl.constexpr, COLUMNS: tl.constexpr,
    TILES: tl.constexpr = False,
):  # fmt: skip
    """Store the codes of x (fp32) [R, COLUMNS] along rows, and the scales of 1 x 128. row: [R].

    of_tile: the code (int32) of the tile, if groups share it. Other arguments as for ``cast_along_rows``.
    """
    count: tl.constexpr = x.shape[0]
    by_group: tl.constexpr = (count, COLUMNS // 128, 4)
    x = tl.reshape(x, (count, COLUMNS // 32, 32))
    code = codes_of_rows(x, ROUNDING, "e4m3", TILES)
    if shares_tile(FORM, True):
        of_blocks = of_tile + tl.zeros((count, COLUMNS // 32), tl.int32)
    else:
        of_groups = tl.max(tl.reshape(code_in_group(code), by_group), 2)
        of_blocks = tl.reshape(tl.broadcast_to(of_groups[:, :, None], by_group), (count, COLUMNS // 32))
        group = (column // 128 + tl.arange(0, COLUMNS // 128))[None, :]
        store_group_scales(
            scales_ptr, of_groups, row[:, None], group.to(tl.int64), rows, columns // 128, end_row, end_column // 128,
            FORM, True,
        )  # fmt: skip
    y = x * inverse_scale(code, ROUNDING)[:, :, None]
    codes = merged_codes(y, code[:, :, None], of_blocks[:, :, None], HARDWARE)
    offsets = (row * columns)[:, None] + (column + tl.arange(0, COLUMNS))[None, :]
    tl.store(data_ptr + offsets, tl.reshape(codes, (count, COLUMNS)), mask=mask)
