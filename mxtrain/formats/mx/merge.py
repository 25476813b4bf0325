"""Casts to merged forms inside a kernel: codes on the grid of their group of 128 (``mxtrain.formats.mx.merged``).

A group's scale follows from all its blocks, so a program holds whole groups: 128 columns, or 128 rows.
"""

import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import block_amax, shares_tile
from mxtrain.formats.mx.arithmetic import (
    code_in_group,
    codes_of_columns,
    inverse_scale,
    merged_codes,
    merged_words,
    scale_code,
)


@triton.jit
def rows_held(first_row, AT_ONCE: tl.constexpr):
    """128 rows in the order in which a program holds them: a thread has ``AT_ONCE`` consecutive ones.

    So it packs four codes of a column into one word, and not bytes but words pass between threads.
    """
    place = tl.arange(0, 128)
    threads: tl.constexpr = 128 // AT_ONCE
    return first_row + place % threads * AT_ONCE + place // threads


@triton.jit
def _amax_of_32_rows(x, AT_ONCE: tl.constexpr):
    """Largest magnitude of each 32 rows, [4, C], of x (fp32) [128, C] in the order of ``rows_held``."""
    held = tl.reshape(x, (AT_ONCE, 4, 32 // AT_ONCE, x.shape[1]))
    return block_amax(block_amax(held, 0), 1)


@triton.jit
def _store_group_scales(
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
def merge_along_columns(
    x, first_row, column, end_row, end_column, rows, columns, data_ptr, scales_ptr,
    FORM: tl.constexpr, ROUNDING: tl.constexpr, HARDWARE: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Store the codes of x (fp32) [128, COLUMNS] along columns, transposed, and the scales of their groups.

    x has the order of ``rows_held``. Positions as for ``cast_along_columns``; ``columns`` is the width of the whole.
    COLUMNS is 128 if groups share the scale of a tile.
    """
    code = codes_of_columns(_amax_of_32_rows(x, AT_ONCE)[:, None, :], ROUNDING, "e4m3", TILES)
    of_groups = tl.max(code_in_group(code), 0)
    group = (first_row // 128 + tl.zeros((1, 1), tl.int64)).to(tl.int64)
    groups, end_group = (rows + 127) // 128, (end_row + 127) // 128
    out_row = (column + tl.arange(0, COLUMNS)).to(tl.int64)[:, None]
    if shares_tile(FORM, False):
        of_tile = tl.max(of_groups, 0)
        first = column + tl.zeros((1, 1), tl.int64)
        _store_group_scales(scales_ptr, of_tile, first, group, columns, groups, end_column, end_group, FORM, False)
        of_groups = of_tile + tl.zeros((COLUMNS,), tl.int32)
    else:
        of_column = of_groups[:, None]
        _store_group_scales(scales_ptr, of_column, out_row, group, columns, groups, end_column, end_group, FORM, False)
    held: tl.constexpr = (AT_ONCE, 4, 32 // AT_ONCE, COLUMNS)
    # Axes come back in the order opposite to that of the maxima, which costs no exchange between threads.
    code, of_groups = code[:, None, :][None], of_groups[None, :][:, None, :][None]
    y = tl.reshape(x, held) * inverse_scale(code, ROUNDING)
    even, odd = tl.split(tl.permute(tl.reshape(y, (AT_ONCE // 4, 2, 2, 128 // AT_ONCE, COLUMNS)), (0, 3, 4, 1, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    of_words: tl.constexpr = (AT_ONCE // 4, 4, 32 // AT_ONCE, COLUMNS)
    code = tl.reshape(tl.broadcast_to(code, of_words), first.shape)
    of_groups = tl.reshape(tl.broadcast_to(of_groups, of_words), first.shape)
    words = merged_words(first, second, third, fourth, code, of_groups, HARDWARE)
    words = tl.reshape(tl.permute(words, (2, 1, 0)), (COLUMNS, 32))
    word = (first_row // 4 + tl.arange(0, 32))[None, :]
    # The last group is padded with zeros.
    mask = (out_row < end_column) & (word < end_group * 32)
    tl.store(data_ptr.to(tl.pointer_type(tl.int32)) + out_row * (groups * 32) + word, words, mask=mask)


@triton.jit
def merge_along_rows(
    x, row, column, mask, first_row, end_row, end_column, rows, columns, data_ptr, scales_ptr,
    FORM: tl.constexpr, ROUNDING: tl.constexpr, HARDWARE: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Store the codes of x (fp32) [R, COLUMNS] along rows, and the scales of their groups. row: [R].

    For groups that share the scale of a tile, COLUMNS is 128, and x has the order of ``rows_held``. Other arguments as
    for ``cast_along_rows``.
    """
    count: tl.constexpr = x.shape[0]
    x = tl.reshape(x, (count, COLUMNS // 32, 32))
    amax = block_amax(x, 2)
    if TILES:
        of_tiles = _amax_of_32_rows(amax, AT_ONCE)[:, None, :][None]
        amax = tl.reshape(tl.broadcast_to(of_tiles, (AT_ONCE, 4, 32 // AT_ONCE, COLUMNS // 32)), amax.shape)
    code = scale_code(amax, ROUNDING, "e4m3")
    group = (column // 128 + tl.arange(0, COLUMNS // 128))[None, :].to(tl.int64)
    groups, end_group = columns // 128, end_column // 128
    if shares_tile(FORM, True):
        of_tile = tl.max(tl.max(code_in_group(code), 1), 0)
        first = first_row + tl.zeros((1, 1), tl.int64)
        _store_group_scales(scales_ptr, of_tile, first, group, rows, groups, end_row, end_group, FORM, True)
        of_blocks = of_tile + tl.zeros(code.shape, tl.int32)
    else:
        by_group: tl.constexpr = (count, COLUMNS // 128, 4)
        of_groups = tl.max(tl.reshape(code_in_group(code), by_group), 2)
        _store_group_scales(scales_ptr, of_groups, row[:, None], group, rows, groups, end_row, end_group, FORM, True)
        of_blocks = tl.reshape(tl.broadcast_to(of_groups[:, :, None], by_group), code.shape)
    y = x * inverse_scale(code, ROUNDING)[:, :, None]
    codes = merged_codes(y, code[:, :, None], of_blocks[:, :, None], HARDWARE)
    offsets = (row * columns)[:, None] + (column + tl.arange(0, COLUMNS))[None, :]
    tl.store(data_ptr + offsets, tl.reshape(codes, (count, COLUMNS)), mask=mask)
