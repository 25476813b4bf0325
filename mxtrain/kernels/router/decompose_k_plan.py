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
from mxtrain.kernels.device import shared_memory, sm_count
from mxtrain.kernels.integers import cdiv, next_power_of_2
from mxtrain.kernels.tuning import Choice

TUNED = tuning.Family("decompose_k", version=2, words=("route",))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
ROUTES = ("mm", "bmm", "triton")

# What any plan may ask for. Tensor cores multiply 16 rows by 16 columns over 16 of K; what there is less is masked off.
# Tiles of fewer rows are multiplied without them, in as many sums as a tile has products.
MIN_TENSOR_CORE_BLOCK, MAX_TILE, MAX_PRODUCTS, MAX_WARPS, MAX_STAGES, MAX_SPLITS = 16, 128 * 256, 32768, 16, 8, 256
# Of a program of the sum over parts.
MAX_SUM_WARPS = 8
# Shared memory of a program for the tiles in flight: at most this, where a GPU has so much.
SHARED_BYTES = 144 * 1024

# mm: where results are larger than this, and their tiles keep the SMs busy by themselves; or there is little to split.
MM_OUTPUTS, SHORTEST_K = 128 * 1024, 2048
# But not, however many rows there are, with few columns and a small b, which every tile reads from the L2 cache: no
# more columns and elements than this, and operands that lie along K. The kernels take 10.1 us to the fp32 results of
# 8192 x 64 x 2048 and cuBLAS 11.7, of 32768 x 32 x 4096 64.0 and 65.8, but of 8192 x 128 x 5120 25.4 and 25.1 (H200).
NARROW_COLUMNS, NARROW_OPERAND = 64, 2**18
# fp32 is multiplied without tensor cores, where cuBLAS is better but for the smallest results.
FP32_OUTPUTS = 64 * 64

# Without tensor cores and in one launch: few outputs of a limited number of multiplications, of operands that lie along
# K. All of K in one step, so that every load is on its way before the first has come; a second wave of programs would
# take longer than a second launch. At 16 x 16 x 5120 2.6 instead of 3.5 us with tensor cores and two launches, at
# 16 x 64 x 2048 2.5 instead of 3.3, at 4 x 256 x 5120 3.7 instead of 4.4 (H200). But where b lies along N it is tensor
# cores that are up to 2.4 times as fast.
ONE_STEP_K, ONE_STEP_OUTPUTS, ONE_STEP_PRODUCTS = 8192, 2048, 2**23
# Of those a program has one, if there is a single row or if there are no more than this; otherwise two by two. It has
# twice the warps where a row of its operands has more bytes than this: what they load is then on its way at once, too.
SINGLE_OUTPUTS, SINGLE_PRODUCTS = 512, 2**21
ONE_STEP_WARPS, ONE_STEP_BYTES = 8, 8192
# With them: 16 rows, or 64 where there are more than 32; and as many columns as weigh what programs load, less with
# larger tiles, against partial sums, fewer with smaller ones. {rows: (most columns, the area of a tile over the square
# root of the outputs, for K up to LONG_K; above that it grows with the square root of K)}
SMALL_ROWS, LARGE_ROWS, LONG_K = 16, 64, 4096
TILES = {SMALL_ROWS: (64, 4), LARGE_ROWS: (128, 7.9)}
BLOCK_K_BYTES = 128
# Steps in flight of all that a program has: 6; 8 with larger tiles, an SM to itself and more than 8 steps; and where n
# such programs share an SM, 7 - n, but no less than 3.
MOST_STAGES, LONG_STEPS, LONG_STAGES = 6, 8, 8
LEAST_STAGES, SHARED_STAGES = 3, 7
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


def lie_along_k(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether neighbours along K are neighbours in memory in both, as in x and in the transposed view of a weight."""
    return a.stride(1) == 1 and b.stride(0) == 1


def key(rows: int, columns: int, depth: int, dtype: torch.dtype, along_k: bool = True) -> str:
    """The name of a shape's range among the tuned ones."""
    m, n, k = _ranges(rows, columns, depth)
    return f"{m}x{n}x{k} {_NAMES[dtype]}" + ("" if along_k else " not along K")


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


def starts(rows: int, columns: int, depth: int, along_k: bool, itemsize: int, sms: int, shared: int) -> list[Plan]:
    """Plans to start tuning from, of every route."""
    sizes = _ranges(rows, columns, depth)
    tensor_cores = _tensor_cores(*sizes, itemsize, sms, shared)
    kernels = dict.fromkeys((_kernel_plan(*sizes, along_k, itemsize, sms, shared), tensor_cores))
    return [*kernels, Plan("bmm", max(2, next_power_of_2(tensor_cores.splits))), Plan("mm")]


def choose(
    rows: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device, along_k: bool = True
) -> Choice:
    """How a product [M, K] by [K, N] of ``dtype`` is computed on ``device``.

    Args:
        rows: M.
        columns: N.
        depth: K.
        along_k: whether the operands ``lie_along_k``.
    """
    if tuning.tuned_plans(TUNED, tuning.device_name(device)):
        valid = functools.partial(is_valid, itemsize=dtype.itemsize)
        tuned = tuning.tuned_plan(TUNED, key(rows, columns, depth, dtype, along_k), device, Plan, valid)
        if tuned:
            return tuned
    return _choose(*_ranges(rows, columns, depth), along_k, *_limits(dtype, device))


def kernel_plan(
    rows: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device, along_k: bool = True
) -> Plan:
    """The plan of the kernels for this product, also where ``choose`` prefers another route."""
    plan = choose(rows, columns, depth, dtype, device, along_k).plan
    if plan.route == "triton":
        return plan
    return _kernel_plan(*_ranges(rows, columns, depth), along_k, *_limits(dtype, device))


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
    run: Callable[[torch.Tensor, torch.Tensor, Plan], object], along_k: bool = True,
) -> Choice:  # fmt: skip
    """Find and keep the fastest plan of all routes for the range of this product, on the current GPU.

    Args:
        rows: M; the largest of a range is what to time.
        columns: N.
        depth: K.
        run: computes the product of (a, b) by a plan.
        along_k: whether a and b lie in memory along K; otherwise along M and N, as in the gradient of a weight.

    Returns:
        The choice that is made from now on.

    Raises:
        RuntimeError: without a GPU.
    """
    device = tuning.gpu()
    a, b = torch.randn(rows, depth, device=device), torch.randn(columns, depth, device=device)
    a, b = a.to(dtype), b.to(dtype).t()
    if not along_k:
        a, b = a.t().contiguous().t(), b.contiguous()

    def prepare(plan: Plan) -> Callable[[], None]:
        return tuning.recorded(functools.partial(run, a, b, plan))

    step = functools.partial(neighbour, itemsize=dtype.itemsize)
    walked = starts(rows, columns, depth, along_k, *_limits(dtype, device))
    tuning.tune(TUNED, key(rows, columns, depth, dtype, along_k), device, walked, FIELDS, step, prepare)
    return choose(rows, columns, depth, dtype, device, along_k)


