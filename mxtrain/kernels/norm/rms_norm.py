"""RMSNorm of every row, with an optional residual add: one read of x, one write of y.

The kernel also computes LayerNorm (``layer_norm.py``): CENTERED subtracts the mean of the row first, BIAS adds a bias.

Rows too long for registers are read twice, the second time mostly from the L2 cache. The row length is a compile-time
constant, so that the compiler unrolls the loops over such a row and its loads need not wait for each other: 70 instead
of 76 us for LayerNorm of 4096 rows of 16384 elements (H200).

Bytes per row: D elements of x read and D of y written, and 4 bytes of rstd. A residual adds D elements read and D
elements of the sum written. LayerNorm adds 4 bytes of the mean.
"""

import torch
import triton
import triton.language as tl

from mxtrain.kernels.device import INTERPRETED
from mxtrain.kernels.launch import Launch, register_op
from mxtrain.kernels.norm.operands import check_operands, contiguous
from mxtrain.kernels.norm.rms_norm_plan import FORWARD, LAYER_FORWARD, Plan, choose_forward, tiles


@triton.jit
def _load_total(x_ptr, residual_ptr, offsets, mask, eviction: tl.constexpr, RESIDUAL: tl.constexpr):
    """x in fp32; with a residual x + residual, rounded to the dtype of x as it is stored and normalized."""
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy=eviction).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + offsets, mask=mask, other=0.0, eviction_policy=eviction).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _row_mean(x, columns, PRECISE: tl.constexpr):
    """The mean of every row.  x [R, C], zero behind the row's end -> [R].  PRECISE: see ``_inverse_root``"""
    # Computed while the rows are being loaded.
    inverse = 1.0 / tl.cast(columns, tl.float32)
    row_sum = tl.sum(x, 1)
    if PRECISE:
        return tl.div_rn(row_sum, tl.cast(columns, tl.float32))
    return row_sum * inverse


@triton.jit
def _inverse_root(mean_square, eps, PRECISE: tl.constexpr, NORMAL: tl.constexpr):
    """1 / sqrt(mean_square + eps) of every row.  [R] -> [R, 1]

    PRECISE: round every step correctly, which shows only in fp32 results and takes longer than the GPU's instruction.
    NORMAL: eps is not a denormal number.
    """
    if PRECISE:
        rstd = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    else:
        # tl.rsqrt flushes denormals (ftz), so a small sum would count as zero. Without ftz rsqrt takes longer.
        name: tl.constexpr = "rsqrt.approx.ftz.f32" if NORMAL else "rsqrt.approx.f32"
        rstd = tl.inline_asm_elementwise(
            name + " $0, $1;", "=f,f", [mean_square + eps], tl.float32, is_pure=True, pack=1
        )
    return rstd[:, None]


@triton.jit
def _mean_and_variance(origin, distances, squares, columns, PRECISE: tl.constexpr):
    """Mean [R, 1] and variance [R] of every row, from sums of distances from an origin near the mean.

    The sums lose few digits even where the mean is large: the mean of any C elements of a row is within sqrt(D / C)
    standard deviations of the mean of the row. A rounding error of the origin cancels, which matters in rows of equal
    elements.

    origin: [R, 1]. distances, squares: parts of the sums of x - origin and (x - origin)^2, [R, C].
    """
    offset = _row_mean(distances, columns, PRECISE)
    variance = _row_mean(squares, columns, PRECISE)
    # Rounding can make the difference negative. A sum that overflows stays infinite, and NaN stays NaN.
    variance = tl.where(variance < float("inf"), tl.maximum(variance - offset * offset, 0.0), variance)
    return origin + offset[:, None], variance


