"""RMSNorm and LayerNorm of every row, with an optional residual add, and their backward.

LayerNorm is RMSNorm with CENTERED, which subtracts the mean of the row, and BIAS.

Forward: one read of x, one write of y. Bytes per row: D elements of x read and D of y written, and 4 bytes each of rstd
and, for LayerNorm, of the mean. A residual adds D elements read and D elements of the sum written.

Backward: dx, dweight and dbias in one pass over dy and x. With xhat = (x - mean) * rstd and h = dy * weight:

    dx = rstd * (h - mean_D(h) - xhat * mean_D(h * xhat)) + dtotal        RMSNorm has no mean_D(h)

    dweight = sum_T(dy * xhat)        dbias = sum_T(dy)

Bytes per row: D elements each of dy, x, dx and dtotal, and 4 bytes each of rstd and of the mean.

Rows too long for registers are read twice, the second time mostly from the L2 cache. The row length is a compile-time
constant, so that the compiler unrolls the loops over such a row and its loads need not wait for each other: 70 instead
of 76 us for LayerNorm of 4096 rows of 16384 elements (H200).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mxtrain.launch.launch import (
    H100_SMS,
    INTERPRETED,
    MAX_PERSISTENT_COLUMNS,
    Launch,
    cdiv,
    check_row_length,
    contiguous,
    next_power_of_2,
    register_op,
    shared_memory,
    sm_count,
)

# Launch plans


class Plan(NamedTuple):
    """How one kernel walks the rows. Rows, columns and warps are powers of two."""

    persistent: bool
    """True: registers hold whole rows, which are read once. False: rows are read twice, a chunk of columns at a time"""
    rows: int
    """Rows per tile"""
    columns: int
    """Columns held at once"""
    warps: int
    stages: int
    """Tiles in flight (chunks, if not persistent); 1 loads nothing ahead"""
    programs: int
    """Programs that share the tiles; in the forward one per tile"""


# Ladders, measured on an H100 and an H200: (longest row, elements per tile, warps). Longer rows are read in chunks.
RMS_FORWARD = (
    (256, 2048, 4),
    (1024, 2048, 2),
    (2048, 2048, 4),
    (4095, 4096, 4),
    (4096, 4096, 8),
    (8191, 8192, 8),
)
LAYER_FORWARD = (
    (256, 2048, 4),
    (1023, 2048, 1),
    (1024, 2048, 2),
    (2047, 4096, 2),
    (2048, 2048, 1),
    (8191, 8192, 4),
)
# (longest row, elements per tile, warps, tiles in flight, programs per SM); longer rows: LOOPED_BACKWARD.
RMS_BACKWARD = (
    (512, 1024, 1, 3, 8),
    (1023, 2048, 2, 3, 4),
    (1024, 2048, 2, 4, 2),
    (2048, 4096, 4, 3, 2),
    (4096, 8192, 8, 3, 1),
    (6143, 8192, 8, 4, 1),
    (8192, 8192, 8, 3, 1),
    (MAX_PERSISTENT_COLUMNS, 16384, 32, 1, 1),
)
LAYER_BACKWARD = (
    *RMS_BACKWARD[:3],
    (2047, 4096, 4, 3, 2),
    (2048, 8192, 8, 3, 1),
    (4095, 4096, 4, 3, 2),
    *RMS_BACKWARD[4:7],
    (MAX_PERSISTENT_COLUMNS, 16384, 16, 1, 1),
)
LOOPED_BACKWARD = (4096, 16, 4, 1)

LONGEST_CHUNK, SHORTEST_CHUNK = 4096, 1024
# A longer backward tile leaves no registers for the weight, which is then loaded with every tile.
LONGEST_TILE_WITH_WEIGHT = 8192
# Smaller backward tiles leave lanes of a warp idle: they do not let more programs share an SM.
SMALLEST_TILE = 1024
# A backward program with fewer tiles does not repay the partial row that it leaves to be summed.
FEWEST_TILES = 2
# Shared memory for sums that cross warps. The rest holds what the backward loads ahead: tiles of dy, x and dtotal and,
# where rows are not held, chunks of the weight and of the partial sums.
OTHER_SHARED_BYTES = 12 * 1024


def _step(ladder: tuple, columns: int) -> tuple | None:
    """The settings for rows of this length; None beyond the ladder's end."""
    return next((settings for longest, *settings in ladder if columns <= longest), None)


