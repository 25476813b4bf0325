"""How the kernels of RMSNorm and LayerNorm walk a matrix: the fields of a plan, and the plan of each shape.

The first of these that has settings for a shape decides: the user's tuned settings, the table measured on this kind of
GPU, a general rule. Settings describe a plan for a range of shapes; ``fit_...`` turns them into the plan for one shape.
"""

import functools
from typing import NamedTuple

import torch

from mxtrain.kernels.integers import cdiv, next_power_of_2
from mxtrain.kernels.norm.row_lengths import MAX_COLUMNS
from mxtrain.kernels.plan_table import GPU, Choice, Operation, find, gpu_of, reason, table_of
from mxtrain.kernels.tuned_plans import tuned, tuned_plans

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Upper limits for every plan.
MAX_TILE, MAX_WARPS, MAX_STAGES = 32768, 32, 8
# Shared memory for sums that cross warps. The rest holds what the backward loads ahead: tiles of dy, x and dtotal and,
# where rows are not held, chunks of the weight and of the partial sums.
OTHER_SHARED_BYTES = 12 * 1024
# A backward program with fewer tiles does not repay the partial row that it leaves to be summed.
FEWEST_TILES = 2
# Smaller tiles leave lanes of a warp idle: they do not let more programs share an SM.
SMALLEST_TILE = 1024
# The forward's chunks divide a long row, down to this length, so that no thread is idle.
SHORTEST_CHUNK = 1024
# Longer backward tiles leave no registers for the weight, which is then loaded with every tile.
LONGEST_TILE_WITH_WEIGHT = 8192


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


class ForwardSettings(NamedTuple):
    """Forward plans for a range of shapes."""

    persistent: bool
    tile: int
    """Elements per tile, rows padded to a power of two. If not persistent: columns per chunk"""
    warps: int


class BackwardSettings(NamedTuple):
    """Backward plans for a range of shapes."""

    persistent: bool
    tile: int
    warps: int
    stages: int
    programs_per_sm: int


FORWARD = Operation("rms_norm_forward", 3, ("rows", "columns"), ForwardSettings)
BACKWARD = Operation("rms_norm_backward", 3, ("rows", "columns"), BackwardSettings)
# LayerNorm runs RMSNorm's kernels, except for wide rows in the backward. It also sums dbias, so other plans may win.
LAYER_FORWARD = FORWARD._replace(name="layer_norm_forward", version=2)
LAYER_BACKWARD = BACKWARD._replace(name="layer_norm_backward", version=3)
# Kind of norm -> its forward and its backward.
OPERATIONS = {"rms": (FORWARD, BACKWARD), "layer": (LAYER_FORWARD, LAYER_BACKWARD)}


def check_columns(x: torch.Tensor) -> None:
    """Raise ValueError unless the kernels support the row length of matrix ``x``."""
    if not 0 < x.shape[1] <= MAX_COLUMNS:
        raise ValueError(f"x {tuple(x.shape)}: expected rows of 1 to {MAX_COLUMNS} elements")


def check_shape(rows: int, columns: int) -> None:
    """Raise ValueError unless the kernels support a matrix [rows, columns], which is not empty."""
    if rows < 1 or not 0 < columns <= MAX_COLUMNS:
        raise ValueError(f"shape {(rows, columns)}: expected a row or more of 1 to {MAX_COLUMNS} elements")


def holds_weight(plan: Plan) -> bool:
    """Whether a program of the persistent backward has registers for the weight."""
    return plan.rows * plan.columns <= LONGEST_TILE_WITH_WEIGHT


