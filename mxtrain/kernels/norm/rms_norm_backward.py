"""The backward of RMSNorm, dx and dweight, in one pass over dy and x.

The kernels also compute the backward of LayerNorm (``layer_norm_backward.py``): CENTERED and DBIAS.

With xhat = x * rstd and h = dy * weight:

    dx = rstd * (h - xhat * mean_D(h * xhat)) + dtotal        dweight = sum_T(dy * xhat)

dx needs sums along rows, dweight needs sums over rows. A program walks tiles of rows, stores their dx and sums its
share of dweight in registers. At the end it stores one row of partial sums, and a small second kernel
(``partial_sums.py``) sums the rows of all programs. The order of programs does not matter: the bits are the same every
time.

Rows too long for registers are read twice, the second time mostly from the L2 cache, and every program keeps its
partial sums in its own row of memory.

Bytes per row: D elements each of dy, x, dx and dtotal, and 4 bytes of rstd.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mxtrain.kernels.device import shared_memory
from mxtrain.kernels.launch import Launch, register_op
from mxtrain.kernels.norm.operands import check_operands, contiguous
from mxtrain.kernels.norm.partial_sums import sum_partials
from mxtrain.kernels.norm.rms_norm_plan import (
    BACKWARD,
    LAYER_BACKWARD,
    Plan,
    choose_backward,
    fitting_stages,
    holds_weight,
    tiles,
)
from mxtrain.kernels.norm.wide_rows_backward import wide_rows_kernel


class Wanted(NamedTuple):
    """The dtypes of the gradients of weight and bias; None for a gradient that is not needed."""

    dweight: torch.dtype | None = None
    dbias: torch.dtype | None = None


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


def norm_backward_by_plan(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    dtotal: torch.Tensor | None,
    wanted: Wanted,
    plan: Plan | None = None,
) -> tuple[list[torch.Tensor], tuple[Launch, ...]]:
    """Return the results of an op (dx, then the wanted gradients of weight and bias) and the launches that fill them.

    With a ``mean`` it is LayerNorm's backward. Without ``plan`` the shape's own plan is chosen.
    """
    rows, columns = x.shape
    dtypes = [dtype for dtype in wanted if dtype is not None]
    empty = torch.zeros if x.numel() == 0 else torch.empty
    results = [torch.empty_like(x), *(empty(columns, dtype=dtype, device=x.device) for dtype in dtypes)]
    # A symbolic size has no plan, and comparing it would fix its value. Nothing is launched while tracing anyway.
    if isinstance(rows, torch.SymInt) or isinstance(columns, torch.SymInt) or x.numel() == 0:
        return results, ()
    operation = BACKWARD if mean is None else LAYER_BACKWARD
    plan = plan or choose_backward(rows, columns, x.dtype, weight is not None, x.device, operation).plan
    programs = min(plan.programs, tiles(plan, rows))
    partials = [torch.empty(len(dtypes), programs, columns, dtype=torch.float32, device=x.device)] if dtypes else []
    # The plan ignores whether there is a dtotal, and what dtypes the tensors have: fewer stages may fit.
    loaded = [dy, x, dtotal] if plan.persistent else [dy, x, dtotal, weight, *partials * len(dtypes)]
    element = sum(tensor.element_size() for tensor in loaded if tensor is not None)
    fitting = fitting_stages(plan.rows * plan.columns * element, shared_memory(x.device))
    constants = dict(
        columns=columns, WEIGHT=weight is not None, DTOTAL=dtotal is not None, COLUMNS=plan.columns,
        num_warps=plan.warps,
    )  # fmt: skip
    # A tile without registers for the weight has none for a second sum either.
    if plan.persistent and plan.rows == 1 and not holds_weight(plan) and mean is not None and len(dtypes) == 2:
        kernel = wide_rows_kernel
    else:
        kernel = _persistent_kernel if plan.persistent else _looped_kernel
        constants |= dict(
            CENTERED=mean is not None, DWEIGHT=wanted.dweight is not None, DBIAS=wanted.dbias is not None,
            ROWS=plan.rows, STAGES=min(plan.stages, fitting),
        )  # fmt: skip
        if plan.persistent:
            constants["HOLD_WEIGHT"] = holds_weight(plan)
    walk = Launch(
        kernel,
        (programs,),
        (dy, x, mean, rstd, weight, dtotal, results[0], *(partials or [None]), rows),
        constants,
    )
    return results, (walk, *(sum_partials(each, results[1:]) for each in partials))


def rms_norm_backward_by_plan(
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    dtotal: torch.Tensor | None,
    needs_dweight: bool,
    plan: Plan | None = None,
) -> tuple[list[torch.Tensor], tuple[Launch, ...]]:
    """The op's results (dx and, if needed, dweight) and the launches; see ``norm_backward_by_plan``."""
    wanted = Wanted(dweight=weight.dtype if needs_dweight else None)
    return norm_backward_by_plan(dy, x, None, rstd, weight, dtotal, wanted, plan)


_rms_norm_backward = register_op(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, Tensor? dtotal, bool needs_dweight)"
    " -> Tensor[]",
    rms_norm_backward_by_plan,
)


def rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None = None,
    dtotal: torch.Tensor | None = None,
    needs_dweight: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute (dx, dweight) of ``rms_norm``; the arithmetic is fp32, and each result is rounded once.

    Args:
        dy: dL/dy, bf16, fp16 or fp32 [T, D], D at most 65536.
        x: the forward's ``total``, which was normalized, bf16, fp16 or fp32 [T, D].
        rstd: fp32 [T], from the forward.
        weight: bf16, fp16 or fp32 [D], or None for ones.
        dtotal: bf16, fp16 or fp32 [T, D], another gradient of ``total``, added to dx.
        needs_dweight: whether to compute dweight, which costs a second, small launch.

    Returns:
        dx [T, D] in the dtype of ``x``, which is also the residual's gradient; dweight [D] in the dtype of ``weight``,
        or None without a weight or without ``needs_dweight``.

    Raises:
        ValueError: for unsupported shapes, dtypes or devices.
    """
    check_operands(x, dy=dy, dtotal=dtotal, rstd=rstd, weight=weight)
    dx, *dweight = _rms_norm_backward(
        *map(contiguous, (dy, x, rstd, weight, dtotal)), needs_dweight and weight is not None
    )
    return dx, dweight[0] if dweight else None
