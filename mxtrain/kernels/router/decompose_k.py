"""epilogue(a b + bias) for a small result and a long reduction, which is split in parts so that every SM has work.

A first launch computes the fp32 product of every part of K for every tile of the result, a second sums the parts, adds
the bias, applies the epilogue and stores once. The second walks the result as a flat vector: each of its programs loads
all parts of a few outputs side by side. No atomics: the same bits every time. (One launch, in which the program that
comes last to a tile sums its parts, took about a microsecond longer on an H200 than two that overlap.)

From compute capability 9.0 on a launch is prepared while the one before it on the stream ends, whatever that is, and
waits for it by itself (programmatic dependent launch): on an H200 0.1 to 0.5 microseconds less a call.

Where there is little to multiply, that is done without tensor cores and in one launch: a program has two or four
outputs and all of K.

Source of the method: Ellison, Zhang, "Decompose-K", PyTorch Conference 2025.

Bytes: M K + K N in the dtype of the operands, M N of the result, and 8 S M N of parts, mostly to and from the L2 cache.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mxtrain.kernels.checks import check_matrix, check_vector
from mxtrain.kernels.device import INTERPRETED, overlaps_launches, sm_count
from mxtrain.kernels.integers import cdiv, next_power_of_2
from mxtrain.kernels.launch import Launch
from mxtrain.kernels.router.decompose_k_plan import (
    DTYPES,
    MIN_TENSOR_CORE_BLOCK,
    Plan,
    chunk_of,
    kernel_plan,
    lie_along_k,
    reduction_tile,
    softmax_tile,
)

EPILOGUES = (None, "relu", "sigmoid", "softmax")


@triton.jit
def _finish(x, bias_ptr, column, columns, BIAS: tl.constexpr, EPILOGUE: tl.constexpr):
    """epilogue(x + bias); ``column`` is that of every element, shaped like x or [1, C]. Softmax: x holds whole rows."""
    if BIAS:
        x += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    if EPILOGUE == "relu":
        # Not a maximum: NaN stays.
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
    """What the pointers point to, zero outside of the operands; a_depth, b_depth: where along K."""
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
    """The product of one part of K for one tile: to the parts if K is SPLIT, and otherwise to the result.

    Strides are those of a row or column of the operands, and of one step along K. WHOLE_...: no tile is cut there.
    ONE_STEP: without tensor cores, and there is some K and no more than BLOCK_K. OVERLAP: this launch may start before
    the one ahead of it, of any kernel, has ended.
    """
    if OVERLAP:
        gdc_wait()
        if SPLIT:
            # The second launch may start, and wait, as soon as every program of this one has.
            gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    step = tl.arange(0, BLOCK_K)
    if TENSOR_CORES:
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        at_row, a_step, b_step, at_column = row[:, None], step[None, :], step[:, None], column[None, :]
    else:
        # Summed up over K at the end: until then every thread has sums of its own. Operands are loaded as they are
        # multiplied: one row and one column lie in the same threads, with nothing to be exchanged.
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
    """The sum over parts of what [X] pointers point to in the first of them, AT_ONCE parts side by side."""
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
    """The sum over parts of a few outputs of the flat result."""
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
    """The sum over parts of whole rows."""
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
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: str | None,
    out_dtype: torch.dtype,
    plan: Plan,
) -> tuple[torch.Tensor, tuple[Launch, ...]]:
    """The result, and the launches that fill it."""
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
            # Interpreted, the dot of bf16 is none. Of fp32 that were bf16 or fp16 it is the same.
            UPCAST=INTERPRETED,
            # Asked for where rows lie side by side only: of other layouts the mask costs nothing, and the number of
            # rows is then no reason to compile another variant.
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
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str | None = None,
    out_dtype: torch.dtype | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """epilogue(a b + bias), K split among programs; the arithmetic is fp32 (IEEE), and the result is rounded once.

    ``torch.compile`` does not trace it: graphs hold the op of ``mxtrain.ops.decompose_k`` that calls it.

    Args:
        a: bf16, fp16 or fp32 [M, K]. Operands neither of whose strides is 1 are copied.
        b: [K, N] of the dtype of ``a``.
        bias: [N], of that dtype or fp32.
        epilogue: None, "relu", "sigmoid" or "softmax" (over N).
        out_dtype: float32, or None for the dtype of ``a``.
        plan: how K is split, of the route "triton"; None for the one chosen for this shape.

    Returns:
        [M, N] of ``out_dtype``.

    Raises:
        ValueError: for another shape, dtype, device, epilogue or route.
    """
    check_matrix("a", a, DTYPES)
    check_matrix("b", b, (a.dtype,))
    if a.shape[1] != b.shape[0] or a.device != b.device:
        raise ValueError(f"b {tuple(b.shape)} on {b.device} does not go with a {tuple(a.shape)} on {a.device}")
    if bias is not None:
        check_vector("bias", bias, b.shape[1], a.device, (a.dtype, torch.float32))
        bias = bias.contiguous()
    if epilogue not in EPILOGUES:
        raise ValueError(f"epilogue {epilogue!r}: expected one of {EPILOGUES}")
    if out_dtype not in (None, a.dtype, torch.float32):
        raise ValueError(f"out_dtype {out_dtype} of operands of {a.dtype}: expected theirs or float32")
    if plan is None:
        plan = kernel_plan(a.shape[0], b.shape[1], a.shape[1], a.dtype, a.device, lie_along_k(a, b))
    elif plan.route != "triton":
        raise ValueError(f"plan {plan}: expected the route 'triton'")
    a, b = _readable(a), _readable(b)
    c, launches = decompose_k_by_plan(a, b, bias, epilogue, out_dtype or a.dtype, plan)
    for launch in launches:
        launch.run(a.device)
    return c


def _readable(x: torch.Tensor) -> torch.Tensor:
    return x if 1 in x.stride() else x.contiguous()