def fitting_stages(tile_bytes: int, shared: int) -> int:
    """The most tiles in flight, of ``tile_bytes`` each, that ``shared`` bytes of shared memory allow."""
    return max(1, 1 + (shared - OTHER_SHARED_BYTES) // tile_bytes)


def tiles(plan: Plan, rows: int) -> int:
    """Number of tiles in a matrix with this many rows."""
    return cdiv(rows, plan.rows)


def is_valid(plan: Plan, rows: int, columns: int) -> bool:
    """Whether the kernels can walk a matrix [rows, columns] by this plan."""
    return (
        all(n > 0 and n & (n - 1) == 0 for n in (plan.rows, plan.columns, plan.warps))
        and plan.warps <= MAX_WARPS
        and plan.rows * plan.columns <= MAX_TILE
        and plan.rows <= next_power_of_2(rows)
        and plan.columns <= next_power_of_2(columns)
        and (plan.columns >= columns or not plan.persistent)
        and 1 <= plan.stages <= MAX_STAGES
        and 1 <= plan.programs <= tiles(plan, rows)
    )


def fit_forward(settings: ForwardSettings, rows: int, columns: int, itemsize: int, gpu: GPU) -> Plan:
    """The forward plan for a matrix [rows, columns]. It does not depend on the size of an element."""
    if settings.persistent:
        height, width = _rows_per_tile(settings.tile, rows, columns, gpu.sms), next_power_of_2(columns)
        warps = min(settings.warps, max(1, height * width // 32))
    else:
        height, width = 1, settings.tile
        while width > SHORTEST_CHUNK and (columns % width or width >= columns):
            width //= 2
        width = min(width, next_power_of_2(columns))
        warps = max(1, settings.warps * width // settings.tile)
    return Plan(settings.persistent, height, width, warps, 1, cdiv(rows, height))


def fit_backward(settings: BackwardSettings, rows: int, columns: int, itemsize: int, gpu: GPU) -> Plan:
    """The backward plan for a matrix [rows, columns] with elements of ``itemsize`` bytes."""
    _, tile, warps, stages, per_sm = settings
    if settings.persistent:
        height, width = _rows_per_tile(tile, rows, columns, gpu.sms), next_power_of_2(columns)
        # Smaller tiles keep the elements per thread and per SM.
        warps = max(1, warps * height * width // tile)
        per_sm = max(1, per_sm * tile // max(height * width, SMALLEST_TILE))
    else:
        height, width = 1, min(tile, next_power_of_2(columns))
    count = cdiv(rows, height)
    # All programs walk as many tiles as the busiest one: fewer partial rows in the same time.
    walk = max(cdiv(count, per_sm * gpu.sms), min(FEWEST_TILES, count))
    steps = walk if settings.persistent else cdiv(columns, width)
    # Per element: dy, x and dtotal; in a chunk also the weight, and a partial sum in fp32.
    loaded = 3 * itemsize if settings.persistent else 4 * itemsize + 4
    stages = min(stages, steps, fitting_stages(height * width * loaded, gpu.shared))
    return Plan(settings.persistent, height, width, min(warps, MAX_WARPS), stages, cdiv(count, walk))


def forward_rule(columns: int) -> ForwardSettings:
    """Settings for any GPU: registers hold rows of up to 4096 elements, 16 elements per thread."""
    width = next_power_of_2(columns)
    if width > 4096:
        return ForwardSettings(False, 4096, 16)
    return ForwardSettings(True, max(2048, width), max(4, width // 512))


def backward_rule(columns: int) -> BackwardSettings:
    """Settings for any GPU: two rows per tile where an SM's registers hold them, 32 elements per thread.

    An SM's registers hold 8192 elements of x, dy and dweight, and the weight. Longer rows are spread over more threads.
    """
    width = next_power_of_2(columns)
    if width > 16384:
        return BackwardSettings(False, 4096, 8, 3, 2)
    tile = max(SMALLEST_TILE, min(2 * width, LONGEST_TILE_WITH_WEIGHT), width)
    if tile > LONGEST_TILE_WITH_WEIGHT:
        return BackwardSettings(True, tile, tile // 512, 1, 1)
    return BackwardSettings(True, tile, tile // 1024, 3, LONGEST_TILE_WITH_WEIGHT // tile)


def choose_forward(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, operation: Operation = FORWARD
) -> Choice:
    """Choose how ``rms_norm`` walks a matrix [rows, columns] of ``dtype`` on ``device``.

    With ``operation`` LAYER_FORWARD the choice is for ``layer_norm``.

    Raises:
        ValueError: for an empty matrix, or rows too long for the kernel.
    """
    return _choose(operation, rows, columns, dtype, True, gpu_of(device))


def choose_backward(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    has_weight: bool,
    device: torch.device,
    operation: Operation = BACKWARD,
) -> Choice:
    """Choose how ``rms_norm_backward`` walks a matrix [rows, columns] of ``dtype``; see ``choose_forward``."""
    return _choose(operation, rows, columns, dtype, has_weight, gpu_of(device))


def key(rows: int, columns: int, dtype: torch.dtype, has_weight: bool) -> str:
    """Name of a shape among the tuned ones."""
    return f"{rows}x{columns} {str(dtype).removeprefix('torch.')} {'weight' if has_weight else 'no weight'}"


def is_forward(operation: Operation) -> bool:
    """Whether an operation is a forward."""
    return operation.settings is ForwardSettings


@functools.lru_cache(4096)
def fit(operation: Operation, settings: tuple, rows: int, columns: int, itemsize: int, gpu: GPU) -> Plan:
    """The plan of any operation for a matrix [rows, columns]."""
    fitted = fit_forward if is_forward(operation) else fit_backward
    return fitted(settings, rows, columns, itemsize, gpu)


def choose_settings(
    operation: Operation, rows: int, columns: int, dtype: torch.dtype, has_weight: bool, gpu: GPU
) -> Choice:
    """The settings that plan this shape, with their source."""
    if tuned_plans(operation, gpu.name):
        found = tuned(operation, gpu.name, key(rows, columns, dtype, has_weight))
        if found and is_valid(fit(operation, found[0], rows, columns, dtype.itemsize, gpu), rows, columns):
            return Choice(found[0], "tuned", found[1])
    table = table_of(operation, gpu)
    if row := find(operation, table, (rows, columns)):
        return Choice(row.settings, f"table {table}", reason(row))
    settings = forward_rule(columns) if is_forward(operation) else backward_rule(columns)
    return Choice(settings, "rule", f"no plan was measured on {gpu.name}; --tune finds the fastest")


def _choose(operation, rows: int, columns: int, dtype: torch.dtype, has_weight: bool, gpu: GPU) -> Choice:
    check_shape(rows, columns)
    settings, source, why = choose_settings(operation, rows, columns, dtype, has_weight, gpu)
    return Choice(fit(operation, settings, rows, columns, dtype.itemsize, gpu), source, why)


def reduction_tile(programs: int, columns: int, sms: int) -> tuple[int, int, int]:
    """(partial rows, columns, warps) per tile of the sum over programs, in which each program owns some columns.

    Tiles are as wide as leaves a program for every SM, from a memory sector (8 fp32 numbers) to half a KiB.
    """
    width = max(8, min(128, next_power_of_2(columns) // next_power_of_2(sms)))
    height = max(1, min(next_power_of_2(programs), 4096 // width))
    return height, width, max(1, min(8, height * width // 512))


def _rows_per_tile(tile: int, rows: int, columns: int, sms: int) -> int:
    """Rows in a tile of about ``tile`` elements; fewer where some SMs would have no tile."""
    return min(max(1, tile // next_power_of_2(columns)), next_power_of_2(cdiv(rows, sms)))
