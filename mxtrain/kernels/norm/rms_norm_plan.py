"""Which variant of the RMSNorm kernels a matrix gets, how its rows are split, and why. Every threshold is here.

A plan that ``tune_forward`` or ``tune_backward`` found on this GPU for this very shape goes before the heuristic.
"""

import functools
from typing import NamedTuple

import torch
import triton

from mxtrain.kernels import tuning
from mxtrain.kernels.device import shared_memory, sm_count
from mxtrain.kernels.norm.row_lengths import MAX_COLUMNS
from mxtrain.kernels.tuning import Choice

TUNED = tuning.Family("rms_norm", version=1)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Rows up to this long are held in registers and read once; longer ones are read twice, the second time from a cache.
# The forward has only x to hold, yet once every SM has many rows to go through, it gains from holding nothing.
FORWARD_HELD, BACKWARD_HELD = 4096, 16384
FORWARD_HELD_OF_MANY_ROWS, MANY_ROWS_OF_AN_SM = 2048, 128
# It holds longer rows, too, that fill most of a power of two but not all: only short chunks divide them, and little of
# a tile is idle. At 8192 x 7168 56 instead of 65 us (H200).
FORWARD_HELD_IF_NEARLY_FULL, NEARLY_FULL = 16384, 7 / 8
# What any plan may ask for.
MAX_TILE, MAX_WARPS, MAX_STAGES = 32768, 32, 8

# Forward: a row, or as many as make up FORWARD_TILE; {widest tile: its warps} where rows fill it, and where not.
# Longer rows are taken in two or more chunks of a length that divides them, so that no thread is idle.
FORWARD_TILE, FORWARD_WARPS = 2048, {1024: 2, 2048: 4, 4096: 8}
FORWARD_PADDED_WARPS = {1024: 2, 8192: 4, 16384: 8}
FORWARD_CHUNKS, FORWARD_CHUNK_OF_A_THREAD = (4096, 2048, 1024), 8
# Backward: two rows, unless those are too few elements for a warp or more than an SM, whose programs together hold
# BACKWARD_OF_AN_SM elements.
BACKWARD_ROWS, BACKWARD_OF_A_WARP, BACKWARD_OF_AN_SM, BACKWARD_OF_A_THREAD = 2, 1024, 8192, 32
# Longer tiles leave no registers for the weight, which is then loaded with every tile, and spread over more threads.
LONG_TILE_OF_A_THREAD = 16
# Rows of more than PADDED_FROM that do not fill a power of two, so that part of the registers of a tile and of what is
# loaded ahead is idle: smaller tiles, of more threads, more of them on an SM, and one more loaded ahead. At 8192 x 5120
# 69 instead of 79 us, at 16384 x 3072 80 instead of 85, at 32768 x 768 42.1 instead of 42.9 (H200).
PADDED_FROM, PADDED_TILE, PADDED_OF_AN_SM, PADDED_OF_A_THREAD, PADDED_STAGES = 512, 2048, 6144, 16, 4
BACKWARD_CHUNK, BACKWARD_CHUNK_OF_A_THREAD, BACKWARD_CHUNK_PROGRAMS_OF_AN_SM = 4096, 16, 2
# Below this a program's walk does not pay for the partial row that it leaves to be summed.
FEWEST_TILES = 2
# Into shared memory goes what is loaded ahead: tiles of dy, x and dtotal, and where rows are not held whole also chunks
# of the weight and of the partial sums; and, less than this, sums that cross warps.
OTHER_SHARED_BYTES = 12 * 1024
MOST_STAGES = 3
# What tuning varies, in this order; and where, rows being about as long as registers can hold, it tries both variants.
FORWARD_FIELDS = ("warps", "rows", "columns")
BACKWARD_FIELDS = ("programs", *FORWARD_FIELDS, "stages")
FEWEST_COLUMNS_IN_DOUBT = 2048


class Plan(NamedTuple):
    """How one kernel walks the rows. Rows, columns and warps are powers of two."""

    persistent: bool
    """Rows are held whole, in registers; otherwise a chunk of columns at a time"""
    rows: int
    """Rows of a tile"""
    columns: int
    """Columns held at once"""
    warps: int
    stages: int
    """Tiles (chunks, if not persistent) in flight: 1 loads none ahead"""
    programs: int
    """Programs among which the tiles are dealt out; of the forward, one for each"""


def check_columns(x: torch.Tensor) -> None:
    """Raise ValueError unless the rows of matrix ``x`` have a length that the kernels take."""
    if not 0 < x.shape[1] <= MAX_COLUMNS:
        raise ValueError(f"x {tuple(x.shape)}: expected rows of 1 to {MAX_COLUMNS} elements")


