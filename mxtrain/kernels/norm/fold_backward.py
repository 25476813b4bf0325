"""Backward of folding a gain into a weight: dW = G diag(gamma) and dgamma_j = sum_n W_nj G_nj in one pass.

G = dL/d(W diag(gamma)). Each program walks down a strip of columns over its share of the rows, writes dW on the way and
keeps its part of dgamma in registers. The parts are added afterwards, always in the same order.

Bytes per element: one element each of G and W read and of dW written, in their dtypes.
"""

import torch
import triton
import triton.language as tl

from mxtrain.kernels.checks import check_matrix, check_same, check_vector
from mxtrain.kernels.integers import cdiv, next_power_of_2
from mxtrain.kernels.launch import Launch, register_op
from mxtrain.untraced import untraced

# Rows and columns that a program holds at once, and its warps.
ROWS, COLUMNS, WARPS = 16, 128, 2


@triton.jit
def _fold_backward_kernel(
    g_ptr, weight_ptr, gain_ptr, d_weight_ptr, parts_ptr, rows, columns, share,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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
    return min(128, next_power_of_2(max(ROWS, rows * cdiv(columns, COLUMNS) // 1024)))


def _implementation(
    g: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], Launch | None]:
    rows, columns = weight.shape
    d_weight = torch.empty_like(weight)
    share = _rows_per_program(rows, columns)
    parts = torch.empty(cdiv(rows, share), columns, dtype=torch.float32, device=weight.device)
    if weight.numel() == 0:
        return (d_weight, parts), None
    launch = Launch(
        _fold_backward_kernel,
        (parts.shape[0], cdiv(columns, COLUMNS)),
        (g, weight, gain, d_weight, parts, rows, columns, share),
        dict(ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS),
    )
    return (d_weight, parts), launch


_fold_backward = register_op("fold_backward(Tensor g, Tensor weight, Tensor gain) -> (Tensor, Tensor)", _implementation)


@untraced
def fold_backward(g: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dW, dgain) from the gradient of W diag(gain).

    Args:
        g: bf16 or fp32 [N, D].
        weight: bf16 or fp32 [N, D].
        gain: bf16 or fp32 [D].

    Returns:
        dW [N, D] in the dtype of ``weight`` and dgain [D] in the dtype of ``gain``. The arithmetic is fp32.

    Raises:
        ValueError: for another shape, dtype or device.
    """
    check_matrix("g", g)
    check_matrix("weight", weight)
    check_same("g", g, "weight", weight)
    check_vector("gain", gain, weight.shape[1], weight.device)
    d_weight, parts = _fold_backward(g.contiguous(), weight.contiguous(), gain.contiguous())
    return d_weight, parts.sum(0).to(gain.dtype)
