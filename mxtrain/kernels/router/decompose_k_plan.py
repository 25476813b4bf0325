"""Which route a matrix product with a long reduction takes, and how it is split.

The first of these that has a plan for a product decides: the user's tuned plans, the table measured on this kind of
GPU, a general rule. M and K fall in ranges, and all products in a range get the same plan: a number of tokens that
changes with every step neither compiles kernels again nor misses a tuned plan.
"""

import functools
import math
from typing import NamedTuple

import torch

from mxtrain.kernels.integers import cdiv, next_power_of_2
from mxtrain.kernels.plan_table import GPU, Choice, Operation, find, gpu_of, reason, table_of
from mxtrain.kernels.tuned_plans import tuned, tuned_plans

ROUTES = ("mm", "bmm", "triton")

# Upper limits for every plan. Tensor cores multiply 16 rows by 16 columns over 16 elements of K; smaller operands are
# masked. Tiles of fewer rows are multiplied without tensor cores, and their products take registers.
MIN_TENSOR_CORE_BLOCK, MAX_TILE, MAX_PRODUCTS, MAX_WARPS, MAX_STAGES, MAX_SPLITS = 16, 128 * 256, 32768, 16, 8, 256
# Warps of a program that sums parts.
MAX_SUM_WARPS = 8
# Shared memory that one program may use for the tiles in flight, where a GPU has as much.
SHARED_BYTES = 144 * 1024

# The rule. Shorter reductions are not worth splitting.
SHORTEST_K = 2048
# More outputs per SM are tiles enough for torch.mm. Exceptions are long a with few columns and a small b, which every
# tile reads from the L2 cache: the kernels take 10.1 us to the fp32 results of 8192 x 64 x 2048 and cuBLAS 11.7 (H200).
MM_OUTPUTS_PER_SM, NARROW_COLUMNS, NARROW_OPERAND = 1024, 64, 2**18
# Products of fp32 use no tensor cores: cuBLAS is faster except for the smallest results.
FP32_OUTPUTS = 64 * 64
# Few outputs and multiplications take one step over all of K, without tensor cores and in one launch, so that all loads
# are in flight at once: at 16 x 16 x 5120 2.6 us instead of 3.5 (H200).
ONE_STEP_K, ONE_STEP_OUTPUTS_PER_SM, ONE_STEP_PRODUCTS = 8192, 16, 2**23
# Up to this many outputs and multiplications every output has a program of its own; beyond, two by two share one.
SINGLE_OUTPUTS, SINGLE_PRODUCTS = 512, 2**21
# {rows per tile: (most columns, area of a tile over the square root of the outputs)} weighs what programs load against
# the partial sums that they store. The area also grows with the square root of K beyond LONG_K.
TILES, LONG_K = {16: (64, 4), 64: (128, 7.9)}, 4096
# Parts per tile: at most FEW_PARTS, or as many as there are times SHORTEST_PART in K.
FEW_PARTS, SHORTEST_PART = 66, 256
BLOCK_K_BYTES = 128


class Plan(NamedTuple):
    """How a product is computed. Blocks and warps are powers of two, and 0 unless the route is "triton"."""

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


# Tables and tuned plans are for the largest M and K of a range. Tables are for 16-bit operands: along K, such as x and
# the transposed view of a weight, and in other layouts, where row-major a and b are timed.
ALONG_K = Operation("decompose_k", 3, ("rows", "columns", "depth"), Plan)
ROW_MAJOR = ALONG_K._replace(name="decompose_k_row_major")


def row_range(rows: int) -> int:
    """The largest M with the same plan: the next power of two."""
    return next_power_of_2(max(rows, 1))


