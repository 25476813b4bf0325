"""epilogue(a b + bias) for a small result and a long reduction, which is split into parts so that every SM has work.

The first launch computes the fp32 product of every part of K for every tile of the result. The second launch sums the
parts, adds the bias, applies the epilogue and stores once. It walks the result as a flat vector: each program loads all
parts of a few outputs side by side. Without atomics, the bits are the same every time. (A single launch, in which the
last program at a tile sums its parts, took about a microsecond longer on an H200 than two launches that overlap.)

From compute capability 9.0 on, a launch starts while the previous kernel on the stream ends, and waits for its results
itself (programmatic dependent launch): 0.1 to 0.5 microseconds less per call on an H200.

Small products take one launch without tensor cores: a program computes up to four outputs over all of K.

Source of the method: Ellison, Zhang, "Decompose-K", PyTorch Conference 2025.

Bytes: M K + K N in the dtype of the operands, M N of the result, and 8 S M N of parts, mostly to and from the L2 cache.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mxtrain.launch.launch import (
    H100_SHARED_MEMORY,
    H100_SMS,
    INTERPRETED,
    Launch,
    cdiv,
    contiguous,
    next_power_of_2,
    overlaps_launches,
    shared_memory,
    sm_count,
)

# Launch plans

# Tensor cores multiply 16 rows by 16 columns over 16 elements of K; smaller operands are masked. Tiles of fewer rows
# are multiplied without tensor cores.
MIN_TENSOR_CORE_BLOCK = 16
# Limits of a plan: parts of K, bytes of shared memory for the tiles in flight, warps of a program that sums parts.
MAX_SPLITS, SHARED_BYTES, MAX_SUM_WARPS = 256, 144 * 1024, 8

# Shorter reductions are not worth splitting.
SHORTEST_K = 2048
# More outputs per SM are tiles enough for torch.mm; beyond LONG_K, twice as many. Exceptions are long a with few
# columns and a small b, which every tile reads from the L2 cache: the kernels take 10.1 us to the fp32 results of
# 8192 x 64 x 2048 and cuBLAS 11.7 (H200).
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
    """How the kernels compute a product. Blocks and warps are powers of two."""

    splits: int
    """Parts of K"""
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    """Steps over K in flight"""


class Choice(NamedTuple):
    """How a product is computed: by which plan of the kernels, or by torch.mm (None), and a sentence that says why."""

    plan: Plan | None
    why: str


def ranges(rows: int, columns: int, depth: int) -> tuple[int, int, int]:
    """The largest product (M, N, K) with the same plan.

    M ends at a power of two, K at one of four steps between powers of two. A number of tokens that changes with every
    step therefore compiles no kernel again.
    """
    step = max(1, next_power_of_2(max(depth, 1)) // 8)
    return next_power_of_2(max(rows, 1)), max(1, columns), cdiv(max(depth, 1), step) * step


def lie_along_k(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether neighbors along K are neighbors in memory in both, as in x and in the transposed view of a weight."""
    return a.stride(1) == 1 and b.stride(0) == 1


def choose(
    rows: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device, along_k: bool = True
) -> Choice:
    """Choose how a product [M, K] by [K, N] of ``dtype`` is computed on ``device``.

    ``rows``, ``columns`` and ``depth`` are M, N and K. ``along_k`` says whether the operands ``lie_along_k``.
    """
    gpu = sm_count(device), shared_memory(device)
    return choose_for_range(*ranges(rows, columns, depth), along_k, dtype.itemsize, *gpu)


@functools.lru_cache(4096)
def choose_for_range(
    rows: int,
    columns: int,
    depth: int,
    along_k: bool,
    itemsize: int,
    sms: int = H100_SMS,
    shared: int = H100_SHARED_MEMORY,
) -> Choice:
    """``choose`` for the largest product of a range, on a GPU with ``sms`` SMs and ``shared`` bytes per program."""
    outputs = rows * columns
    narrow = along_k and columns <= NARROW_COLUMNS and columns * depth <= NARROW_OPERAND
    if depth < SHORTEST_K:
        return Choice(None, f"K under {SHORTEST_K} is too short to be worth splitting")
    if itemsize == 4 and outputs > FP32_OUTPUTS:
        return Choice(None, "fp32 is multiplied without tensor cores, at which cuBLAS is faster")
    plan = kernel_plan(rows, columns, depth, along_k, itemsize, sms, shared)
    most_outputs = MM_OUTPUTS_PER_SM * sms * (2 if along_k and depth > LONG_K else 1)
    enough_tiles = outputs > most_outputs or (plan.splits == 1 and plan.block_m >= MIN_TENSOR_CORE_BLOCK)
    if enough_tiles and not narrow:
        return Choice(None, f"{rows} x {columns} outputs are enough tiles to keep {sms} SMs busy")
    tiles = cdiv(rows, plan.block_m) * cdiv(columns, plan.block_n)
    return Choice(plan, f"{tiles} tiles of {plan.block_m} x {plan.block_n} for {sms} SMs")


