"""Which route a matmul with a long reduction takes, how it is split, and why. Every threshold is here.

First comes a plan that ``tune`` found on this GPU for this shape; otherwise a few rules, fitted to the times of some
260 plans for each of 111 products on an H200. M and K fall in ranges, and all of a range get the same plan, so that a
number of tokens that changes every step neither compiles anew nor misses what was tuned.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from mxtrain.kernels import tuning
from mxtrain.kernels.runtime import cdiv, next_power_of_2, shared_memory, sm_count
from mxtrain.kernels.tuning import Choice

TUNED = tuning.Family("decompose_k", version=1, words=("route",))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
ROUTES = ("mm", "bmm", "triton")

# What any plan may ask for. Tensor cores multiply 16 rows by 16 columns over 16 of K; what there is less is masked off.
# Tiles of fewer rows are multiplied without them, in as many sums as a tile has products.
MIN_TENSOR_CORE_BLOCK, MAX_TILE, MAX_PRODUCTS, MAX_WARPS, MAX_STAGES, MAX_SPLITS = 16, 128 * 256, 32768, 8, 8, 256
# Shared memory of a program for the tiles in flight: at most this, where a GPU has so much.
SHARED_BYTES = 144 * 1024

# mm: where results are larger than this, and their tiles keep the SMs busy by themselves; or there is little to split.
MM_OUTPUTS, SHORTEST_K = 128 * 1024, 2048
# fp32 is multiplied without tensor cores, where cuBLAS is better but for the smallest results.
FP32_OUTPUTS = 64 * 64

# Without tensor cores: where a, and what all programs load of it, are no larger than this. A program has one column.
FEW_ROWS_A, FEW_ROWS_LOADS = 2**14, 2**21
FEW_ROWS_K, FEW_ROWS_WARPS, FEW_ROWS_STAGES, FEW_ROWS_PROGRAMS = 1024, 4, 3, 64
# One or two rows take all of K, if it is so long, in one step, and a program has two columns: every load is on its way
# before the first has come. At 1 x 16 x 5120 2.6 instead of 2.9 us, at 2 x 256 x 7168 4.1 instead of 4.8 (H200).
ONE_STEP_ROWS, ONE_STEP_K, ONE_STEP_COLUMNS, ONE_STEP_WARPS, ONE_STEP_LOADS = 2, (2048, 8192), 2, 8, 2**22
# With them: 16 rows, or 64 where there are more than 32; and as many columns as weigh what programs load, less with
# larger tiles, against partial sums, fewer with smaller ones. {rows: (most columns, the area of a tile over the square
# root of the outputs, for K up to LONG_K; above that it grows with the square root of K)}
SMALL_ROWS, LARGE_ROWS, LONG_K = 16, 64, 4096
TILES = {SMALL_ROWS: (64, 4), LARGE_ROWS: (128, 7.9)}
BLOCK_K_BYTES, MOST_STAGES = 128, 6
# A program with 4 warps for every SM, or more with fewer; two of those with few rows, which compute the least. Parts of
# a tile: no more than so many, or than there are times SHORTEST_PART in K.
FEW_PARTS, SHORTEST_PART = 66, 256

# What tuning varies, in this order.
FIELDS = ("splits", "block_n", "block_m", "block_k", "warps", "stages")


class Plan(NamedTuple):
    """How a product is computed. Fields after ``splits`` are of "triton" only; blocks and warps are powers of two."""

    route: str
    """"mm": one matmul; "bmm": a batched matmul and a sum; "triton": the kernels"""
    splits: int = 1
    """Parts of K"""
    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    warps: int = 0
    stages: int = 0
    """Steps over K in flight"""


def row_range(rows: int) -> int:
    """The largest M that gets the same plan: the next power of two."""
    return next_power_of_2(max(rows, 1))


def depth_range(depth: int) -> int:
    """The largest K that gets the same plan: the next of four steps from one power of two to the next."""
    step = max(1, next_power_of_2(max(depth, 1)) // 8)
    return cdiv(max(depth, 1), step) * step


def key(rows: int, columns: int, depth: int, dtype: torch.dtype) -> str:
    """The name of a shape's range among the tuned ones."""
    m, n, k = _ranges(rows, columns, depth)
    return f"{m}x{n}x{k} {_NAMES[dtype]}"


