"""The straight-through norm backward: one read of g and x, one write of dx.

With xhat = x * rho:  dx = rho * (g - xhat * mean_D(g * xhat))

Bytes per row: D elements each of g and x read and of dx written, in their dtypes, and 4 for rho. A row too long for
registers is read twice, the second time mostly from the L2 cache.
"""

import torch
import triton
import triton.language as tl

from mxtrain.kernels.checks import check_matrix, check_same, check_vector
from mxtrain.kernels.integers import cdiv, next_power_of_2
from mxtrain.kernels.launch import Launch, register_op
from mxtrain.kernels.norm.row_lengths import MAX_PERSISTENT_COLUMNS


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


def _implementation(g: torch.Tensor, x: torch.Tensor, rho: torch.Tensor) -> tuple[torch.Tensor, Launch | None]:
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


_norm_backward = register_op("norm_backward(Tensor g, Tensor x, Tensor rho) -> Tensor", _implementation)


def norm_backward(g: torch.Tensor, x: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    """Return dx [T, D] of the straight-through norm backward, in the dtype of x. The arithmetic is fp32.

    Args:
        g: dL/dxhat, bf16 or fp32 [T, D].
        x: the norm's input, bf16 or fp32 [T, D].
        rho: inverse RMS, fp32 [T].

    Raises:
        ValueError: for another shape, dtype or device.
    """
    check_matrix("x", x)
    check_matrix("g", g)
    check_same("g", g, "x", x)
    check_vector("rho", rho, x.shape[0], x.device, (torch.float32,))
    return _norm_backward(g.contiguous(), x.contiguous(), rho.contiguous())