@functools.lru_cache(4096)
def forward_plan(rows: int, columns: int, centered: bool, sms: int = H100_SMS) -> Plan:
    """How the forward walks a matrix [rows, columns] on a GPU with this many SMs; ``centered``: LayerNorm's."""
    if step := _step(LAYER_FORWARD if centered else RMS_FORWARD, columns):
        tile, warps = step
        width = next_power_of_2(columns)
        height = _rows_per_tile(tile, rows, width, sms)
        return Plan(True, height, width, min(warps, max(1, height * width // 32)), 1, cdiv(rows, height))
    chunk = LONGEST_CHUNK
    # LayerNorm reads 8192 columns in four chunks: 69 us instead of 79 for 8192 rows (H200).
    while chunk > SHORTEST_CHUNK and (columns % chunk or (centered and columns <= 2 * chunk)):
        chunk //= 2
    return Plan(False, 1, chunk, 8 if centered and chunk < LONGEST_CHUNK else min(16, chunk // 128), 1, rows)


@functools.lru_cache(4096)
def backward_plan(rows: int, columns: int, centered: bool, sms: int = H100_SMS) -> Plan:
    """How the backward walks a matrix [rows, columns], as ``forward_plan``.

    ``launch_backward`` takes fewer stages where the GPU's shared memory holds no more.
    """
    step = _step(LAYER_BACKWARD if centered else RMS_BACKWARD, columns)
    tile, warps, stages, per_sm = step or LOOPED_BACKWARD
    if step:
        width = next_power_of_2(columns)
        height = _rows_per_tile(tile, rows, width, sms)
        # Smaller tiles keep the elements per thread and per SM.
        warps = max(1, warps * height * width // tile)
        per_sm = max(1, per_sm * tile // max(height * width, SMALLEST_TILE))
    else:
        height, width = 1, tile
    tiles = cdiv(rows, height)
    # All programs walk as many tiles as the busiest one: fewer partial rows in the same time.
    walk = max(cdiv(tiles, per_sm * sms), min(FEWEST_TILES, tiles))
    stages = min(stages, walk if step else cdiv(columns, width))
    return Plan(step is not None, height, width, warps, stages, cdiv(tiles, walk))


def _rows_per_tile(tile: int, rows: int, width: int, sms: int) -> int:
    """Rows in a tile of about ``tile`` elements; fewer where some SMs would have no tile."""
    return min(max(1, tile // width), next_power_of_2(cdiv(rows, sms)))


def _partials_tile(programs: int, columns: int, sms: int) -> tuple[int, int, int]:
    """(partial rows, columns, warps) per tile of the sum over programs, in which each program owns some columns.

    Tiles are as wide as leaves a program for every SM, from a memory sector (8 fp32 numbers) to half a KiB.
    """
    width = max(8, min(128, next_power_of_2(columns) // next_power_of_2(sms)))
    height = max(1, min(next_power_of_2(programs), 4096 // width))
    return height, width, max(1, min(8, height * width // 512))


def _is_symbolic(x: torch.Tensor) -> bool:
    """Whether x has no plan: comparing a symbolic size would fix its value. Tracing launches nothing anyway."""
    return any(isinstance(size, torch.SymInt) for size in x.shape)


# Forward


@triton.jit
def _load_total(x_ptr, residual_ptr, offsets, mask, eviction: tl.constexpr, RESIDUAL: tl.constexpr):
    """x in fp32; with a residual x + residual, rounded to the dtype of x as it is stored and normalized."""
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy=eviction).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + offsets, mask=mask, other=0.0, eviction_policy=eviction).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _row_mean(x, columns, PRECISE: tl.constexpr):
    """The mean of every row.  x [R, C], zero behind the row's end -> [R].  PRECISE: see ``_inverse_root``"""
    # Computed while the rows are being loaded.
    inverse = 1.0 / tl.cast(columns, tl.float32)
    row_sum = tl.sum(x, 1)
    if PRECISE:
        return tl.div_rn(row_sum, tl.cast(columns, tl.float32))
    return row_sum * inverse


@triton.jit
def _inverse_root(mean_square, eps, PRECISE: tl.constexpr, NORMAL: tl.constexpr):
    """1 / sqrt(mean_square + eps) of every row.  [R] -> [R, 1]

    PRECISE: round every step correctly, which shows only in fp32 results and takes longer than the GPU's instruction.
    NORMAL: eps is not a denormal number.
    """
    shifted = mean_square + tl.cast(eps, tl.float32)  # graphs that launch this kernel give numbers as fp64
    if PRECISE:
        rstd = tl.div_rn(1.0, tl.sqrt_rn(shifted))
    else:
        # tl.rsqrt flushes denormals (ftz), so a small sum would count as zero. Without ftz rsqrt takes longer.
        name: tl.constexpr = "rsqrt.approx.ftz.f32" if NORMAL else "rsqrt.approx.f32"
        rstd = tl.inline_asm_elementwise(name + " $0, $1;", "=f,f", [shifted], tl.float32, is_pure=True, pack=1)
    return rstd[:, None]


@triton.jit
def _mean_and_variance(origin, distances, squares, columns, PRECISE: tl.constexpr):
    """Mean [R, 1] and variance [R] of every row, from sums of distances from an origin near the mean.

    The sums lose few digits even where the mean is large: the mean of any C elements of a row is within sqrt(D / C)
    standard deviations of the mean of the row. A rounding error of the origin cancels, which matters in rows of equal
    elements.

    origin: [R, 1]. distances, squares: parts of the sums of x - origin and (x - origin)^2, [R, C].
    """
    offset = _row_mean(distances, columns, PRECISE)
    variance = _row_mean(squares, columns, PRECISE)
    # Rounding can make the difference negative. A sum that overflows stays infinite, and NaN stays NaN.
    variance = tl.where(variance < float("inf"), tl.maximum(variance - offset * offset, 0.0), variance)
    return origin + offset[:, None], variance


@triton.jit
def _below(index, end, EXACT: tl.constexpr):
    """index < end. EXACT: true everywhere, as a constant that the compiler sees."""
    if EXACT:
        return tl.full(index.shape, 1, tl.int1)
    return index < end


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, mean_ptr, rstd_ptr, rows, eps, columns: tl.constexpr,
    CENTERED: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    PERSISTENT: tl.constexpr, EXACT: tl.constexpr, PRECISE: tl.constexpr, NORMAL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = tl.arange(0, COLUMNS)[None, :]
    # One 64-bit offset per program; offsets within a tile fit in 32 bits.
    start = tl.program_id(0).to(tl.int64) * (ROWS * columns)
    x_ptr += start
    y_ptr += start
    if RESIDUAL:
        residual_ptr += start
        total_ptr += start
    in_tile = tl.arange(0, ROWS)[:, None] * columns
    row_mask = _below(row, rows, EXACT)
    if PERSISTENT:
        column_mask = _below(lane, columns, EXACT)
        mask = row_mask & column_mask
        offsets = in_tile + lane
        total = _load_total(x_ptr, residual_ptr, offsets, mask, "", RESIDUAL)
        if WEIGHT:
            # Loaded while the row is being summed.
            weight = tl.load(weight_ptr + lane, mask=column_mask, other=0.0, eviction_policy="evict_last")
        if BIAS:
            bias = tl.load(bias_ptr + lane, mask=column_mask, other=0.0, eviction_policy="evict_last")
        if CENTERED:
            origin = _row_mean(total, columns, False)[:, None]
            distance = tl.where(column_mask, total - origin, 0.0)
            mean, variance = _mean_and_variance(origin, distance, distance * distance, columns, PRECISE)
            rstd = _inverse_root(variance, eps, PRECISE, NORMAL)
            y = (total - mean) * rstd
        else:
            rstd = _inverse_root(_row_mean(total * total, columns, PRECISE), eps, PRECISE, NORMAL)
            y = total * rstd
        if WEIGHT:
            y *= weight.to(tl.float32)
        if BIAS:
            y += bias.to(tl.float32)
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
        if RESIDUAL:
            tl.store(total_ptr + offsets, total.to(total_ptr.dtype.element_ty), mask=mask)
    else:
        if CENTERED:
            # The mean of the first chunk is the origin.
            column_mask = _below(lane, columns, EXACT)
            mask = row_mask & column_mask
            total = _load_total(x_ptr, residual_ptr, in_tile + lane, mask, "evict_last", RESIDUAL)
            origin = _row_mean(total, tl.minimum(columns, COLUMNS), False)[:, None]
            distances = tl.where(column_mask, total - origin, 0.0)
            squares = distances * distances
        else:
            squares = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(COLUMNS if CENTERED else 0, columns, COLUMNS):
            column = first + lane
            column_mask = _below(column, columns, EXACT)
            mask = row_mask & column_mask
            total = _load_total(x_ptr, residual_ptr, in_tile + column, mask, "evict_last", RESIDUAL)
            if CENTERED:
                distance = tl.where(column_mask, total - origin, 0.0)
                distances += distance
                squares += distance * distance
            else:
                squares += total * total
        if CENTERED:
            mean, variance = _mean_and_variance(origin, distances, squares, columns, PRECISE)
            rstd = _inverse_root(variance, eps, PRECISE, NORMAL)
        else:
            rstd = _inverse_root(_row_mean(squares, columns, PRECISE), eps, PRECISE, NORMAL)
        for first in range(0, columns, COLUMNS):
            column = first + lane
            column_mask = _below(column, columns, EXACT)
            mask = row_mask & column_mask
            total = _load_total(x_ptr, residual_ptr, in_tile + column, mask, "evict_first", RESIDUAL)
            if CENTERED:
                y = (total - mean) * rstd
            else:
                y = total * rstd
            if WEIGHT:
                y *= tl.load(weight_ptr + column, mask=column_mask, other=0.0).to(tl.float32)
            if BIAS:
                y += tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)
            tl.store(y_ptr + in_tile + column, y.to(y_ptr.dtype.element_ty), mask=mask)
            if RESIDUAL:
                tl.store(total_ptr + in_tile + column, total.to(total_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row_mask)
    if CENTERED:
        tl.store(mean_ptr + row, mean, mask=row_mask)


def launch_forward(
    x: torch.Tensor, residual, weight, bias, eps: float, centered: bool, plan: Plan | None = None
) -> tuple[list[torch.Tensor], Launch | None]:
    """The op's results (y, rstd, with ``centered`` the mean, with a residual the total), and the launch for them.

    Without ``plan`` the shape's own plan is taken.
    """
    rows, columns = x.shape
    numbers = [torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2 if centered else 1)]
    total = None if residual is None else torch.empty_like(x)
    results = [torch.empty_like(x), *numbers, *([] if total is None else [total])]
    if _is_symbolic(x) or x.numel() == 0:
        return results, None
    plan = plan or forward_plan(rows, columns, centered, sm_count(x.device))
    mean = numbers[1] if centered else None
    launch = Launch(
        _norm_kernel,
        (cdiv(rows, plan.rows),),
        (x, residual, weight, bias, results[0], total, mean, numbers[0], rows, eps),
        dict(
            columns=columns, CENTERED=centered,
            RESIDUAL=residual is not None, WEIGHT=weight is not None, BIAS=bias is not None,
            PERSISTENT=plan.persistent, EXACT=rows % plan.rows == 0 and columns % plan.columns == 0,
            PRECISE=INTERPRETED or x.dtype == torch.float32, NORMAL=eps >= torch.finfo(torch.float32).tiny,
            ROWS=plan.rows, COLUMNS=plan.columns, num_warps=plan.warps,
        ),
    )  # fmt: skip
    return results, launch


_forward = register_op(
    "row_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool centered) -> Tensor[]",
    launch_forward,
)


def row_norm(
    x: torch.Tensor, weight, bias, eps: float, residual, centered: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return (y, mean, rstd, total) as ``mxtrain.norms.reference.row_norm``, whose arguments these are.

    x and residual [T, D], weight and bias [D]: bf16, fp16 or fp32. The arithmetic is fp32, and y is rounded once.
    """
    check_row_length(x)
    y, rstd, *others = _forward(*contiguous(x, residual, weight, bias), eps, centered)
    return y, others[0] if centered else None, rstd, x if residual is None else others[-1]


# Backward


@triton.jit
def _partials_of_dbias(partials_ptr, columns, DWEIGHT: tl.constexpr):
    """The program's row of partial sums of dbias. These rows follow the rows of dweight, if dweight is wanted."""
    row = tl.cast(tl.program_id(0), tl.int64)
    if DWEIGHT:
        row += tl.num_programs(0)
    return partials_ptr + row * columns


@triton.jit
def _persistent_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, dtotal_ptr, dx_ptr, partials_ptr, rows, columns: tl.constexpr,
    CENTERED: tl.constexpr, WEIGHT: tl.constexpr, DTOTAL: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, HOLD_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Store dx, and one row of partial sums of dweight and dbias per program, which ``_sum_partials_kernel`` adds up.

    A program walks tiles of rows and sums its share in registers. The order of programs does not matter: the bits are
    the same every time.
    """
    program = tl.program_id(0)
    row_in_tile = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (column < columns)[None, :]
    offsets = row_in_tile[:, None] * columns + column[None, :]
    if WEIGHT and HOLD_WEIGHT:
        weight = tl.load(weight_ptr + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if DWEIGHT:
        # As large as a tile: rows lie in different threads, and are summed at the end.
        dweight = tl.zeros((ROWS, COLUMNS), tl.float32)
    if DBIAS:
        dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + row_in_tile
        start = tl.cast(tile, tl.int64) * (ROWS * columns)
        mask = (row < rows)[:, None] & inside
        dy = tl.load(dy_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
        xhat = tl.load(x_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        if CENTERED:
            xhat -= tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        xhat *= rstd
        if DWEIGHT:
            dweight += dy * xhat
        if DBIAS:
            dbias += dy
        h = dy
        if WEIGHT:
            if not HOLD_WEIGHT:
                weight = tl.load(weight_ptr + column[None, :], mask=inside, other=0.0).to(tl.float32)
            h *= weight
        dxhat = h - xhat * (tl.sum(h * xhat, 1)[:, None] / columns)
        if CENTERED:
            dxhat -= tl.sum(h, 1)[:, None] / columns
        dx = dxhat * rstd
        if DTOTAL:
            dx += tl.load(dtotal_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if DWEIGHT:
        partials = partials_ptr + tl.cast(program, tl.int64) * columns + column
        tl.store(partials, tl.sum(dweight, 0), mask=column < columns)
    if DBIAS:
        partials = _partials_of_dbias(partials_ptr, columns, DWEIGHT) + column
        tl.store(partials, tl.sum(dbias, 0), mask=column < columns)


@triton.jit
def _add_to(partials_ptr, values, column, columns, has_sums):
    """Add values to a program's row of partial sums. Before its first tile, without ``has_sums``, memory holds none."""
    before = tl.load(partials_ptr + column, mask=column < tl.where(has_sums, columns, 0), other=0.0)
    tl.store(partials_ptr + column, before + values, mask=column < columns)


@triton.jit
def _looped_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, dtotal_ptr, dx_ptr, partials_ptr, rows, columns: tl.constexpr,
    CENTERED: tl.constexpr, WEIGHT: tl.constexpr, DTOTAL: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same for rows too long for registers. Every program keeps its partial sums in its own row of memory."""
    program = tl.program_id(0)
    lane = tl.arange(0, COLUMNS)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=1):
        row = (tile * ROWS + tl.arange(0, ROWS))[:, None]
        start = row.to(tl.int64) * columns
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        products = tl.zeros((ROWS, COLUMNS), tl.float32)
        if CENTERED:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = (first + lane)[None, :]
            mask = (row < rows) & (column < columns)
            h = tl.load(dy_ptr + start + column, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            x = tl.load(x_ptr + start + column, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            if WEIGHT:
                h *= tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            if CENTERED:
                x -= mean
                sums += h
            products += h * (x * rstd)
        projection = tl.sum(products, 1)[:, None] / columns
        if CENTERED:
            mean_of_h = tl.sum(sums, 1)[:, None] / columns
        for first in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = (first + lane)[None, :]
            mask = (row < rows) & (column < columns)
            dy = tl.load(dy_ptr + start + column, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            x = tl.load(x_ptr + start + column, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            if CENTERED:
                x -= mean
            xhat = x * rstd
            h = dy
            if WEIGHT:
                h *= tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            dxhat = h - xhat * projection
            if CENTERED:
                dxhat -= mean_of_h
            dx = dxhat * rstd
            if DTOTAL:
                dx += tl.load(dtotal_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + start + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if DWEIGHT:
                of_dweight = partials_ptr + tl.cast(program, tl.int64) * columns
                _add_to(of_dweight, tl.sum(dy * xhat, 0), first + lane, columns, tile != program)
            if DBIAS:
                of_dbias = _partials_of_dbias(partials_ptr, columns, DWEIGHT)
                _add_to(of_dbias, tl.sum(dy, 0), first + lane, columns, tile != program)
        if DWEIGHT or DBIAS:
            # Threads may load partial sums that another thread stored.
            tl.debug_barrier()


@triton.jit
def _load(row_ptr, column, columns, POLICY: tl.constexpr):
    return tl.load(row_ptr + column, mask=column < columns, other=0.0, eviction_policy=POLICY)


@triton.jit
def _xhat_and_h(dy, x, mean, rstd, weight_ptr, column, columns, WEIGHT: tl.constexpr, POLICY: tl.constexpr):
    """(x - mean) * rstd and dy * weight in fp32, for some columns of a row."""
    h = dy.to(tl.float32)
    if WEIGHT:
        h *= _load(weight_ptr, column, columns, POLICY).to(tl.float32)
    return (x.to(tl.float32) - mean) * rstd, h


@triton.jit
def _add_half(dy, x, mean, rstd, weight_ptr, column, columns, dweight, dbias, WEIGHT: tl.constexpr):
    """Sums of h * xhat and h over half a row; dweight and dbias with the half row added."""
    xhat, h = _xhat_and_h(dy, x, mean, rstd, weight_ptr, column, columns, WEIGHT, "evict_last")
    dy = dy.to(tl.float32)
    return tl.sum(h * xhat, 0), tl.sum(h, 0), dweight + dy * xhat, dbias + dy


@triton.jit
def _wide_rows_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, dtotal_ptr, dx_ptr, partials_ptr, rows, columns: tl.constexpr,
    WEIGHT: tl.constexpr, DTOTAL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """LayerNorm's backward where the sums of dweight and dbias fill half of an SM's registers.

    With rows of 16384 elements these sums take 128 KiB of 256. The rest cannot hold dy, x and temporary values until
    the sums along the row are known. So a program reads dy and x a second time for dx, from the L1 cache: an SM runs
    one program, and a row of both is 64 KiB in bf16. The sums along a row are taken half by half, which halves the
    temporary values. At 4096 x 16384 it takes 162 us, and ``_persistent_kernel`` 365 (H200). Rows have more than
    COLUMNS / 2 elements.
    """
    program = tl.program_id(0)
    HALF: tl.constexpr = COLUMNS // 2
    low = tl.arange(0, HALF)
    high = HALF + low
    dweight_low = tl.zeros((HALF,), tl.float32)
    dweight_high = tl.zeros((HALF,), tl.float32)
    dbias_low = tl.zeros((HALF,), tl.float32)
    dbias_high = tl.zeros((HALF,), tl.float32)
    for row in tl.range(program, rows, tl.num_programs(0), num_stages=1):
        start = tl.cast(row, tl.int64) * columns
        mean = tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
        # The whole row is loaded before the first sum, because a load cannot move before the barrier of a sum.
        dy_low = _load(dy_ptr + start, low, columns, "evict_last")
        x_low = _load(x_ptr + start, low, columns, "evict_last")
        dy_high = _load(dy_ptr + start, high, columns, "evict_last")
        x_high = _load(x_ptr + start, high, columns, "evict_last")
        products, h, dweight_low, dbias_low = _add_half(
            dy_low, x_low, mean, rstd, weight_ptr, low, columns, dweight_low, dbias_low, WEIGHT
        )
        more_products, more_h, dweight_high, dbias_high = _add_half(
            dy_high, x_high, mean, rstd, weight_ptr, high, columns, dweight_high, dbias_high, WEIGHT
        )
        projection = (products + more_products) / columns
        mean_of_h = (h + more_h) / columns
        for half in tl.static_range(2):
            column = half * HALF + low
            # The compiler would keep the values of equal loads in registers. Another eviction policy makes them differ.
            dy = _load(dy_ptr + start, column, columns, "evict_first")
            x = _load(x_ptr + start, column, columns, "evict_first")
            xhat, h = _xhat_and_h(dy, x, mean, rstd, weight_ptr, column, columns, WEIGHT, "evict_first")
            dx = (h - xhat * projection - mean_of_h) * rstd
            if DTOTAL:
                dx += _load(dtotal_ptr + start, column, columns, "evict_first").to(tl.float32)
            tl.store(dx_ptr + start + column, dx.to(dx_ptr.dtype.element_ty), mask=column < columns)
    of_dweight = partials_ptr + tl.cast(program, tl.int64) * columns
    of_dbias = of_dweight + tl.cast(tl.num_programs(0), tl.int64) * columns
    tl.store(of_dweight + low, dweight_low, mask=low < columns)
    tl.store(of_dweight + high, dweight_high, mask=high < columns)
    tl.store(of_dbias + low, dbias_low, mask=low < columns)
    tl.store(of_dbias + high, dbias_high, mask=high < columns)


@triton.jit
def _sum_partials_kernel(
    partials_ptr, first_ptr, second_ptr, programs, columns,
    TWO: tl.constexpr, PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    if TWO:
        partials_ptr += tl.program_id(1).to(tl.int64) * programs * columns
    total = tl.zeros((PROGRAMS, COLUMNS), tl.float32)
    for first in range(0, programs, PROGRAMS):
        program = first + tl.arange(0, PROGRAMS)
        offsets = program.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(partials_ptr + offsets, mask=(program < programs)[:, None] & inside[None, :], other=0.0)
    row = tl.sum(total, 0)
    # Two stores, because the results may have different dtypes.
    if tl.program_id(1) == 0:
        tl.store(first_ptr + column, row.to(first_ptr.dtype.element_ty), mask=inside)
    elif TWO:
        tl.store(second_ptr + column, row.to(second_ptr.dtype.element_ty), mask=inside)


def _sum_partials(partials: torch.Tensor, results: Sequence[torch.Tensor]) -> Launch:
    """Return the launch that sums partials, fp32 [1 or 2, programs, D], over programs into one or two results [D]."""
    count, programs, columns = partials.shape
    height, width, warps = _partials_tile(programs, columns, sm_count(partials.device))
    return Launch(
        _sum_partials_kernel,
        (cdiv(columns, width), count),
        (partials, results[0], results[1] if count == 2 else None, programs, columns),
        dict(TWO=count == 2, PROGRAMS=height, COLUMNS=width, num_warps=warps),
    )


def launch_backward(
    dy, x: torch.Tensor, mean, rstd, weight, dtotal, dweight, dbias, plan: Plan | None = None
) -> tuple[list[torch.Tensor], tuple[Launch, ...]]:
    """The op's results (dx, then dweight and dbias where they have a dtype), and the launches for them.

    Without ``plan`` the shape's own plan is taken.
    """
    rows, columns = x.shape
    dtypes = [dtype for dtype in (dweight, dbias) if dtype is not None]
    empty = torch.zeros if x.numel() == 0 else torch.empty
    results = [torch.empty_like(x), *(empty(columns, dtype=dtype, device=x.device) for dtype in dtypes)]
    if _is_symbolic(x) or x.numel() == 0:
        return results, ()
    centered = mean is not None
    plan = plan or backward_plan(rows, columns, centered, sm_count(x.device))
    programs = min(plan.programs, cdiv(rows, plan.rows))
    partials = [torch.empty(len(dtypes), programs, columns, dtype=torch.float32, device=x.device)] if dtypes else []
    loaded = [dy, x, dtotal] if plan.persistent else [dy, x, dtotal, weight, *partials * len(dtypes)]
    element = sum(tensor.element_size() for tensor in loaded if tensor is not None)
    ahead = (shared_memory(x.device) - OTHER_SHARED_BYTES) // (plan.rows * plan.columns * element)
    stages = min(plan.stages, 1 + ahead)
    holds_weight = plan.persistent and plan.rows * plan.columns <= LONGEST_TILE_WITH_WEIGHT
    constants = dict(
        columns=columns, WEIGHT=weight is not None, DTOTAL=dtotal is not None, COLUMNS=plan.columns,
        num_warps=plan.warps,
    )  # fmt: skip
    # A tile without registers for the weight has none for a second sum either.
    if plan.persistent and plan.rows == 1 and not holds_weight and centered and len(dtypes) == 2:
        kernel = _wide_rows_kernel
    else:
        kernel = _persistent_kernel if plan.persistent else _looped_kernel
        constants |= dict(
            CENTERED=centered, DWEIGHT=dweight is not None, DBIAS=dbias is not None, ROWS=plan.rows, STAGES=stages
        )
        if plan.persistent:
            constants["HOLD_WEIGHT"] = holds_weight
    args = (dy, x, mean, rstd, weight, dtotal, results[0], *(partials or [None]), rows)
    walk = Launch(kernel, (programs,), args, constants)
    return results, (walk, *(_sum_partials(each, results[1:]) for each in partials))


_backward = register_op(
    "row_norm_backward(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? dtotal,"
    " ScalarType? dweight, ScalarType? dbias) -> Tensor[]",
    launch_backward,
)


def row_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, mean, rstd, weight=None, dtotal=None, dweight=None, dbias=None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return (dx, dweight, dbias) as ``mxtrain.norms.reference.row_norm_backward``, whose arguments these are.

    dy, x and dtotal [T, D], weight [D]: bf16, fp16 or fp32; mean and rstd fp32 [T]. The arithmetic is fp32, and each
    result is rounded once. dweight and dbias cost a second, small launch.
    """
    dx, *vectors = _backward(*contiguous(dy, x, mean, rstd, weight, dtotal), dweight, dbias)
    results = iter(vectors)
    return dx, *(None if dtype is None else next(results) for dtype in (dweight, dbias))