def depth_range(depth: int) -> int:
    """The largest K with the same plan: the next of four steps between powers of two."""
    step = max(1, next_power_of_2(max(depth, 1)) // 8)
    return cdiv(max(depth, 1), step) * step


def ranges(rows: int, columns: int, depth: int) -> tuple[int, int, int]:
    """The largest product (M, N, K) with the same plan."""
    return row_range(rows), max(1, columns), depth_range(depth)


def lie_along_k(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether neighbours along K are neighbours in memory in both, as in x and in the transposed view of a weight."""
    return a.stride(1) == 1 and b.stride(0) == 1


def operation_of(along_k: bool) -> Operation:
    """The operation, by whether the operands ``lie_along_k``."""
    return ALONG_K if along_k else ROW_MAJOR


def key(rows: int, columns: int, depth: int, dtype: torch.dtype) -> str:
    """Name of a product's range among the tuned ones."""
    m, n, k = ranges(rows, columns, depth)
    return f"{m}x{n}x{k} {str(dtype).removeprefix('torch.')}"


def is_valid(plan: Plan, itemsize: int, shared: int = SHARED_BYTES) -> bool:
    """Whether a product of operands of ``itemsize`` bytes can be computed by this plan, in this much shared memory."""
    if plan.route not in ROUTES or not 1 <= plan.splits <= MAX_SPLITS:
        return False
    if plan.route != "triton":
        return plan == Plan(plan.route, plan.splits) and (plan.splits > 1) == (plan.route == "bmm")
    blocks = (plan.block_m, plan.block_n, plan.block_k)
    tile = plan.block_m * plan.block_n
    if _uses_tensor_cores(plan):
        fits = min(blocks) >= MIN_TENSOR_CORE_BLOCK and tile <= MAX_TILE
    else:
        # Operands go straight to registers.
        fits, shared = tile * plan.block_k <= MAX_PRODUCTS, SHARED_BYTES
    return (
        fits
        and all(n > 0 and n & (n - 1) == 0 for n in (*blocks, plan.warps))
        and plan.warps <= MAX_WARPS
        and 1 <= plan.stages <= MAX_STAGES
        and plan.stages * _stage_bytes(plan, itemsize) <= min(SHARED_BYTES, shared)
    )


def choose(
    rows: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device, along_k: bool = True
) -> Choice:
    """Choose how a product [M, K] by [K, N] of ``dtype`` is computed on ``device``.

    Args:
        rows: M.
        columns: N.
        depth: K.
        along_k: whether the operands ``lie_along_k``.
    """
    gpu, operation = gpu_of(device), operation_of(along_k)
    if tuned_plans(operation, gpu.name):
        found = tuned(operation, gpu.name, key(rows, columns, depth, dtype))
        if found and is_valid(found[0], dtype.itemsize, gpu.shared):
            return Choice(found[0], "tuned", found[1])
    return untuned(*ranges(rows, columns, depth), along_k, dtype.itemsize, gpu)


def kernel_plan(
    rows: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device, along_k: bool = True
) -> Plan:
    """The kernels' plan for this product, also where ``choose`` prefers another route."""
    plan = choose(rows, columns, depth, dtype, device, along_k).plan
    if plan.route == "triton":
        return plan
    return kernel_rule(*ranges(rows, columns, depth), along_k, dtype.itemsize, gpu_of(device))


@functools.lru_cache(4096)
def untuned(rows: int, columns: int, depth: int, along_k: bool, itemsize: int, gpu: GPU) -> Choice:
    """The choice by table, or by rule where no row of the table holds the product."""
    operation = operation_of(along_k)
    table = table_of(operation, gpu)
    if itemsize == 2 and (row := find(operation, table, (rows, columns, depth))):
        if is_valid(row.settings, itemsize, gpu.shared):
            return Choice(row.settings, f"table {table}", reason(row))
    return rule(rows, columns, depth, along_k, itemsize, gpu)


def rule(rows: int, columns: int, depth: int, along_k: bool, itemsize: int, gpu: GPU) -> Choice:
    """The choice for any GPU, from its number of SMs and its shared memory."""
    outputs = rows * columns
    narrow = along_k and columns <= NARROW_COLUMNS and columns * depth <= NARROW_OPERAND
    if depth < SHORTEST_K:
        return Choice(Plan("mm"), "rule", f"K under {SHORTEST_K} is too short to be worth splitting")
    if itemsize == 4 and outputs > FP32_OUTPUTS:
        return Choice(Plan("mm"), "rule", "fp32 is multiplied without tensor cores, at which cuBLAS is faster")
    plan = kernel_rule(rows, columns, depth, along_k, itemsize, gpu)
    enough_tiles = outputs > MM_OUTPUTS_PER_SM * gpu.sms or (plan.splits == 1 and _uses_tensor_cores(plan))
    if enough_tiles and not narrow:
        return Choice(Plan("mm"), "rule", f"{rows} x {columns} outputs are enough tiles to keep {gpu.sms} SMs busy")
    tiles = cdiv(rows, plan.block_m) * cdiv(columns, plan.block_n)
    return Choice(plan, "rule", f"{tiles} tiles of {plan.block_m} x {plan.block_n} for {gpu.sms} SMs")


def kernel_rule(rows: int, columns: int, depth: int, along_k: bool, itemsize: int, gpu: GPU) -> Plan:
    """The kernels' plan, also for products that ``rule`` leaves to torch.mm."""
    outputs = rows * columns
    few = outputs <= ONE_STEP_OUTPUTS_PER_SM * gpu.sms and outputs * depth <= ONE_STEP_PRODUCTS
    if not (along_k and depth <= ONE_STEP_K and few):
        return tensor_core_rule(rows, columns, depth, itemsize, gpu)
    block_k = max(SHORTEST_K, next_power_of_2(depth))
    side = 1 if rows == 1 or (outputs <= SINGLE_OUTPUTS and outputs * block_k <= SINGLE_PRODUCTS) else 2
    return Plan("triton", 1, side, min(side, columns), block_k, 8 if block_k * itemsize <= 8192 else 16, 1)


def tensor_core_rule(rows: int, columns: int, depth: int, itemsize: int, gpu: GPU) -> Plan:
    """The kernels' plan with tensor cores."""
    block_m = 16 if rows <= 32 else 64
    most, share = TILES[block_m]
    area = next_power_of_2(math.ceil(share * math.sqrt(rows * columns * max(1, depth / LONG_K))))
    block_n = max(MIN_TENSOR_CORE_BLOCK, min(area // block_m, next_power_of_2(columns), most))
    tiles = cdiv(rows, block_m) * cdiv(columns, block_n)
    # Smaller tiles use fewer warps, and more programs share an SM.
    if block_m * block_n > 512:
        warps, per_sm = 4, (2 if block_m == 16 else 1)
    elif block_n > 16 or tiles < 4:
        warps, per_sm = 2, 2
    else:
        warps, per_sm = 1, 4
    block_k = BLOCK_K_BYTES // itemsize
    most_parts = min(cdiv(depth, block_k), max(FEW_PARTS, depth // SHORTEST_PART), MAX_SPLITS)
    plan = Plan("triton", max(1, min(per_sm * gpu.sms // tiles, most_parts)), block_m, block_n, block_k, warps, 1)
    chunk, parts = chunk_of(plan, depth)
    steps, sharing = chunk // block_k, cdiv(tiles * parts, gpu.sms)
    if block_m == 16:
        most_stages = 6
    elif sharing > 1:
        # Large tiles that share an SM also share its shared memory.
        most_stages = max(3, 7 - sharing)
    else:
        most_stages = 8 if steps > 8 else 6
    fit = min(SHARED_BYTES, gpu.shared) // _stage_bytes(plan, itemsize)
    return plan._replace(stages=max(1, min(most_stages, steps + 1, fit)))


def chunk_of(plan: Plan, depth: int) -> tuple[int, int]:
    """(length of a part of K in whole blocks, number of parts that are not empty but at least 1)"""
    chunk = max(1, cdiv(cdiv(depth, plan.splits), plan.block_k)) * plan.block_k
    return chunk, max(1, cdiv(depth, chunk))


def reduction_tile(splits: int, outputs: int, sms: int) -> tuple[int, int, int]:
    """(outputs, parts at once, warps) of a program that sums parts: one or two programs per SM, if there is work."""
    width = max(32, min(1024, next_power_of_2(outputs) // next_power_of_2(sms)))
    return _reduction(splits, width)


def softmax_tile(splits: int, columns: int) -> tuple[int, int, int, int]:
    """(rows, columns, parts at once, warps) of a program that sums parts of whole rows."""
    width = next_power_of_2(columns)
    rows = max(1, 128 // width)
    _, at_once, warps = _reduction(splits, rows * width)
    return rows, width, at_once, warps


def _uses_tensor_cores(plan: Plan) -> bool:
    return plan.block_m >= MIN_TENSOR_CORE_BLOCK


def _stage_bytes(plan: Plan, itemsize: int) -> int:
    return (plan.block_m + plan.block_n) * plan.block_k * itemsize


def _reduction(splits: int, width: int) -> tuple[int, int, int]:
    at_once = max(1, min(next_power_of_2(splits), 8192 // width))
    return width, at_once, max(1, min(MAX_SUM_WARPS, at_once * width // 512))