@triton.jit
def _below(index, end, EXACT: tl.constexpr):
    """index < end. EXACT: true everywhere, as a constant that the compiler sees."""
    if EXACT:
        return tl.full(index.shape, 1, tl.int1)
    return index < end


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, mean_ptr, rstd_ptr, rows, eps, columns: tl.constexpr,
    CENTERED: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    PERSISTENT: tl.constexpr, EXACT: tl.constexpr, PRECISE: tl.constexpr, NORMAL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
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
        if BIAS:
            bias = tl.load(bias_ptr + lane, mask=column_mask, other=0.0, eviction_policy="evict_last")
        if CENTERED:
            origin = _row_mean(total, columns, False)[:, None]
            distance = tl.where(column_mask, total - origin, 0.0)
            mean, variance = _mean_and_variance(origin, distance, distance * distance, columns, PRECISE)
            rstd = _inverse_root(variance, eps, PRECISE, NORMAL)
            y = (total - mean) * rstd
        else:
            rstd = _inverse_root(_row_mean(total * total, columns, PRECISE), eps, PRECISE, NORMAL)
            y = total * rstd
        if WEIGHT:
            y *= weight.to(tl.float32)
        if BIAS:
            y += bias.to(tl.float32)
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
        if RESIDUAL:
            tl.store(total_ptr + offsets, total.to(total_ptr.dtype.element_ty), mask=mask)
    else:
        if CENTERED:
            # The mean of the first chunk is the origin.
            column_mask = _below(lane, columns, EXACT)
            mask = row_mask & column_mask
            total = _load_total(x_ptr, residual_ptr, in_tile + lane, mask, "evict_last", RESIDUAL)
            origin = _row_mean(total, tl.minimum(columns, COLUMNS), False)[:, None]
            distances = tl.where(column_mask, total - origin, 0.0)
            squares = distances * distances
        else:
            squares = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(COLUMNS if CENTERED else 0, columns, COLUMNS):
            column = first + lane
            column_mask = _below(column, columns, EXACT)
            mask = row_mask & column_mask
            total = _load_total(x_ptr, residual_ptr, in_tile + column, mask, "evict_last", RESIDUAL)
            if CENTERED:
                distance = tl.where(column_mask, total - origin, 0.0)
                distances += distance
                squares += distance * distance
            else:
                squares += total * total
        if CENTERED:
            mean, variance = _mean_and_variance(origin, distances, squares, columns, PRECISE)
            rstd = _inverse_root(variance, eps, PRECISE, NORMAL)
        else:
            rstd = _inverse_root(_row_mean(squares, columns, PRECISE), eps, PRECISE, NORMAL)
        for first in range(0, columns, COLUMNS):
            column = first + lane
            column_mask = _below(column, columns, EXACT)
            mask = row_mask & column_mask
            total = _load_total(x_ptr, residual_ptr, in_tile + column, mask, "evict_first", RESIDUAL)
            if CENTERED:
                y = (total - mean) * rstd
            else:
                y = total * rstd
            if WEIGHT:
                y *= tl.load(weight_ptr + column, mask=column_mask, other=0.0).to(tl.float32)
            if BIAS:
                y += tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)
            tl.store(y_ptr + in_tile + column, y.to(y_ptr.dtype.element_ty), mask=mask)
            if RESIDUAL:
                tl.store(total_ptr + in_tile + column, total.to(total_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row_mask)
    if CENTERED:
        tl.store(mean_ptr + row, mean, mask=row_mask)


def norm_by_plan(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
    plan: Plan | None = None,
) -> tuple[list[torch.Tensor], Launch | None]:
    """Return the results of an op and the launch that fills them.

    The results are y and rstd, then the mean if ``centered`` (LayerNorm), then the total if there is a residual.
    Without ``plan`` the shape's own plan is chosen.
    """
    rows, columns = x.shape
    numbers = [torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2 if centered else 1)]
    total = None if residual is None else torch.empty_like(x)
    results = [torch.empty_like(x), *numbers, *([] if total is None else [total])]
    # A symbolic size has no plan, and comparing it would fix its value. Nothing is launched while tracing anyway.
    if isinstance(rows, torch.SymInt) or isinstance(columns, torch.SymInt) or x.numel() == 0:
        return results, None
    plan = plan or choose_forward(rows, columns, x.dtype, x.device, LAYER_FORWARD if centered else FORWARD).plan
    mean = numbers[1] if centered else None
    launch = Launch(
        _norm_kernel,
        (tiles(plan, rows),),
        (x, residual, weight, bias, results[0], total, mean, numbers[0], rows, eps),
        dict(
            columns=columns, CENTERED=centered,
            RESIDUAL=residual is not None, WEIGHT=weight is not None, BIAS=bias is not None,
            PERSISTENT=plan.persistent, EXACT=rows % plan.rows == 0 and columns % plan.columns == 0,
            PRECISE=INTERPRETED or x.dtype == torch.float32, NORMAL=eps >= torch.finfo(torch.float32).tiny,
            ROWS=plan.rows, COLUMNS=plan.columns, num_warps=plan.warps,
        ),
    )  # fmt: skip
    return results, launch


def rms_norm_by_plan(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    plan: Plan | None = None,
) -> tuple[list[torch.Tensor], Launch | None]:
    """The op's results (y, rstd and, with a residual, total) and the launch; see ``norm_by_plan``."""
    return norm_by_plan(x, residual, weight, None, eps, False, plan)


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
    check_operands(x, residual=residual, weight=weight)
    y, rstd, *total = _rms_norm(*map(contiguous, (x, residual, weight)), eps)
    return y, rstd, total[0] if total else x