def is_valid(plan: Plan, itemsize: int) -> bool:
    """Whether a product of operands of this size can be computed by this plan."""
    if plan.route not in ROUTES or not 1 <= plan.splits <= MAX_SPLITS:
        return False
    if plan.route != "triton":
        return plan == Plan(plan.route, plan.splits) and (plan.splits > 1) == (plan.route == "bmm")
    blocks = (plan.block_m, plan.block_n, plan.block_k)
    tile = plan.block_m * plan.block_n
    if plan.block_m >= MIN_TENSOR_CORE_BLOCK:
        fits = min(blocks) >= MIN_TENSOR_CORE_BLOCK and tile <= MAX_TILE
    else:
        fits = tile * plan.block_k <= MAX_PRODUCTS
    return (
        fits
        and all(n > 0 and n & (n - 1) == 0 for n in (*blocks, plan.warps))
        and plan.warps <= MAX_WARPS
        and 1 <= plan.stages <= MAX_STAGES
        and plan.stages * _stage_bytes(plan, itemsize) <= SHARED_BYTES
    )


def neighbour(plan: Plan, field: str, double: bool, itemsize: int) -> Plan | None:
    """The plan with a field doubled or halved, one stage more or less; None where there is no such plan."""
    value = getattr(plan, field)
    if field == "stages":
        changed = value + 1 if double else value - 1
    else:
        changed = value * 2 if double else value // 2
    plan = plan._replace(**{field: changed})
    return plan if changed != value and is_valid(plan, itemsize) else None


def starts(rows: int, columns: int, depth: int, itemsize: int, sms: int, shared: int) -> list[Plan]:
    """Plans to start tuning from, of every route."""
    best = _kernel_plan(*_ranges(rows, columns, depth), itemsize, sms, shared)
    splits = max(2, next_power_of_2(best.splits))
    return [best, Plan("bmm", splits), Plan("mm")]


def choose(rows: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device) -> Choice:
    """How a product [M, K] by [K, N] of ``dtype`` is computed on ``device``.

    Args:
        rows: M.
        columns: N.
        depth: K.
    """
    if tuning.tuned_plans(TUNED, tuning.device_name(device)):
        valid = functools.partial(is_valid, itemsize=dtype.itemsize)
        tuned = tuning.tuned_plan(TUNED, key(rows, columns, depth, dtype), device, Plan, valid)
        if tuned:
            return tuned
    return _choose(*_ranges(rows, columns, depth), dtype.itemsize, sm_count(device), shared_memory(device))


def kernel_plan(rows: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device) -> Plan:
    """The plan of the kernels for this product, also where ``choose`` prefers another route."""
    plan = choose(rows, columns, depth, dtype, device).plan
    if plan.route == "triton":
        return plan
    return _kernel_plan(*_ranges(rows, columns, depth), dtype.itemsize, sm_count(device), shared_memory(device))


def chunk_of(plan: Plan, depth: int) -> tuple[int, int]:
    """(K of a part, whole blocks of it; parts that have any K, at least 1)"""
    chunk = max(1, cdiv(cdiv(depth, plan.splits), plan.block_k)) * plan.block_k
    return chunk, max(1, cdiv(depth, chunk))