def _ranges(rows: int, columns: int, depth: int) -> tuple[int, int, int]:
    return row_range(rows), max(1, columns), depth_range(depth)


def _limits(dtype: torch.dtype, device: torch.device) -> tuple[int, int, int]:
    """(bytes of an element, SMs, bytes of shared memory of a program)"""
    return dtype.itemsize, sm_count(device), shared_memory(device)


def _stage_bytes(plan: Plan, itemsize: int) -> int:
    return (plan.block_m + plan.block_n) * plan.block_k * itemsize


def _reduction(splits: int, width: int) -> tuple[int, int, int]:
    at_once = max(1, min(next_power_of_2(splits), 8192 // width))
    return width, at_once, max(1, min(MAX_SUM_WARPS, at_once * width // 512))


@functools.lru_cache(4096)
def _choose(rows: int, columns: int, depth: int, along_k: bool, itemsize: int, sms: int, shared: int) -> Choice:
    def mm(reason: str) -> Choice:
        return Choice(Plan("mm"), "heuristic", reason)

    narrow = along_k and columns <= NARROW_COLUMNS and columns * depth <= NARROW_OPERAND
    if rows * columns > MM_OUTPUTS and not narrow:
        return mm(f"{rows} x {columns} outputs are tiles enough to keep the SMs busy without a split")
    if depth < SHORTEST_K:
        return mm(f"K under {SHORTEST_K} is too short to be worth splitting")
    if itemsize == 4 and rows * columns > FP32_OUTPUTS:
        return mm("fp32 is multiplied without tensor cores, at which cuBLAS is better")
    plan = _kernel_plan(rows, columns, depth, along_k, itemsize, sms, shared)
    _, parts = chunk_of(plan, depth)
    if parts == 1 and plan.block_m >= MIN_TENSOR_CORE_BLOCK and not narrow:
        return mm(f"{rows} x {columns} outputs are tiles enough to keep the SMs busy without a split")
    tiles = cdiv(rows, plan.block_m) * cdiv(columns, plan.block_n)
    split = f"K is split in {parts}, and a second launch sums the parts" if parts > 1 else "K is not split"
    programs = f"{tiles} tiles of {plan.block_m} x {plan.block_n} make {tiles * parts} programs for {sms} SMs"
    return Choice(plan, "heuristic", f"{programs}: {split}")


@functools.lru_cache(4096)
def _kernel_plan(rows: int, columns: int, depth: int, along_k: bool, itemsize: int, sms: int, shared: int) -> Plan:
    outputs = rows * columns
    few = depth <= ONE_STEP_K and outputs <= ONE_STEP_OUTPUTS and outputs * depth <= ONE_STEP_PRODUCTS
    if along_k and few:
        return _one_step(rows, columns, depth, itemsize)
    return _tensor_cores(rows, columns, depth, itemsize, sms, shared)


def _one_step(rows: int, columns: int, depth: int, itemsize: int) -> Plan:
    outputs, block_k = rows * columns, max(SHORTEST_K, next_power_of_2(depth))
    single = rows == 1 or (outputs <= SINGLE_OUTPUTS and outputs * block_k <= SINGLE_PRODUCTS)
    side = 1 if single else 2
    warps = ONE_STEP_WARPS if block_k * itemsize <= ONE_STEP_BYTES else 2 * ONE_STEP_WARPS
    return Plan("triton", 1, side, min(side, columns), block_k, warps, 1)


def _tensor_cores(rows: int, columns: int, depth: int, itemsize: int, sms: int, shared: int) -> Plan:
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
    chunk, parts = chunk_of(plan, depth)
    steps, programs_per_sm = chunk // block_k, cdiv(tiles * parts, sms)
    if not small and programs_per_sm > 1:
        most = max(LEAST_STAGES, SHARED_STAGES - programs_per_sm)
    elif not small and steps > LONG_STEPS:
        most = LONG_STAGES
    else:
        most = MOST_STAGES
    fit = min(SHARED_BYTES, shared) // _stage_bytes(plan, itemsize)
    return plan._replace(stages=max(1, min(most, steps + 1, fit)))
