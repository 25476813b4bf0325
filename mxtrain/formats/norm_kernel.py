"""What MXNorm's kernels of all formats share: rows and their blocks, the RMS estimate, and the launch.

One read of x, one write of the cast: the block maxima that the scales need also give the RMS estimate, so a row is
normalized and cast while registers hold it. A row too long for that is read twice, the second time mostly from the L2
cache.

A format's kernel calls ``normalize_rows`` with functions of its own: how it holds blocks (``whole_blocks``), their
terms of the estimate (``block_terms``), and how it casts and stores them. Each gets the format's ``setting``: what else
the cast depends on, a constant or a number.

Bytes per row of D elements: 2 D or 4 D read; 4 (rho) and 2 D (image) or codes and scales written.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import Storage, as_bytes, block_amax, empty_cast, flat, magnitude_bits, rounded
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.launch.launch import MAX_PERSISTENT_COLUMNS, Launch, cdiv, check_row_length, contiguous, next_power_of_2


@triton.jit
def locate(
    row, rows, first_block, blocks,
    PIECE: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Locate BLOCKS blocks of each row: block [K], offsets [R, K, B / PIECES], and masks [R, K] and [R, K, 1].

    The offsets are those of one of the PIECES into which each block of B elements is split.
    """
    block = first_block + tl.arange(0, BLOCKS)
    element = PIECE * (BLOCK // PIECES) + tl.arange(0, BLOCK // PIECES)
    offsets = (row * (blocks * BLOCK))[:, None, None] + (block * BLOCK)[None, :, None] + element[None, None, :]
    block_mask = (row < rows)[:, None] & (block < blocks)[None, :]
    return block, offsets, block_mask, block_mask[:, :, None]


@triton.jit
def load_blocks(
    x_ptr, residual_ptr, row, rows, first_block, blocks,
    RESIDUAL: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load BLOCKS blocks of each row as they are stored: (x, residual) of each piece; (x, x) without a residual."""
    pieces = ()
    for i in tl.static_range(PIECES):
        _, offsets, _, mask = locate(row, rows, first_block, blocks, i, PIECES, BLOCKS, BLOCK)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
        if RESIDUAL:
            pieces = pieces + ((x, tl.load(residual_ptr + offsets, mask=mask, other=0.0)),)
        else:
            pieces = pieces + ((x, x),)
    return pieces


@triton.jit
def piece_of(
    loaded, total_ptr, row, rows, first_block, blocks, PIECE: tl.constexpr, STORE: tl.constexpr,
    RESIDUAL: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x, or x + residual rounded to the dtype of x, as fp32.  loaded: from ``load_blocks``.  STORE: store that sum."""
    x = loaded[PIECE][0].to(tl.float32)
    if RESIDUAL:
        x += loaded[PIECE][1].to(tl.float32)
        total = rounded(x, loaded[PIECE][0].dtype)
        if STORE:
            _, offsets, _, mask = locate(row, rows, first_block, blocks, PIECE, PIECES, BLOCKS, BLOCK)
            tl.store(total_ptr + offsets, total, mask=mask)
        x = total.to(tl.float32)
    return x


@triton.jit
def whole_blocks(
    loaded, total_ptr, row, rows, first_block, blocks, STORE: tl.constexpr,
    RESIDUAL: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the blocks that ``load_blocks`` loaded, [ROWS, BLOCKS, BLOCK], and their maxima [ROWS, BLOCKS]."""
    x = piece_of(loaded, total_ptr, row, rows, first_block, blocks, 0, STORE, RESIDUAL, PIECES, BLOCKS, BLOCK)
    return x, block_amax(x, 2)


@triton.jit
def powers_near(amax):
    """A power of two (fp32) that brings a block with this maximum near 1, and its inverse (fp64).

    Squares of large and small numbers leave the range of fp32.
    """
    exponent = tl.minimum(tl.maximum(magnitude_bits(amax) >> 23, 1), 253)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return down, (exponent << 23).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def block_terms(x, amax, setting, P: tl.constexpr, ESTIMATOR: tl.constexpr):
    """Sum of x^2 ("exact"), or the maximum to the power P, of each block in fp64.  x, amax: from ``whole_blocks``

    A row has one term per block, so fp64 costs nothing, and rho does not depend on the order of their sum.
    """
    if ESTIMATOR == "exact":
        down, up = powers_near(amax)
        scaled = x * down[:, :, None]
        terms = tl.sum(scaled * scaled, 2).to(tl.float64) * (up * up)
    else:
        terms = amax.to(tl.float64)
        if P == 2:
            terms *= terms
    return terms


@triton.jit
def _inverse_rms(row_sum, eps, FACTOR: tl.constexpr, P: tl.constexpr, ESTIMATOR: tl.constexpr):
    """rho = 1 / sqrt(r^2 + eps) in fp32. FACTOR turns the sum over a row into r^2, or into r for P = 1."""
    if ESTIMATOR == "none":
        return tl.full(row_sum.shape, 1.0, tl.float32)
    mean_square = row_sum * FACTOR
    if P == 1 and ESTIMATOR != "exact":
        mean_square *= mean_square
    # Graphs that launch this kernel give numbers as fp64.
    return (1.0 / tl.sqrt(mean_square + tl.cast(eps, tl.float32))).to(tl.float32)


@triton.jit
def normalize_rows(
    x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps, setting,
    HOLD: tl.constexpr, TERMS: tl.constexpr, STORE: tl.constexpr,
    FACTOR: tl.constexpr, P: tl.constexpr, ESTIMATOR: tl.constexpr, FORM: tl.constexpr, RESIDUAL: tl.constexpr,
    HARDWARE: tl.constexpr, PERSISTENT: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, SCALES: tl.constexpr = None,
):  # fmt: skip
    """rho of ROWS rows, and the cast of x * rho. ESTIMATOR "none": rho is 1, and not stored.

    A tensor in a kernel has a power of two of elements, so a row of 24 blocks is held as three PARTS of BLOCKS = 8.

    HOLD: as ``whole_blocks``. TERMS: as ``block_terms``. STORE(x, amax, rho, scales, setting, row, rows, first_block,
    blocks, data_ptr, scales_ptr, FORM, HARDWARE, BLOCKS): casts x * rho and stores it; rho and row are [ROWS].
    SCALES(amax, setting, row, rows): the scales of rows that STORE gets, from the largest |x * rho| of each row; None
    for a format without.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    sums, largest = tl.zeros((ROWS, BLOCKS), tl.float64), tl.zeros((ROWS, BLOCKS), tl.int32)
    if PERSISTENT:
        # All loads come before the first store, across which the compiler moves no load. With a residual, NVFP4 codes
        # take 136 instead of 149 us at 32768 x 2048.
        loaded = ()
        for i in tl.static_range(PARTS):
            loaded = loaded + (
                load_blocks(x_ptr, residual_ptr, row, rows, i * BLOCKS, blocks, RESIDUAL, PIECES, BLOCKS, BLOCK),
            )
        parts = ()
        for i in tl.static_range(PARTS):
            x, amax = HOLD(loaded[i], total_ptr, row, rows, i * BLOCKS, blocks, True, RESIDUAL, PIECES, BLOCKS, BLOCK)
            if ESTIMATOR != "none":
                sums += TERMS(x, amax, setting, P, ESTIMATOR)
            if SCALES is not None:
                largest = tl.maximum(largest, magnitude_bits(amax))
            parts = parts + ((x, amax),)
    else:
        for first in range(0, blocks, BLOCKS):
            loaded = load_blocks(x_ptr, residual_ptr, row, rows, first, blocks, RESIDUAL, PIECES, BLOCKS, BLOCK)
            x, amax = HOLD(loaded, total_ptr, row, rows, first, blocks, False, RESIDUAL, PIECES, BLOCKS, BLOCK)
            if ESTIMATOR != "none":
                sums += TERMS(x, amax, setting, P, ESTIMATOR)
            if SCALES is not None:
                largest = tl.maximum(largest, magnitude_bits(amax))
    rho, scales = _inverse_rms(tl.sum(sums, 1), eps, FACTOR, P, ESTIMATOR), None
    if SCALES is not None:
        # fp32 multiplication is monotonic, so this is exactly the largest |x * rho| of the row.
        scales = SCALES(tl.max(largest, 1).to(tl.float32, bitcast=True) * rho, setting, row, rows)
    if PERSISTENT:
        for i in tl.static_range(PARTS):
            x, amax = parts[i]
            STORE(
                x, amax, rho, scales, setting, row, rows, i * BLOCKS, blocks, data_ptr, scales_ptr,
                FORM, HARDWARE, BLOCKS,
            )  # fmt: skip
    else:
        for first in range(0, blocks, BLOCKS):
            loaded = load_blocks(x_ptr, residual_ptr, row, rows, first, blocks, RESIDUAL, PIECES, BLOCKS, BLOCK)
            x, amax = HOLD(loaded, total_ptr, row, rows, first, blocks, True, RESIDUAL, PIECES, BLOCKS, BLOCK)
            STORE(x, amax, rho, scales, setting, row, rows, first, blocks, data_ptr, scales_ptr, FORM, HARDWARE, BLOCKS)
    if ESTIMATOR != "none":
        tl.store(rho_ptr + row, rho, mask=row < rows)


class RowTile(NamedTuple):
    """The part of the matrix that one program holds at a time.

    Attributes:
        persistent: the program holds whole rows. Otherwise it walks along them twice.
        rows: rows per program.
        parts: tensors that hold a row.
        columns: elements per row of one of them, a power of two.
        warps: warps per program.
    """

    persistent: bool
    rows: int
    parts: int
    columns: int
    warps: int


# (image, exact RMS) -> elements per thread at most. Much is computed once per thread, but an SM has registers for few
# such threads. With the exact RMS more threads are faster: 85 instead of 108 us at 16384 x 5120.
_ELEMENTS_PER_THREAD = {(False, False): 112, (False, True): 80, (True, False): 96, (True, True): 64}


def row_tile(columns: int, form: str, estimator: str) -> RowTile:
    """Return the tile for rows of ``columns`` elements, chosen by times on an H200.

    A row that fills five or six eighths of a power of two is held as five or three parts. 16384 rows of 5120 elements,
    cast to MXFP8 images, take 86 us like this, and 102 as a tile of 4096 and one of 1024. Seven parts are faster than
    one masked tile for NVFP4 codes only (11 %), and slower with the exact RMS (12 %).
    """
    if columns > MAX_PERSISTENT_COLUMNS:
        return RowTile(False, 1, 1, 8192, 8)
    image, exact = form == "image", estimator == "exact"
    filled = cdiv(columns, 32) * 32
    whole = next_power_of_2(filled)
    eighths = cdiv(filled * 8, whole)
    parts, part = {5: (5, whole // 8), 6: (3, whole // 4)}.get(eighths, (1, whole))
    elements = 2048 if parts == 1 else 512
    if image and exact:
        # 67 instead of 75 us at 65536 x 1024, 66 instead of 71 at 52224 x 1280.
        elements //= 2
        if parts == 1 and whole > 4096:
            # 70 instead of 81 us at 4096 x 16384, with a residual 136 instead of 172.
            parts, part = 2, whole // 2
    rows = max(1, elements // part)
    if parts == 1 and image:
        return RowTile(True, rows, parts, part, 8 if whole > 8192 else max(1, min(4, whole // 1024)))
    most = _ELEMENTS_PER_THREAD[image, exact]
    return RowTile(True, rows, parts, part, next_power_of_2(cdiv(rows * parts * part, 32 * most)))


def norm_launch(
    kernel: Callable,
    storage: Storage,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    p: int,
    estimator: str,
    eps: float,
    constant: float,
    form: str,
    arguments: tuple,
    constants: dict,
    row_scales: torch.Tensor | None = None,
) -> tuple[list[torch.Tensor], Launch | None]:
    """Allocate the results of an MXNorm cast; return them with the launch for them.

    The first arguments and constants of a format's kernel are those of ``normalize_rows``; ``arguments`` and
    ``constants`` are the others. ``estimator`` "none" casts x itself, without rho among the results. ``row_scales`` [T]
    is a result of the format alone, among its arguments.
    """
    rows, columns = x.shape
    data, scales = empty_cast(storage, rows, columns, form, x.device)
    rho = None if estimator == "none" else torch.empty(rows, dtype=torch.float32, device=x.device)
    total = None if residual is None else torch.empty_like(x)
    results = flat(data, scales, rho, row_scales, total)
    if x.numel() == 0:
        return results, None
    block, tile = storage.block_size, row_tile(columns, form, estimator)
    return results, Launch(
        kernel,
        (cdiv(rows, tile.rows),),
        (
            x, residual, total, as_bytes(data), as_bytes(scales), rho, rows, columns // block, eps, *arguments,
        ),
        dict(
            FACTOR=1.0 / columns if estimator == "exact" else 1.0 / (columns // block * constant**p),
            P=p, ESTIMATOR=estimator, FORM=form, RESIDUAL=residual is not None,
            PERSISTENT=tile.persistent, ROWS=tile.rows, PARTS=tile.parts,
            BLOCKS=tile.columns // block, num_warps=tile.warps, **constants,
        ),
    )  # fmt: skip


class MXNormCast(NamedTuple):
    """Result of a format's norm.

    Attributes:
        data: codes, or the image.
        scales: the scales of the codes. None for an image.
        rho: the inverse RMS of every row, fp32.
        total: x + residual in the dtype of x. None without a residual.
        row_scales: a scale of every row, fp32, where codes have one.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    rho: torch.Tensor
    total: torch.Tensor | None
    row_scales: torch.Tensor | None = None


def call_norm(
    op: Callable, x: torch.Tensor, residual: torch.Tensor | None, estimate: RMSEstimate, form: str, *settings
) -> MXNormCast:
    """Call a format's op, f(x, residual, p, estimator, eps, constant, form, *settings), and name its results.

    Raises:
        ValueError: for rows that are too long.
    """
    check_row_length(x)
    of_estimate = estimate.p, estimate.estimator, estimate.eps, estimate.constant
    data, *others = op(*contiguous(x, residual), *of_estimate, form, *settings)
    # Dynamo makes a tuple of the list.
    scales, (rho, *others) = (None, others) if form == "image" else (others[0], others[1:])
    total, others = (None, others) if residual is None else (others[-1], others[:-1])
    return MXNormCast(data, scales, rho, total, *others)