def reduction_tile(splits: int, outputs: int, sms: int) -> tuple[int, int, int]:
    """(outputs, parts at once, warps) of a program of the sum over parts: if large enough, one or two for every SM."""
    width = max(32, min(1024, next_power_of_2(outputs) // next_power_of_2(sms)))
    return _reduction(splits, width)


def softmax_tile(splits: int, columns: int) -> tuple[int, int, int, int]:
    """(rows, columns, parts at once, warps) of a program of the sum over parts, which holds whole rows."""
    width = next_power_of_2(columns)
    rows = max(1, 128 // width)
    _, at_once, warps = _reduction(splits, rows * width)
    return rows, width, at_once, warps


def tune(
    rows: int, columns: int, depth: int, dtype: torch.dtype,
    run: Callable[[torch.Tensor, torch.Tensor, Plan], object], transposed: bool = False,
) -> Choice:  # fmt: skip
    """Find and keep the fastest plan of all routes for the range of this product, on the current GPU.

    Args:
        rows: M; the largest of a range is what to time.
        columns: N.
        depth: K.
        run: computes the product of (a, b) by a plan.
        transposed: a and b lie in memory as in the gradient of a weight, along M and N, and not along K.

    Returns:
        The choice that is made from now on.

    Raises:
        RuntimeError: without a GPU.
    """
    device = tuning.gpu()
    a, b = torch.randn(rows, depth, device=device), torch.randn(columns, depth, device=device)
    a, b = a.to(dtype), b.to(dtype).t()
    if transposed:
        a, b = a.t().contiguous().t(), b.contiguous()

    def prepare(plan: Plan) -> Callable[[], None]:
        return tuning.recorded(functools.partial(run, a, b, plan))

    step = functools.partial(neighbour, itemsize=dtype.itemsize)
    shape = key(rows, columns, depth, dtype)
    walked = starts(rows, columns, depth, dtype.itemsize, sm_count(device), shared_memory(device))
    tuning.tune(TUNED, shape, device, walked, FIELDS, step, prepare)
    return choose(rows, columns, depth, dtype, device)


def _ranges(rows: int, columns: int, depth: int) -> tuple[int, int, int]:
    return row_range(rows), max(1, columns), depth_range(depth)


def _stage_bytes(plan: Plan, itemsize: int) -> int:
    return (plan.block_m + plan.block_n) * plan.block_k * itemsize


def _reduction(splits: int, width: int) -> tuple[int, int, int]:
    at_once = max(1, min(next_power_of_2(splits), 8192 // width))
    return width, at_once, max(1, min(MAX_WARPS, at_once * width // 512))


@functools.lru_cache(4096)
def _choose(rows: int, columns: int, depth: int, itemsize: int, sms: int, shared: int) -> Choice:
    def mm(reason: str) -> Choice:
        return Choice(Plan("mm"), "heuristic", reason)

    if rows * columns > MM_OUTPUTS:
        return mm(f"{rows} x {columns} outputs are tiles enough to keep the SMs busy without a split")
    if depth < SHORTEST_K:
        return mm(f"K under {SHORTEST_K} is too short to be worth splitting")
    if itemsize == 4 and rows * columns > FP32_OUTPUTS:
        return mm("fp32 is multiplied without tensor cores, at which cuBLAS is better")
    plan = _kernel_plan(rows, columns, depth, itemsize, sms, shared)
    _, parts = chunk_of(plan, depth)
    if parts == 1 and plan.block_m >= MIN_TENSOR_CORE_BLOCK:
        return mm(f"{rows} x {columns} outputs are tiles enough to keep the SMs busy without a split")
    tiles = cdiv(rows, plan.block_m) * cdiv(columns, plan.block_n)
    split = f"K is split in {parts}, and a second launch sums the parts" if parts > 1 else "K is not split"
    programs = f"{tiles} tiles of {plan.block_m} x {plan.block_n} make {tiles * parts} programs for {sms} SMs"
    return Choice(plan, "heuristic", f"{programs}: {split}")


@functools.lru_cache(4096)
def _kernel_plan(rows: int, columns: int, depth: int, itemsize: int, sms: int, shared: int) -> Plan:
    loads = rows * depth * columns
    if rows <= ONE_STEP_ROWS and ONE_STEP_K[0] < depth <= ONE_STEP_K[1] and loads <= ONE_STEP_LOADS:
        block_n = min(ONE_STEP_COLUMNS, columns)
        return Plan("triton", 1, rows, block_n, next_power_of_2(depth), ONE_STEP_WARPS, 1)
    if rows < MIN_TENSOR_CORE_BLOCK and rows * depth <= FEW_ROWS_A and loads <= FEW_ROWS_LOADS:
        return _few_rows(rows, columns, depth)
    small = rows <= 2 * SMALL_ROWS
    block_m = SMALL_ROWS if small else LARGE_ROWS
    most, share = TILES[block_m]
    area = next_power_of_2(math.ceil(share * math.sqrt(rows * columns * max(1, depth / LONG_K))))
    block_n = max(MIN_TENSOR_CORE_BLOCK, min(area // block_m, next_power_of_2(columns), most))
    block_k = BLOCK_K_BYTES // itemsize
    tiles = cdiv(rows, block_m) * cdiv(columns, block_n)
    if block_m * block_n > 512:
        warps, programs = 4, 2 * sms if small else sms
    elif block_n > 16 or tiles < 4:
        warps, programs = 2, 2 * sms
    else:
        warps, programs = 1, 4 * sms
    most_parts = min(cdiv(depth, block_k), max(FEW_PARTS, depth // SHORTEST_PART), MAX_SPLITS)
    plan = Plan("triton", max(1, min(programs // tiles, most_parts)), block_m, block_n, block_k, warps, 1)
    steps = chunk_of(plan, depth)[0] // block_k
    fit = min(SHARED_BYTES, shared) // _stage_bytes(plan, itemsize)
    return plan._replace(stages=max(1, min(MOST_STAGES, steps + 1, fit)))


def _few_rows(rows: int, columns: int, depth: int) -> Plan:
    splits = max(1, min(FEW_ROWS_PROGRAMS // columns, depth // FEW_ROWS_K))
    # One row has products for twice as many threads' sums in a step.
    block_k = 2 * FEW_ROWS_K if rows == 1 and depth // splits > 2 * FEW_ROWS_K else FEW_ROWS_K
    return Plan("triton", splits, rows, 1, block_k, FEW_ROWS_WARPS, FEW_ROWS_STAGES)
