"""Which variant of the RMSNorm kernels a matrix gets, how its rows are split, and why. Every threshold is here.

A plan that was measured on this GPU for this very shape (``mxtrain.kernels.tuning``) goes before the heuristic.
"""

import functools
from typing import NamedTuple

import torch
import triton

from mxtrain.kernels import tuning

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_COLUMNS = 65536

# Rows up to this long are held in registers and read once; longer ones are read twice, the second time from a cache.
# The forward has only x to hold, yet gains from holding nothing while a row of this length is summed up.
FORWARD_HELD, BACKWARD_HELD = 4096, 16384
# What any plan may ask for.
MAX_TILE, MAX_WARPS, MAX_STAGES = 32768, 32, 8

# Forward: a row, or as many as make up FORWARD_TILE. Few warps with much to do each keep more bytes in flight than many
# with little: {longest rows: warps of a tile}.
FORWARD_TILE, FORWARD_WARPS = 2048, {256: 2, 1024: 1, 4096: 2}
FORWARD_CHUNK, FORWARD_CHUNK_OF_A_THREAD = 4096, 8
# Backward: two rows, unless those are too few elements for a warp or more than an SM, whose programs together hold
# BACKWARD_OF_AN_SM elements.
BACKWARD_ROWS, BACKWARD_OF_A_WARP, BACKWARD_OF_AN_SM, BACKWARD_OF_A_THREAD = 2, 1024, 8192, 32
# Longer tiles leave no registers for the weight, which is then loaded with every tile, and spread over more threads.
LONG_TILE_OF_A_THREAD = 16
BACKWARD_CHUNK, BACKWARD_CHUNK_OF_A_THREAD, BACKWARD_CHUNK_PROGRAMS_OF_AN_SM = 4096, 16, 2
# Below this a program's walk does not pay for the partial row that it leaves to be summed.
FEWEST_TILES = 2
# Shared memory of a program on any GPU from Ampere on, for what is loaded ahead: tiles of dy, x and dtotal, and where
# rows are not held whole also chunks of the weight and of the partial sums.
SHARED_BYTES = 96 * 1024
MOST_STAGES = 3
WITHOUT_A_GPU = 132
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


class Choice(NamedTuple):
    """A plan, whether it is by "heuristic" or "tuned", and one sentence that says why it is this one."""

    plan: Plan
    source: str
    reason: str


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
    key = tuning.key("rms_norm", rows, columns, dtype, True)
    return _tuned(key, rows, columns, device) or _forward(rows, columns, sm_count(device))


def choose_backward(rows: int, columns: int, dtype: torch.dtype, has_weight: bool, device: torch.device) -> Choice:
    """How ``rms_norm_backward`` walks a matrix [rows, columns] of ``dtype`` on ``device``; see ``choose_forward``."""
    check_shape(rows, columns)
    key = tuning.key("rms_norm_backward", rows, columns, dtype, has_weight)
    return _tuned(key, rows, columns, device) or _backward(rows, columns, dtype.itemsize, sm_count(device))


def reduction_tile(programs: int, columns: int, sms: int) -> tuple[int, int, int]:
    """(partial rows, columns, warps) of a tile of the sum over programs, whose programs each own some columns.

    As many columns as leave a program for every SM, from a sector of memory (8 fp32 numbers) to half a KiB.
    """
    width = max(8, min(128, triton.next_power_of_2(columns) // triton.next_power_of_2(sms)))
    height = max(1, min(triton.next_power_of_2(programs), 4096 // width))
    return height, width, max(1, min(8, height * width // 512))


@functools.cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a device; those of an H100 where there is no GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return WITHOUT_A_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tuned(key: str, rows: int, columns: int, device: torch.device) -> Choice | None:
    entry = tuning.tuned_plans(tuning.device_name(device)).get(key)
    if entry is None:
        return None
    if entry.plan.keys() != set(Plan._fields) or not is_valid(plan := Plan(**entry.plan), rows, columns):
        return None
    return Choice(plan, "tuned", f"the fastest of {entry.tried} plans timed on this GPU, {entry.microseconds:.1f} us")


def _warps(tile: int, of_a_thread: int) -> int:
    return max(1, min(MAX_WARPS, tile // (32 * of_a_thread)))


def _height(rows: int, width: int, sms: int, tile: int) -> int:
    """Rows of a tile of about ``tile`` elements; fewer where some SMs would have no tile."""
    return min(max(1, tile // width), triton.next_power_of_2(triton.cdiv(rows, sms)))


def _held(height: int, width: int, warps: int) -> str:
    count = "a row is" if height == 1 else f"{height} rows are"
    return f"{count} held in registers, {height * width // (32 * warps)} elements a thread, and read once"


def _not_held(longest: int, chunk: int) -> str:
    return f"rows over {longest} are not held whole, but read twice in chunks of {chunk}"


@functools.lru_cache(4096)
def _forward(rows: int, columns: int, sms: int) -> Choice:
    width = triton.next_power_of_2(columns)
    persistent = columns <= FORWARD_HELD
    if persistent:
        height = _height(rows, width, sms, FORWARD_TILE)
        warps = next(warps for longest, warps in FORWARD_WARPS.items() if width <= longest)
        warps = min(warps, _warps(height * width, 1))
        why = _held(height, width, warps)
    else:
        height, width = 1, FORWARD_CHUNK
        warps = _warps(width, FORWARD_CHUNK_OF_A_THREAD)
        why = _not_held(FORWARD_HELD, width)
    plan = Plan(persistent, height, width, warps, 1, triton.cdiv(rows, height))
    return Choice(plan, "heuristic", f"{why}; every tile has a program of its own, since programs share nothing")


@functools.lru_cache(4096)
def _backward(rows: int, columns: int, itemsize: int, sms: int) -> Choice:
    width = triton.next_power_of_2(columns)
    persistent = columns <= BACKWARD_HELD
    if persistent:
        tile = max(BACKWARD_OF_A_WARP, min(BACKWARD_ROWS * width, BACKWARD_OF_AN_SM))
        height = _height(rows, width, sms, tile)
        tile = height * width
        warps = _warps(tile, BACKWARD_OF_A_THREAD if tile <= BACKWARD_OF_AN_SM else LONG_TILE_OF_A_THREAD)
        of_an_sm = max(1, BACKWARD_OF_AN_SM // max(tile, BACKWARD_OF_A_WARP))
        why = _held(height, width, warps)
    else:
        height, width = 1, BACKWARD_CHUNK
        warps = _warps(width, BACKWARD_CHUNK_OF_A_THREAD)
        of_an_sm = BACKWARD_CHUNK_PROGRAMS_OF_AN_SM
        why = _not_held(BACKWARD_HELD, width)
    count = triton.cdiv(rows, height)
    # As long a walk as the longest for all of them: fewer partial rows in the same time.
    walk = max(triton.cdiv(count, of_an_sm * sms), min(FEWEST_TILES, count))
    programs = triton.cdiv(count, walk)
    steps = walk if persistent else triton.cdiv(columns, width)
    element = 3 * itemsize if persistent else 4 * itemsize + 4
    stages = max(1, min(MOST_STAGES, steps, 1 + SHARED_BYTES // (height * width * element)))
    if height * width > BACKWARD_OF_AN_SM:
        stages = 1
    split = f"{programs} programs ({of_an_sm} fit on each of {sms} SMs) walk {walk} tiles each"
    return Choice(Plan(persistent, height, width, warps, stages, programs), "heuristic", f"{why}; {split}")
