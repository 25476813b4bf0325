"""What the casts to both formats compute inside kernels: tiles, block maxima, rounding, and where a scale is stored."""

import triton
import triton.language as tl

from mxtrain.kernels.device import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def tile_start(columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """First row (int64) and first column of this program's tile. Neighbouring programs share their rows."""
    tiles = (columns + COLUMNS - 1) // COLUMNS
    return (tl.program_id(0) // tiles).to(tl.int64) * ROWS, (tl.program_id(0) % tiles) * COLUMNS


@triton.jit
def magnitude_bits(x):
    """Bits of |x| (fp32) as int32. They sort as the magnitudes do, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def block_amax(x, AXIS: tl.constexpr):
    """Largest magnitude of x (fp32) along AXIS. NaN if any element is NaN, unlike ``tl.max``, which drops NaN."""
    return tl.max(magnitude_bits(x), AXIS).to(tl.float32, bitcast=True)


@triton.jit
def blocked_offset(row, block, blocks):
    """Offset of the scale of (row, block) in the 128x4 layout that tensor cores read. ``blocks`` counts per row.

    Source: NVIDIA, cuBLAS documentation, "1D block scaling factors layout"; torchao ``to_blocked``.
    """
    tile = (row // 128) * ((blocks + 3) // 4) + block // 4
    return tile * 512 + (row % 32) * 16 + (row // 32 % 4) * 4 + block % 4


@triton.jit
def scale_offset(row, block, blocks, FORM: tl.constexpr):
    """Offset of the scale of (row, block): blocked for form "blocked", row-major for "codes"."""
    if FORM == "blocked":
        return blocked_offset(row, block, blocks)
    else:
        return row * blocks + block


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Round x (fp32) to the nearest number of DTYPE, bf16 or fp32; ties go to even."""
    if _INTERPRETED and DTYPE == tl.bfloat16:
        # The interpreter truncates where it should round.
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x != x, x, bits.to(tl.float32, bitcast=True))
    return x.to(DTYPE)
