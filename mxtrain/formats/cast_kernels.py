"""What the casts to all formats share: tiles, block maxima, rounding, where scales lie, and the tensors of a result.

A cast kernel writes one of these forms. "codes": codes and row-major scales. "blocked": the same codes, scales flat in
the 128x4 layout that the tensor cores read. "image": the bf16 values that codes and scales stand for. Those of
``MERGED_FORMS``: what ``mxtrain.formats.mx.merged.merge`` makes of a matrix of that role.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mxtrain.launch.launch import INTERPRETED, cdiv, round_up

FORMS = ("codes", "blocked", "image")
MERGED_FORMS = ("merged_input", "merged_weight", "merged_gradient")

_INTERPRETED = tl.constexpr(INTERPRETED)


# Inductor copies these functions into its own module, but not a tuple that they name.
@triton.constexpr_function
def is_merged(FORM):
    """Whether a group of 128 elements shares a scale."""
    return FORM.startswith("merged_")


@triton.constexpr_function
def shares_tile(FORM, ALONG_ROWS):
    """Whether 128 groups of 128 elements share a scale."""
    return FORM == "merged_weight" or (FORM == "merged_input" and not ALONG_ROWS)


@triton.jit
def tile_start(columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """First row (int64) and first column of this program's tile. Neighboring programs share their rows."""
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
def scale_offset(row, block, blocks, FORM: tl.constexpr):
    """Offset of the scale of (row, block): in the 128x4 layout for form "blocked", row-major for "codes".

    ``blocks`` counts per row. Source: NVIDIA, cuBLAS documentation, "1D block scaling factors layout"; torchao
    ``to_blocked``.
    """
    if FORM == "blocked":
        tile = (row // 128) * ((blocks + 3) // 4) + block // 4
        return tile * 512 + (row % 32) * 16 + (row // 32 % 4) * 4 + block % 4
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


@triton.jit
def rounded_product(a, b):
    """a * b (fp32), rounded before any sum. Compilers merge ``a * b + c``, which differs for denormal products."""
    if _INTERPRETED:
        return a * b
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)


class Storage(NamedTuple):
    """How codes and scales of a format are stored."""

    block_size: int
    codes: torch.dtype
    elements_per_code: int
    scales: torch.dtype


class Cast(NamedTuple):
    """Result of one cast: codes and scales, or an image and None. Both are None for a cast that is not wanted."""

    data: torch.Tensor | None
    scales: torch.Tensor | None


def empty_cast(storage: Storage, rows: int, columns: int, form: str, device: torch.device, tiles: bool = False) -> Cast:
    """Allocate the result of a cast of [rows, columns] along its rows. ``tiles`` as in ``shares_tile``."""
    if form == "image":
        return Cast(torch.empty(rows, columns, dtype=torch.bfloat16, device=device), None)
    codes = torch.empty(rows, columns // storage.elements_per_code, dtype=torch.uint8, device=device)
    if form in MERGED_FORMS:
        groups = columns // 128
        shape, allocate = (groups, rows), torch.empty
        if tiles:
            shape = (cdiv(rows, 128), round_up(groups, 4))
            allocate = torch.zeros if groups % 4 else torch.empty
        return Cast(codes.view(storage.codes), allocate(shape, dtype=torch.float32, device=device))
    blocks = columns // storage.block_size
    shape, allocate = (rows, blocks), torch.empty
    if form == "blocked":
        shape = (round_up(rows, 128) * round_up(blocks, 4),)
        # The tensor cores read the padding of the blocked layout, so it must not hold NaN.
        allocate = torch.zeros if shape[0] != rows * blocks else torch.empty
    return Cast(codes.view(storage.codes), allocate(shape, dtype=torch.uint8, device=device).view(storage.scales))


def empty_casts(
    storage: Storage,
    rows: int,
    columns: int,
    along_rows: bool,
    along_columns: bool,
    form: str,
    device: torch.device,
    pads_image: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Allocate data and scales of casts of [rows, columns]: along its rows, then along its columns. None for no cast.

    Codes along columns are transposed, [columns, rows], and padded to whole blocks or merged groups. An image is not
    transposed, and padded only with ``pads_image``.
    """
    by_row = by_column = Cast(None, None)
    if along_rows:
        by_row = empty_cast(storage, rows, columns, form, device, shares_tile(form, True))
    if along_columns:
        padded = round_up(rows, 128 if form in MERGED_FORMS else storage.block_size)
        shape = (padded if pads_image else rows, columns) if form == "image" else (columns, padded)
        by_column = empty_cast(storage, *shape, form, device, shares_tile(form, False))
    return *by_row, *by_column


def flat(*results: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the tensors among ``results``, as an op returns them."""
    return [result for result in results if result is not None]


def casts_of(results: list[torch.Tensor], form: str) -> list[Cast]:
    """Name the tensors that an op returned for one or more casts."""
    if form == "image":
        return [Cast(data, None) for data in results]
    return [Cast(*pair) for pair in zip(results[::2], results[1::2])]


def by_dim(results: list[torch.Tensor], dims: Iterable[int], form: str) -> dict[int, Cast]:
    """Name the tensors that an op returned for the casts of a matrix along ``dims``, the one along 1 first."""
    return dict(zip(sorted(dims, reverse=True), casts_of(results, form)))


def as_bytes(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return codes or scales as the bytes that kernels store, and any other tensor unchanged."""
    return x.view(torch.uint8) if x is not None and x.element_size() == 1 else x
