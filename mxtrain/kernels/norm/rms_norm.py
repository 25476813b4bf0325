"""RMSNorm of every row, with an optional residual add: one read of x, one write of y.

Rows too long for registers are read twice, the second time mostly from the L2 cache.

Bytes per row: D elements of x read and D of y written, and 4 bytes of rstd. A residual adds D elements read and D
elements of the sum written.
"""

import torch
import triton
import triton.language as tl

from mxtrain.kernels.checks import check_matrix, check_same, check_vector
from mxtrain.kernels.device import INTERPRETED
from mxtrain.kernels.launch import Launch, register_op
from mxtrain.kernels.norm.rms_norm_plan import DTYPES, Plan, check_columns, choose_forward, tiles


@triton.jit
def _load_total(x_ptr, residual_ptr, offsets, mask, eviction: tl.constexpr, RESIDUAL: tl.constexpr):
    """x in fp32; with a residual x + residual, rounded to the dtype of x as it is stored and normalized."""
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy=eviction).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + offsets, mask=mask, other=0.0, eviction_policy=eviction).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _inverse_rms(squares, columns, eps, PRECISE: tl.constexpr, NORMAL: tl.constexpr):
    """1 / sqrt(mean + eps) of every row.  squares [R, C] -> [R, 1]

    PRECISE: round every step correctly, which shows only in fp32 results and takes longer than the GPU's instruction.
    NORMAL: eps is not a denormal number.
    """
    # Computed while the rows are being loaded.
    inverse = 1.0 / tl.cast(columns, tl.float32)
    row_sum = tl.sum(squares, 1)
    if PRECISE:
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(row_sum, tl.cast(columns, tl.float32)) + eps))
    else:
        # tl.rsqrt flushes denormals (ftz), so a small sum would count as zero. Without ftz rsqrt takes longer.
        name: tl.constexpr = "rsqrt.approx.ftz.f32" if NORMAL else "rsqrt.approx.f32"
        rstd = tl.inline_asm_elementwise(
            name + " $0, $1;", "=f,f", [row_sum * inverse + eps], tl.float32, is_pure=True, pack=1
        )
    return rstd[:, None]


@triton.jit
def _below(index, end, EXACT: tl.constexpr):
    """index < end. EXACT: true everywhere, as a constant that the compiler sees."""
    if EXACT:
        return tl.full(index.shape, 1, tl.int1)
    return index < end


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, rstd_ptr, rows, columns, eps,
    RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, PERSISTENT: tl.constexpr, EXACT: tl.constexpr,
    PRECISE: tl.constexpr, NORMAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    lane = tl.arange(0, COLUMNS)[None, :]
    # One 64-bit offset per program; offsets within a tile fit in 32 bits.
    start = tl.program_id(0).to(tl.int64) * (ROWS * columns)
    x_ptr += start
    y_ptr += start
    if RESIDUAL:
        residual_ptr += start
        total_ptr += start
    in_tile = tl.arange(0, ROWS)[:, None] * columns
    row_mask = _below(row, rows, EXACT)
    if PERSISTENT:
        column_mask = _below(lane, columns, EXACT)
        mask = row_mask & column_mask
        offsets = in_tile + lane
        total = _load_total(x_ptr, residual_ptr, offsets, mask, "", RESIDUAL)
        if WEIGHT:
            # Loaded while the row is being summed.
            weight = tl.load(weight_ptr + lane, mask=column_mask, other=0.0, eviction_policy="evict_last")
        rstd = _inverse_rms(total * total, columns, eps, PRECISE, NORMAL)
        y = total * rstd
        if WEIGHT:
            y *= weight.to(tl.float32)
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
        if RESIDUAL:
            tl.store(total_ptr + offsets, total.to(total_ptr.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, columns, COLUMNS):
            column = first + lane
            mask = row_mask & _below(column, columns, EXACT)
            total = _load_total(x_ptr, residual_ptr, in_tile + column, mask, "evict_last", RESIDUAL)
            squares += total * total
        rstd = _inverse_rms(squares, columns, eps, PRECISE, NORMAL)
        for first in range(0, columns, COLUMNS):
            column = first + lane
            column_mask = _below(column, columns, EXACT)
            mask = row_mask & column_mask
            total = _load_total(x_ptr, residual_ptr, in_tile + column, mask, "evict_first", RESIDUAL)
            y = total * rstd
            if WEIGHT:
                y *= tl.load(weight_ptr + column, mask=column_mask, other=0.0).to(tl.float32)
            tl.store(y_ptr + in_tile + column, y.to(y_ptr.dtype.element_ty), mask=mask)
            if RESIDUAL:
                tl.store(total_ptr + in_tile + column, total.to(total_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row_mask)


def rms_norm_by_plan(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    plan: Plan | None = None,
) -> tuple[list[torch.Tensor], Launch | None]:
    """The op's results (y, rstd and, with a residual, total) and the launch that fills them.

    Without ``plan`` the shape's own plan is chosen.
    """
    rows, columns = x.shape
    results = [torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)]
    total = None
    if residual is not None:
        total = torch.empty_like(x)
        results.append(total)
    # A symbolic size has no plan, and comparing it would fix its value. Nothing is launched while tracing anyway.
    if isinstance(rows, torch.SymInt) or isinstance(columns, torch.SymInt) or x.numel() == 0:
        return results, None
    plan = plan or choose_forward(rows, columns, x.dtype, x.device).plan
    launch = Launch(
        _rms_norm_kernel,
        (tiles(plan, rows),),
        (x, residual, weight, results[0], total, results[1], rows, columns, eps),
        dict(
            RESIDUAL=residual is not None, WEIGHT=weight is not None, PERSISTENT=plan.persistent,
            EXACT=rows % plan.rows == 0 and columns % plan.columns == 0,
            PRECISE=INTERPRETED or x.dtype == torch.float32, NORMAL=eps >= torch.finfo(torch.float32).tiny,
            ROWS=plan.rows, COLUMNS=plan.columns, num_warps=plan.warps,
        ),
    )  # fmt: skip
    return results, launch


_rms_norm = register_op("rms_norm(Tensor x, Tensor? residual, Tensor? weight, float eps) -> Tensor[]", rms_norm_by_plan)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divide every row by its RMS and multiply by the weight; the arithmetic is fp32, and y is rounded once.

    Args:
        x: bf16, fp16 or fp32 [T, D], D at most 65536.
        weight: bf16, fp16 or fp32 [D], or None for ones.
        eps: added to the mean square.
        residual: bf16, fp16 or fp32 [T, D], added to x first.

    Returns:
        y: [T, D] in the dtype of ``x``.
        rstd: fp32 [T], 1 / sqrt(mean_D(total^2) + eps).
        total: x + residual [T, D], rounded to the dtype of ``x``; ``x`` itself without a residual.

    Raises:
        ValueError: for unsupported shapes, dtypes or devices.
    """
    check_matrix("x", x, DTYPES)
    check_columns(x)
    if residual is not None:
        check_matrix("residual", residual, DTYPES)
        check_same("residual", residual, "x", x)
        residual = residual.contiguous()
    if weight is not None:
        check_vector("weight", weight, x.shape[1], x.device, DTYPES)
        weight = weight.contiguous()
    y, rstd, *total = _rms_norm(x.contiguous(), residual, weight, eps)
    return y, rstd, total[0] if total else x
