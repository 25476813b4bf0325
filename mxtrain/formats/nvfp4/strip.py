"""A strip of 16 rows inside an NVFP4 kernel: loaded with factors, transformed, its codes and scales stored.

A program holds a strip as 16 tensors of [COLUMNS], one per row. A thread then has the same columns of all 16 rows, so
the Hadamard transform, block maxima along columns and the packing of two rows are elementwise: no data passes between
threads.
"""

import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import rounded_product, scale_offset
from mxtrain.launch.launch import next_power_of_2

# Per program: each thread has four columns of all 16 rows. Eight need too many registers: the images of both casts
# took 75 instead of 62 us at 16384 x 2048 (H200).
COLUMNS, WARPS = 128, 1


def tile_columns(columns: int, error: str = "") -> int:
    """Return the columns per program for a matrix of ``columns`` columns; with four over six fewer, for registers."""
    return min(COLUMNS // 2 if error else COLUMNS, next_power_of_2(columns))


@triton.jit
def length_of(row, rows, columns):
    """Columns in this row: zero for rows past the end."""
    # Triton 3.9's interpreter cannot combine a mask of columns with a scalar mask of the row.
    return tl.where(row < rows, columns, 0)


@triton.jit
def group_of(first_row, ends_ptr, groups, SIZE: tl.constexpr):
    """The group of rows that holds row ``first_row``, and that group's first row. The last group holds rows beyond it.

    ``ends_ptr`` points to the ends of the groups, int32; SIZE is a power of two, at least ``groups``.
    """
    group = tl.arange(0, SIZE)
    ends = tl.load(ends_ptr + group, mask=group < groups - 1, other=0x7FFFFFFF)
    is_before = ends <= first_row
    return tl.sum(is_before.to(tl.int32), 0), tl.max(tl.where(is_before, ends, 0), 0)


@triton.jit
def load_strip(
    x_ptr, row_factor_ptr, column_factor_ptr, first_row, column, rows, columns,
    ROW_FACTOR: tl.constexpr, COLUMN_FACTOR: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load sixteen rows of x and multiply them by the factors, in fp32; zero outside x."""
    across = column + tl.arange(0, COLUMNS)
    if COLUMN_FACTOR:
        column_factor = tl.load(column_factor_ptr + across, mask=across < columns, other=0.0).to(tl.float32)
    strip = ()
    x_ptr += first_row * columns + column
    for i in tl.static_range(16):
        row = first_row + i
        mask = across < length_of(row, rows, columns)
        x = tl.load(x_ptr + tl.arange(0, COLUMNS), mask=mask, other=0.0).to(tl.float32)
        x_ptr += columns
        if ROW_FACTOR:
            x *= tl.load(row_factor_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
        if COLUMN_FACTOR:
            x *= column_factor
        if ROW_FACTOR or COLUMN_FACTOR:
            # The padding of the last block must not become a negative zero, or NaN.
            x = tl.where(mask, x, 0.0)
        strip = strip + (x,)
    return strip


@triton.jit
def quarter_hadamard(strip, signs, EXACT: tl.constexpr):
    """A quarter of ``hadamard``."""
    now = ()
    for i in tl.static_range(16):
        factor = tl.where((signs >> i) & 1 != 0, -0.0625, 0.0625)
        if EXACT:
            now = now + (strip[i] * factor,)
        else:
            now = now + (rounded_product(strip[i], factor),)
    for level in tl.static_range(4):
        then = ()
        for i in tl.static_range(16):
            if i & (1 << level):
                then = then + (now[i - (1 << level)] - now[i],)
            else:
                then = then + (now[i] + now[i + (1 << level)],)
        now = then
    return now


@triton.jit
def hadamard(strip, signs, EXACT: tl.constexpr):
    """Random Hadamard transform across the 16 rows of a strip (fp32). Bit i of ``signs`` makes sign i -1.

    EXACT: the strip holds bf16 numbers. A sixteenth of one is exact, so a product may be merged with its sum.
    """
    quarters, result = quarter_hadamard(strip, signs, EXACT), ()
    for i in tl.static_range(16):
        result = result + (quarters[i] * 4.0,)
    return result


@triton.jit
def repeat_16(x, COLUMNS: tl.constexpr):
    """Repeat each element 16 times: [COLUMNS / 16] -> [COLUMNS]"""
    return tl.reshape(tl.broadcast_to(x[:, None], (COLUMNS // 16, 16)), (COLUMNS,))


@triton.jit
def joined(strip):
    """A tuple of 16 tensors [...] -> [..., 16]"""
    shape: tl.constexpr = strip[0].shape
    for level in tl.static_range(4):
        pairs = ()
        for i in tl.static_range(8 >> level):
            pairs = pairs + (tl.join(strip[i], strip[i + (8 >> level)]),)
        strip = pairs
    return tl.reshape(strip[0], shape + (16,))


@triton.jit
def separated(x, LEVELS: tl.constexpr):
    """[..., 2^LEVELS] -> a tuple of 2^LEVELS tensors [...], in order"""
    parts = (tl.reshape(x, x.shape[:-1] + (2,) * LEVELS),)
    for level in tl.static_range(LEVELS):
        even, odd = (), ()
        for i in tl.static_range(1 << level):
            pair = tl.split(parts[i])
            even, odd = even + (pair[0],), odd + (pair[1],)
        parts = even + odd
    return parts


@triton.jit
def store_row(
    packed, scale_codes, byte, block, blocks, row, length, columns, data_ptr, scales_ptr, FORM: tl.constexpr
):  # fmt: skip
    """Store one row of a strip: packed codes at these bytes of the row, and the codes of its block scales."""
    tl.store(data_ptr + row * (columns // 2) + byte, packed, mask=byte < length // 2)
    tl.store(scales_ptr + scale_offset(row, block, blocks, FORM), scale_codes, mask=block < length // 16)


@triton.jit
def store_columns(eight_bytes, scale_codes, across, inside, first_row, rows, data_ptr, scales_ptr, FORM: tl.constexpr):
    """Store a strip transposed: 16 packed codes per column as an int64, and the code of their scale.

    across, inside: the strip's columns, and the mask of columns inside the matrix. scale_codes: one per column, or one
    per 16 columns.
    """
    block, blocks = first_row // 16, (rows + 15) // 16
    across = across.to(tl.int64)
    tl.store(data_ptr.to(tl.pointer_type(tl.int64)) + across * blocks + block, eight_bytes, mask=inside)
    at = scales_ptr + scale_offset(across, block, blocks, FORM)
    if scale_codes.shape[0] != eight_bytes.shape[0]:
        scale_codes = repeat_16(scale_codes, eight_bytes.shape[0])
    tl.store(at, scale_codes, mask=inside)
