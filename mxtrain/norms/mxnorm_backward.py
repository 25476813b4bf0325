"""The backward of MXNorm: the norm's straight-through gradient, and the gradients of a weight with a gain folded in.

With xhat = x * rho and G = dL/d(W diag(gamma)):

    dx = rho * (g - xhat * mean_D(g * xhat))      dW = G diag(gamma)      dgamma_j = sum_n W_nj G_nj

Bytes: each kernel reads two matrices and writes one, in their dtypes; the norm's also reads 4 per row for rho. A row
too long for registers is read twice, the second time mostly from the L2 cache.
"""

import torch
import triton
import triton.language as tl

from mxtrain.launch.launch import MAX_PERSISTENT_COLUMNS, Launch, cdiv, contiguous, next_power_of_2, register_op

# Rows and columns that a program of the fold holds at once, and its warps.
FOLD_ROWS, FOLD_COLUMNS, FOLD_WARPS = 16, 128, 2


@triton.jit
def _norm_backward_kernel(
    g_ptr, x_ptr, rho_ptr, dx_ptr, rows, columns,
    PERSISTENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    rho = tl.load(rho_ptr + row, mask=row < rows, other=0.0)[:, None]
    start = (row * columns)[:, None]
    if PERSISTENT:
        column = tl.arange(0, COLUMNS)[None, :]
        mask = (row < rows)[:, None] & (column < columns)
        g = tl.load(g_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
        xhat = tl.load(x_ptr + start + column, mask=mask, other=0.0).to(tl.float32) * rho
        projection = tl.sum(g * xhat, 1)[:, None] / columns
        dx = (g - xhat * projection) * rho
        tl.store(dx_ptr + start + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    else:
        products = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)[None, :]
            mask = (row < rows)[:, None] & (column < columns)
            g = tl.load(g_ptr + start + column, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            x = tl.load(x_ptr + start + column, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            products += g * (x * rho)
        projection = tl.sum(products, 1)[:, None] / columns
        for first in range(0, columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)[None, :]
            mask = (row < rows)[:, None] & (column < columns)
            g = tl.load(g_ptr + start + column, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            x = tl.load(x_ptr + start + column, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dx = (g - x * rho * projection) * rho
            tl.store(dx_ptr + start + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _backward_tile(columns: int) -> tuple[bool, int, int, int]:
    """Return (persistent, rows per program, columns held at once, warps), the fastest measured for this row length."""
    if columns > MAX_PERSISTENT_COLUMNS:
        return False, 1, 8192, 16
    width = next_power_of_2(columns)
    rows = max(1, 2048 // width)
    return True, rows, width, max(2, min(32, rows * width // 512))


def _norm_launch(g: torch.Tensor, x: torch.Tensor, rho: torch.Tensor) -> tuple[torch.Tensor, Launch | None]:
    dx = torch.empty_like(x)
    if x.numel() == 0:
        return dx, None
    rows, columns = x.shape
    persistent, rows_at_once, columns_at_once, warps = _backward_tile(columns)
    launch = Launch(
        _norm_backward_kernel,
        (cdiv(rows, rows_at_once),),
        (g, x, rho, dx, rows, columns),
        dict(PERSISTENT=persistent, ROWS=rows_at_once, COLUMNS=columns_at_once, num_warps=warps),
    )
    return dx, launch


_norm_backward = register_op("norm_backward(Tensor g, Tensor x, Tensor rho) -> Tensor", _norm_launch)


def norm_backward(g: torch.Tensor, x: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    """Return dx [T, D] as ``mxtrain.formats.mxnorm.norm_backward``; g and x bf16 or fp32 [T, D], rho fp32 [T]."""
    return _norm_backward(*contiguous(g, x, rho))


@triton.jit
def _fold_backward_kernel(
    g_ptr, weight_ptr, gain_ptr, d_weight_ptr, parts_ptr, rows, columns, share,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Walk down a strip of columns over a share of the rows, and keep the strip's part of dgamma in registers.

    The parts are added afterwards, always in the same order.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    d_gain = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = tl.program_id(0) * share
    for start in range(first, tl.minimum(first + share, rows), ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        mask = (row < rows)[:, None] & inside[None, :]
        offsets = (row * columns)[:, None] + column[None, :]
        g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(d_weight_ptr + offsets, (g * gain).to(d_weight_ptr.dtype.element_ty), mask=mask)
        d_gain += g * weight
    tl.store(parts_ptr + tl.program_id(0) * columns + column, tl.sum(d_gain, 0), mask=inside)


def _rows_per_program(rows: int, columns: int) -> int:
    """Return the rows that one program walks down: few enough for 1024 programs, which fill a GPU several times."""
    return min(128, next_power_of_2(max(FOLD_ROWS, rows * cdiv(columns, FOLD_COLUMNS) // 1024)))


def _fold_launch(g, weight, gain) -> tuple[tuple[torch.Tensor, torch.Tensor], Launch | None]:
    rows, columns = weight.shape
    d_weight = torch.empty_like(weight)
    share = _rows_per_program(rows, columns)
    parts = torch.empty(cdiv(rows, share), columns, dtype=torch.float32, device=weight.device)
    if weight.numel() == 0:
        return (d_weight, parts), None
    launch = Launch(
        _fold_backward_kernel,
        (parts.shape[0], cdiv(columns, FOLD_COLUMNS)),
        (g, weight, gain, d_weight, parts, rows, columns, share),
        dict(ROWS=FOLD_ROWS, COLUMNS=FOLD_COLUMNS, num_warps=FOLD_WARPS),
    )
    return (d_weight, parts), launch


_fold_backward = register_op("fold_backward(Tensor g, Tensor weight, Tensor gain) -> (Tensor, Tensor)", _fold_launch)


def fold_backward(g: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dW, dgain) as ``mxtrain.formats.mxnorm.fold_backward``; bf16 or fp32 g and weight [N, D], gain [D]."""
    d_weight, parts = _fold_backward(*contiguous(g, weight, gain))
    return d_weight, parts.sum(0).to(gain.dtype)