def kernel_plan(
    rows: int,
    columns: int,
    depth: int,
    along_k: bool,
    itemsize: int,
    sms: int = H100_SMS,
    shared: int = H100_SHARED_MEMORY,
) -> Plan:
    """The kernels' plan, also for products that ``choose`` leaves to torch.mm."""
    outputs = rows * columns
    few = outputs <= ONE_STEP_OUTPUTS_PER_SM * sms and outputs * depth <= ONE_STEP_PRODUCTS
    if not (along_k and depth <= ONE_STEP_K and few):
        return _tensor_core_plan(rows, columns, depth, itemsize, sms, min(SHARED_BYTES, shared))
    block_k = max(SHORTEST_K, next_power_of_2(depth))
    side = 1 if rows == 1 or (outputs <= SINGLE_OUTPUTS and outputs * block_k <= SINGLE_PRODUCTS) else 2
    return Plan(1, side, min(side, columns), block_k, 8 if block_k * itemsize <= 8192 else 16, 1)


def _tensor_core_plan(rows: int, columns: int, depth: int, itemsize: int, sms: int, shared: int) -> Plan:
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
    plan = Plan(max(1, min(per_sm * sms // tiles, most_parts)), block_m, block_n, block_k, warps, 1)
    chunk, parts = chunk_of(plan, depth)
    steps, sharing = chunk // block_k, cdiv(tiles * parts, sms)
    if block_m == 16:
        most_stages = 6
    elif sharing > 1:
        # Large tiles that share an SM also share its shared memory.
        most_stages = max(3, 7 - sharing)
    else:
        most_stages = 8 if steps > 8 else 6
    fit = shared // ((block_m + block_n) * block_k * itemsize)
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


def _reduction(splits: int, width: int) -> tuple[int, int, int]:
    at_once = max(1, min(next_power_of_2(splits), 8192 // width))
    return width, at_once, max(1, min(MAX_SUM_WARPS, at_once * width // 512))


# Kernels


@triton.jit
def _finish(x, bias_ptr, column, columns, BIAS: tl.constexpr, EPILOGUE: tl.constexpr):
    """epilogue(x + bias). ``column`` [like x, or 1, C] holds column numbers. For a softmax x must hold whole rows."""
    if BIAS:
        x += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    if EPILOGUE == "relu":
        # tl.maximum would drop NaN.
        x = tl.where(x < 0, 0.0, x)
    elif EPILOGUE == "sigmoid":
        x = 1 / (1 + tl.exp(-x))
    elif EPILOGUE == "softmax":
        x = tl.where(column < columns, x, -float("inf"))
        x = tl.exp(x - tl.max(x, 1)[:, None])
        x = x / tl.sum(x, 1)[:, None]
    return x


@triton.jit
def _load_operands(
    a_pointers, b_pointers, row, column, a_depth, b_depth, rows, columns, depth,
    WHOLE_ROWS: tl.constexpr, WHOLE_COLUMNS: tl.constexpr, WHOLE_DEPTH: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """Load a and b, with zeros outside of the operands. a_depth, b_depth: positions along K."""
    a_mask = tl.full(a_pointers.shape, 1, tl.int1)
    b_mask = tl.full(b_pointers.shape, 1, tl.int1)
    if not WHOLE_ROWS:
        a_mask &= row < rows
    if not WHOLE_COLUMNS:
        b_mask &= column < columns
    if not WHOLE_DEPTH:
        a_mask &= a_depth < depth
        b_mask &= b_depth < depth
    a = tl.load(a_pointers, mask=a_mask, other=0.0)
    b = tl.load(b_pointers, mask=b_mask, other=0.0)
    if FP32:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return a, b


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    a_ptr, b_ptr, bias_ptr, c_ptr, partials_ptr, rows, columns, depth, chunk,
    a_row, a_depth, b_depth, b_column,
    SPLIT: tl.constexpr, BIAS: tl.constexpr, EPILOGUE: tl.constexpr, TENSOR_CORES: tl.constexpr, UPCAST: tl.constexpr,
    OVERLAP: tl.constexpr, ONE_STEP: tl.constexpr,
    WHOLE_ROWS: tl.constexpr, WHOLE_COLUMNS: tl.constexpr, WHOLE_DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply one part of K for one tile. Store a part if K is SPLIT, otherwise the finished result.

    a_row, a_depth, b_depth, b_column: strides. WHOLE_...: no tile is cut off in this direction. ONE_STEP: no tensor
    cores, and K has 1 to BLOCK_K elements. OVERLAP: this launch may start before the previous kernel has ended.
    """
    if OVERLAP:
        gdc_wait()
        if SPLIT:
            # Lets the second launch start, and wait, once every program of this one has started.
            gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    step = tl.arange(0, BLOCK_K)
    if TENSOR_CORES:
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        at_row, a_step, b_step, at_column = row[:, None], step[None, :], step[:, None], column[None, :]
    else:
        # Every thread keeps its own sums until the end. Operands are loaded in the layout in which they are multiplied,
        # so threads exchange nothing.
        product = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), tl.float32)
        at_row, a_step, at_column = row[:, None, None], step[None, None, :], column[None, :, None]
        b_step = a_step
    a_pointers = a_ptr + (at_row.to(tl.int64) * a_row + a_step.to(tl.int64) * a_depth)
    b_pointers = b_ptr + (b_step.to(tl.int64) * b_depth + at_column.to(tl.int64) * b_column)
    if ONE_STEP:
        a, b = _load_operands(
            a_pointers, b_pointers, at_row, at_column, a_step, b_step, rows, columns, depth,
            WHOLE_ROWS, WHOLE_COLUMNS, WHOLE_DEPTH, True,
        )  # fmt: skip
        product = a * b
    else:
        first = part * chunk
        last = tl.minimum(first + chunk, depth)
        a_pointers += tl.cast(first, tl.int64) * a_depth
        b_pointers += tl.cast(first, tl.int64) * b_depth
        for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
            a, b = _load_operands(
                a_pointers, b_pointers, at_row, at_column, k + a_step, k + b_step, rows, columns, depth,
                WHOLE_ROWS, WHOLE_COLUMNS, WHOLE_DEPTH, UPCAST or not TENSOR_CORES,
            )  # fmt: skip
            if TENSOR_CORES:
                product = tl.dot(a, b, product, input_precision="ieee")
            else:
                product += a * b
            a_pointers += tl.cast(a_depth, tl.int64) * BLOCK_K
            b_pointers += tl.cast(b_depth, tl.int64) * BLOCK_K
    if not TENSOR_CORES:
        product = tl.sum(product, 2)
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    offsets = row.to(tl.int64)[:, None] * columns + column[None, :]
    if SPLIT:
        outputs = tl.cast(rows, tl.int64) * columns
        tl.store(partials_ptr + part * outputs + offsets, product, mask=mask)
    else:
        product = _finish(product, bias_ptr, column[None, :], columns, BIAS, EPILOGUE)
        tl.store(c_ptr + offsets, product.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_sum(pointers, mask, parts, outputs, PARTS: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sum over parts, AT_ONCE parts side by side. ``pointers`` [X] point into the first part."""
    total = tl.zeros((pointers.shape[0],), tl.float32)
    for first in tl.static_range(0, PARTS, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)[:, None]
        offsets = part * tl.cast(outputs, tl.int64)
        total += tl.sum(tl.load(pointers[None, :] + offsets, mask=(part < parts) & mask[None, :], other=0.0), 0)
    return total


@triton.jit
def _sum_kernel(
    partials_ptr, bias_ptr, c_ptr, outputs, columns, parts,
    BIAS: tl.constexpr, EPILOGUE: tl.constexpr, OVERLAP: tl.constexpr,
    PARTS: tl.constexpr, AT_ONCE: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Sum the parts of a few outputs of the flat result."""
    if OVERLAP:
        gdc_wait()
    start = tl.cast(tl.program_id(0), tl.int64) * OUTPUTS
    lane = tl.arange(0, OUTPUTS)
    mask = start + lane < outputs
    total = _load_sum(partials_ptr + start + lane, mask, parts, outputs, PARTS, AT_ONCE)
    column = ((start % columns).to(tl.int32) + lane) % columns
    total = _finish(total, bias_ptr, column, columns, BIAS, EPILOGUE)
    tl.store(c_ptr + start + lane, total.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_kernel(
    partials_ptr, bias_ptr, c_ptr, outputs, columns, parts,
    BIAS: tl.constexpr, EPILOGUE: tl.constexpr, OVERLAP: tl.constexpr,
    PARTS: tl.constexpr, AT_ONCE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the parts of whole rows, and apply the softmax."""
    if OVERLAP:
        gdc_wait()
    lane = tl.arange(0, ROWS * COLUMNS)
    row, column = tl.program_id(0) * ROWS + lane // COLUMNS, lane % COLUMNS
    offsets = row.to(tl.int64) * columns + column
    mask = (offsets < outputs) & (column < columns)
    total = _load_sum(partials_ptr + offsets, mask, parts, outputs, PARTS, AT_ONCE)
    total = tl.reshape(total, (ROWS, COLUMNS))
    total = _finish(total, bias_ptr, tl.arange(0, COLUMNS)[None, :], columns, BIAS, EPILOGUE)
    total = tl.reshape(total, (ROWS * COLUMNS,))
    tl.store(c_ptr + offsets, total.to(c_ptr.dtype.element_ty), mask=mask)


def decompose_k_by_plan(
    a: torch.Tensor, b: torch.Tensor, bias, epilogue: str | None, out_dtype: torch.dtype, plan: Plan
) -> tuple[torch.Tensor, tuple[Launch, ...]]:
    """The result, and the launches that fill it; see ``decompose_k``."""
    (rows, depth), columns = a.shape, b.shape[1]
    c = torch.empty(rows, columns, dtype=out_dtype, device=a.device)
    if c.numel() == 0:
        return c, ()
    chunk, parts = chunk_of(plan, depth)
    tensor_cores = plan.block_m >= MIN_TENSOR_CORE_BLOCK
    # A softmax needs whole rows.
    split = parts > 1 or (epilogue == "softmax" and plan.block_n < columns)
    last = dict(BIAS=bias is not None, EPILOGUE=epilogue)
    overlap = dict(OVERLAP=True, launch_pdl=True) if overlaps_launches(a) else dict(OVERLAP=False)
    partials = c.new_empty(parts, rows, columns, dtype=torch.float32) if split else None
    product = Launch(
        _product_kernel,
        (cdiv(rows, plan.block_m), cdiv(columns, plan.block_n), parts),
        (a, b, bias, c, partials, rows, columns, depth, chunk, *a.stride(), *b.stride()),
        dict(
            SPLIT=split, **(dict(BIAS=False, EPILOGUE=None) if split else last), **overlap,
            TENSOR_CORES=tensor_cores, ONE_STEP=not tensor_cores and 0 < depth <= plan.block_k,
            # The interpreter's bf16 dot returns garbage, so operands are upcast to fp32: the products are the same.
            UPCAST=INTERPRETED,
            # Without a mask only where it would cost time, in operands whose rows are not contiguous: otherwise another
            # number of rows would compile another variant.
            WHOLE_ROWS=plan.block_m == 1 or (a.stride(1) != 1 and rows % plan.block_m == 0),
            WHOLE_COLUMNS=columns % plan.block_n == 0, WHOLE_DEPTH=depth % plan.block_k == 0,
            BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, STAGES=plan.stages, num_warps=plan.warps,
        ),
    )  # fmt: skip
    if not split:
        return c, (product,)
    if epilogue == "softmax":
        height, width, at_once, warps = softmax_tile(parts, columns)
        kernel, programs, tile = _softmax_kernel, cdiv(rows, height), dict(ROWS=height, COLUMNS=width)
    else:
        width, at_once, warps = reduction_tile(parts, c.numel(), sm_count(a.device))
        kernel, programs, tile = _sum_kernel, cdiv(c.numel(), width), dict(OUTPUTS=width)
    constants = dict(**last, **overlap, PARTS=next_power_of_2(parts), AT_ONCE=at_once, **tile)
    args = (partials, bias, c, c.numel(), columns, parts)
    return c, (product, Launch(kernel, (programs,), args, dict(**constants, num_warps=warps)))


def decompose_k(
    a: torch.Tensor, b: torch.Tensor, bias, epilogue: str | None, out_dtype: torch.dtype, plan: Plan
) -> torch.Tensor:
    """epilogue(a b + bias) [M, N], with the arguments of ``mxtrain.decompose_k_mm``, which checks them.

    The arithmetic is fp32 (IEEE), and the result is rounded once. K is split as ``plan`` says. Operands without a
    stride of 1 are copied. ``torch.compile`` does not trace it: graphs hold the op of ``mxtrain.nn.decompose_k.op``.
    """
    a, b = (x if 1 in x.stride() else x.contiguous() for x in (a, b))
    c, launches = decompose_k_by_plan(a, b, *contiguous(bias), epilogue, out_dtype, plan)
    for launch in launches:
        launch.run(a.device)
    return c