def check_shape(rows: int, columns: int) -> None:
    """Raise ValueError unless a matrix [rows, columns] has anything to plan for."""
    if rows < 1 or not 0 < columns <= MAX_COLUMNS:
        raise ValueError(f"shape {(rows, columns)}: expected a row or more of 1 to {MAX_COLUMNS} elements")


def holds_weight(plan: Plan) -> bool:
    """Whether a program of the persistent backward has registers to hold the weight in."""
    return plan.rows * plan.columns <= BACKWARD_OF_AN_SM


def fitting_stages(tile_bytes: int, shared: int) -> int:
    """The most tiles in flight, of so many bytes each, whose loads ahead fit in a program's ``shared`` memory."""
    return max(1, 1 + (shared - OTHER_SHARED_BYTES) // tile_bytes)


def tiles(plan: Plan, rows: int) -> int:
    """Tiles of a matrix of this many rows."""
    return triton.cdiv(rows, plan.rows)


def is_valid(plan: Plan, rows: int, columns: int) -> bool:
    """Whether the kernels can walk a matrix [rows, columns] by this plan."""
    return (
        all(n > 0 and n & (n - 1) == 0 for n in (plan.rows, plan.columns, plan.warps))
        and plan.warps <= MAX_WARPS
        and plan.rows * plan.columns <= MAX_TILE
        and plan.rows <= triton.next_power_of_2(rows)
        and plan.columns <= triton.next_power_of_2(columns)
        and (plan.columns >= columns or not plan.persistent)
        and 1 <= plan.stages <= MAX_STAGES
        and 1 <= plan.programs <= tiles(plan, rows)
    )


def neighbour(plan: Plan, field: str, double: bool, rows: int, columns: int) -> Plan | None:
    """The plan with a field doubled or halved; None where there is no such plan.

    There are never more programs than tiles, and as many after the step as before it if there is one for every tile.
    """
    value = getattr(plan, field)
    changed = plan._replace(**{field: value * 2 if double else value // 2})
    if changed.rows:
        count = tiles(changed, rows)
        one_each = field == "rows" and plan.programs == tiles(plan, rows)
        changed = changed._replace(programs=count if one_each else min(changed.programs, count))
    return changed if changed != plan and is_valid(changed, rows, columns) else None


def starts(plan: Plan, rows: int, columns: int) -> list[Plan]:
    """Plans to start tuning from: this one and, for long rows, its like in the other variant."""
    width = triton.next_power_of_2(columns)
    if not FEWEST_COLUMNS_IN_DOUBT <= width <= MAX_TILE:
        return [plan]
    columns_at_once = min(BACKWARD_CHUNK, width) if plan.persistent else width
    programs = rows if plan.programs == tiles(plan, rows) else min(plan.programs, rows)
    warps = _warps(columns_at_once, BACKWARD_OF_A_THREAD)
    return [plan, Plan(not plan.persistent, 1, columns_at_once, warps, 1, programs)]


def choose_forward(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Choice:
    """How ``rms_norm`` walks a matrix [rows, columns] of ``dtype`` on ``device``.

    Raises:
        ValueError: for no rows, or a length of rows that the kernel does not take.
    """
    check_shape(rows, columns)
    shape = key("rms_norm", rows, columns, dtype, True)
    return _tuned(shape, rows, columns, device) or _forward(rows, columns, sm_count(device))


def choose_backward(rows: int, columns: int, dtype: torch.dtype, has_weight: bool, device: torch.device) -> Choice:
    """How ``rms_norm_backward`` walks a matrix [rows, columns] of ``dtype`` on ``device``; see ``choose_forward``."""
    check_shape(rows, columns)
    shape = key("rms_norm_backward", rows, columns, dtype, has_weight)
    tuned = _tuned(shape, rows, columns, device)
    return tuned or _backward(rows, columns, dtype.itemsize, sm_count(device), shared_memory(device))


def reduction_tile(programs: int, columns: int, sms: int) -> tuple[int, int, int]:
    """(partial rows, columns, warps) of a tile of the sum over programs, whose programs each own some columns.

    As many columns as leave a program for every SM, from a sector of memory (8 fp32 numbers) to half a KiB.
    """
    width = max(8, min(128, triton.next_power_of_2(columns) // triton.next_power_of_2(sms)))
    height = max(1, min(triton.next_power_of_2(programs), 4096 // width))
    return height, width, max(1, min(8, height * width // 512))


def key(op: str, rows: int, columns: int, dtype: torch.dtype, has_weight: bool) -> str:
    """The name of a shape among the tuned ones."""
    return f"{op} {rows}x{columns} {str(dtype).removeprefix('torch.')} {'weight' if has_weight else 'no weight'}"


def _tuned(shape: str, rows: int, columns: int, device: torch.device) -> Choice | None:
    valid = functools.partial(is_valid, rows=rows, columns=columns)
    return tuning.tuned_plan(TUNED, shape, device, Plan, valid)


def _warps(tile: int, of_a_thread: int) -> int:
    return max(1, min(MAX_WARPS, tile // (32 * of_a_thread)))


def _height(rows: int, width: int, sms: int, tile: int) -> int:
    """Rows of a tile of about ``tile`` elements; fewer where some SMs would have no tile."""
    return min(max(1, tile // width), triton.next_power_of_2(triton.cdiv(rows, sms)))


def _held(height: int, width: int, warps: int) -> str:
    count = "a row is" if height == 1 else f"{height} rows are"
    return f"{count} held in registers, {height * width // (32 * warps)} elements a thread, and read once"


def _not_held(columns: int, chunk: int) -> str:
    return f"rows of {columns} are not held whole, but read twice in chunks of {chunk}"


@functools.lru_cache(4096)
def _forward(rows: int, columns: int, sms: int) -> Choice:
    width = triton.next_power_of_2(columns)
    held = FORWARD_HELD if rows < MANY_ROWS_OF_AN_SM * sms else FORWARD_HELD_OF_MANY_ROWS
    nearly_full = NEARLY_FULL * width <= columns < width <= FORWARD_HELD_IF_NEARLY_FULL
    persistent = columns <= held or nearly_full
    if persistent:
        height = _height(rows, width, sms, FORWARD_TILE)
        by_width = FORWARD_WARPS if columns == width else FORWARD_PADDED_WARPS
        warps = next(warps for widest, warps in by_width.items() if width <= widest)
        warps = min(warps, _warps(height * width, 1))
        why = _held(height, width, warps)
    else:
        dividing = (chunk for chunk in FORWARD_CHUNKS if columns % chunk == 0 and chunk < columns)
        height, width = 1, next(dividing, FORWARD_CHUNKS[-1])
        warps = _warps(width, FORWARD_CHUNK_OF_A_THREAD)
        why = _not_held(columns, width)
    plan = Plan(persistent, height, width, warps, 1, triton.cdiv(rows, height))
    return Choice(plan, "heuristic", f"{why}; every tile has a program of its own, since programs share nothing")


def _held_backward(rows: int, width: int, padded: bool, sms: int) -> tuple[int, int, int]:
    """(rows, warps, programs of an SM) of a tile that holds whole rows."""
    at_most = PADDED_TILE if padded else max(BACKWARD_OF_A_WARP, min(BACKWARD_ROWS * width, BACKWARD_OF_AN_SM))
    height = _height(rows, width, sms, at_most)
    tile = height * width
    if padded and tile < BACKWARD_OF_AN_SM:
        return height, _warps(tile, PADDED_OF_A_THREAD), triton.cdiv(PADDED_OF_AN_SM, max(tile, BACKWARD_OF_A_WARP))
    of_a_thread = BACKWARD_OF_A_THREAD if tile <= BACKWARD_OF_AN_SM else LONG_TILE_OF_A_THREAD
    return height, _warps(tile, of_a_thread), max(1, BACKWARD_OF_AN_SM // max(tile, BACKWARD_OF_A_WARP))


@functools.lru_cache(4096)
def _backward(rows: int, columns: int, itemsize: int, sms: int, shared: int) -> Choice:
    width = triton.next_power_of_2(columns)
    persistent = columns <= BACKWARD_HELD
    padded = persistent and PADDED_FROM < columns < width
    if persistent:
        height, warps, of_an_sm = _held_backward(rows, width, padded, sms)
        why = _held(height, width, warps)
    else:
        height, width = 1, BACKWARD_CHUNK
        warps = _warps(width, BACKWARD_CHUNK_OF_A_THREAD)
        of_an_sm = BACKWARD_CHUNK_PROGRAMS_OF_AN_SM
        why = _not_held(columns, width)
    count = triton.cdiv(rows, height)
    # As long a walk as the longest for all of them: fewer partial rows in the same time.
    walk = max(triton.cdiv(count, of_an_sm * sms), min(FEWEST_TILES, count))
    programs = triton.cdiv(count, walk)
    steps = walk if persistent else triton.cdiv(columns, width)
    element = 3 * itemsize if persistent else 4 * itemsize + 4
    fitting = fitting_stages(height * width * element, shared)
    stages = min(PADDED_STAGES if padded else MOST_STAGES, steps, fitting)
    if height * width > BACKWARD_OF_AN_SM:
        stages = 1
    split = f"{programs} programs ({of_an_sm} fit on each of {sms} SMs) walk {walk} tiles each"
    return Choice(Plan(persistent, height, width, warps, stages, programs), "heuristic", f"{why}; {split}")
