"""The backward of RMSNorm, dx and dweight, in one pass over dy and x.

With xhat = x * rstd and h = dy * weight:

    dx = rstd * (h - xhat * mean_D(h * xhat)) + dtotal        dweight = sum_T(dy * xhat)

dx needs sums along rows, dweight needs sums over rows. A program walks tiles of rows, stores their dx and sums its
share of dweight in registers. At the end it stores one row of partial sums, and a small second kernel sums the rows of
all programs. The order of programs does not matter: the bits are the same every time.

Rows too long for registers are read twice, the second time mostly from the L2 cache, and every program keeps its
partial sums in its own row of memory.

Bytes per row: D elements each of dy, x, dx and dtotal, and 4 bytes of rstd.
"""

import torch
import triton
import triton.language as tl

from mxtrain.kernels.checks import check_matrix, check_same, check_vector
from mxtrain.kernels.device import shared_memory, sm_count
from mxtrain.kernels.integers import cdiv
from mxtrain.kernels.launch import Launch, register_op
from mxtrain.kernels.norm.rms_norm_plan import (
    DTYPES,
    Plan,
    check_columns,
    choose_backward,
    fitting_stages,
    holds_weight,
    reduction_tile,
    tiles,
)


@triton.jit
def _persistent_kernel(
    dy_ptr, x_ptr, rstd_ptr, weight_ptr, dtotal_ptr, dx_ptr, partials_ptr, rows, columns,
    WEIGHT: tl.constexpr, DTOTAL: tl.constexpr, DWEIGHT: tl.constexpr,
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
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + row_in_tile
        start = tl.cast(tile, tl.int64) * (ROWS * columns)
        mask = (row < rows)[:, None] & inside
        dy = tl.load(dy_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
        xhat = tl.load(x_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        xhat *= rstd
        if DWEIGHT:
            dweight += dy * xhat
        h = dy
        if WEIGHT:
            if not HOLD_WEIGHT:
                weight = tl.load(weight_ptr + column[None, :], mask=inside, other=0.0).to(tl.float32)
            h *= weight
        dx = (h - xhat * (tl.sum(h * xhat, 1)[:, None] / columns)) * rstd
        if DTOTAL:
            dx += tl.load(dtotal_ptr + start + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if DWEIGHT:
        partials = partials_ptr + tl.cast(program, tl.int64) * columns + column
        tl.store(partials, tl.sum(dweight, 0), mask=column < columns)


@triton.jit
def _looped_kernel(
    dy_ptr, x_ptr, rstd_ptr, weight_ptr, dtotal_ptr, dx_ptr, partials_ptr, rows, columns,
    WEIGHT: tl.constexpr, DTOTAL: tl.constexpr, DWEIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    lane = tl.arange(0, COLUMNS)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=1):
        row = (tile * ROWS + tl.arange(0, ROWS))[:, None]
        start = row.to(tl.int64) * columns
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        products = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = (first + lane)[None, :]
            mask = (row < rows) & (column < columns)
            h = tl.load(dy_ptr + start + column, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            x = tl.load(x_ptr + start + column, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            if WEIGHT:
                h *= tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            products += h * (x * rstd)
        projection = tl.sum(products, 1)[:, None] / columns
        # The program's first tile starts the sums.
        to_add_to = tl.where(tile == program, 0, columns)
        for first in tl.range(0, columns, COLUMNS, num_stages=STAGES):
            column = (first + lane)[None, :]
            mask = (row < rows) & (column < columns)
            dy = tl.load(dy_ptr + start + column, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            x = tl.load(x_ptr + start + column, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            xhat = x * rstd
            h = dy
            if WEIGHT:
                h *= tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            dx = (h - xhat * projection) * rstd
            if DTOTAL:
                dx += tl.load(dtotal_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + start + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if DWEIGHT:
                inside = first + lane < columns
                partials = partials_ptr + tl.cast(program, tl.int64) * columns + first + lane
                before = tl.load(partials, mask=first + lane < to_add_to, other=0.0)
                tl.store(partials, before + tl.sum(dy * xhat, 0), mask=inside)
        if DWEIGHT:
            # Threads may load partial sums that another thread stored.
            tl.debug_barrier()


@triton.jit
def _sum_partials_kernel(
    partials_ptr, dweight_ptr, programs, columns, PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros((PROGRAMS, COLUMNS), tl.float32)
    for first in range(0, programs, PROGRAMS):
        program = first + tl.arange(0, PROGRAMS)
        offsets = program.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(partials_ptr + offsets, mask=(program < programs)[:, None] & inside[None, :], other=0.0)
    tl.store(dweight_ptr + column, tl.sum(total, 0).to(dweight_ptr.dtype.element_ty), mask=inside)


def rms_norm_backward_by_plan(
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    dtotal: torch.Tensor | None,
    needs_dweight: bool,
    plan: Plan | None = None,
) -> tuple[list[torch.Tensor], tuple[Launch, ...]]:
    """The op's results (dx and, if needed, dweight) and the launches that fill them.

    Without ``plan`` the shape's own plan is chosen.
    """
    rows, columns = x.shape
    results = [torch.empty_like(x)]
    if needs_dweight:
        results.append(torch.zeros_like(weight) if x.numel() == 0 else torch.empty_like(weight))
    # A symbolic size has no plan, and comparing it would fix its value. Nothing is launched while tracing anyway.
    if isinstance(rows, torch.SymInt) or isinstance(columns, torch.SymInt) or x.numel() == 0:
        return results, ()
    plan = plan or choose_backward(rows, columns, x.dtype, weight is not None, x.device).plan
    programs = min(plan.programs, tiles(plan, rows))
    partials = torch.empty(programs, columns, dtype=torch.float32, device=x.device) if needs_dweight else None
    # The plan ignores whether there is a dtotal, and what dtypes the tensors have: fewer stages may fit.
    loaded = [dy, x, dtotal] if plan.persistent else [dy, x, dtotal, weight, partials]
    element = sum(tensor.element_size() for tensor in loaded if tensor is not None)
    fitting = fitting_stages(plan.rows * plan.columns * element, shared_memory(x.device))
    constants = dict(
        WEIGHT=weight is not None, DTOTAL=dtotal is not None, DWEIGHT=needs_dweight,
        ROWS=plan.rows, COLUMNS=plan.columns, STAGES=min(plan.stages, fitting), num_warps=plan.warps,
    )  # fmt: skip
    if plan.persistent:
        constants["HOLD_WEIGHT"] = holds_weight(plan)
    walk = Launch(
        _persistent_kernel if plan.persistent else _looped_kernel,
        (programs,),
        (dy, x, rstd, weight, dtotal, results[0], partials, rows, columns),
        constants,
    )
    if not needs_dweight:
        return results, (walk,)
    height, width, warps = reduction_tile(programs, columns, sm_count(x.device))
    reduction = Launch(
        _sum_partials_kernel,
        (cdiv(columns, width),),
        (partials, results[1], programs, columns),
        dict(PROGRAMS=height, COLUMNS=width, num_warps=warps),
    )
    return results, (walk, reduction)


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
    check_matrix("x", x, DTYPES)
    check_columns(x)
    for name, other in (("dy", dy), ("dtotal", dtotal)):
        if other is not None:
            check_matrix(name, other, DTYPES)
            check_same(name, other, "x", x)
    check_vector("rstd", rstd, x.shape[0], x.device, (torch.float32,))
    if weight is not None:
        check_vector("weight", weight, x.shape[1], x.device, DTYPES)
    dx, *dweight = _rms_norm_backward(
        dy.contiguous(),
        x.contiguous(),
        rstd.contiguous(),
        None if weight is None else weight.contiguous(),
        None if dtotal is None else dtotal.contiguous(),
        needs_dweight and weight is not None,
    )
    return dx, dweight[0] if dweight else None
