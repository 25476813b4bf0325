"""The part of an MXNorm cast that MXFP8 and NVFP4 share: hold rows, estimate their RMS, and cast the normalized rows.

A row is held in registers. A row too long for that is read twice, the second time mostly from the L2 cache.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mxtrain.kernels.blocks import magnitude_bits, rounded
from mxtrain.kernels.cast_results import Storage, as_bytes, empty_cast, flat
from mxtrain.kernels.checks import check_matrix, check_same
from mxtrain.kernels.integers import cdiv
from mxtrain.kernels.launch import Launch
from mxtrain.kernels.mxfp8.arithmetic import rounded_amax
from mxtrain.kernels.norm.row_lengths import MAX_COLUMNS
from mxtrain.kernels.norm.row_tile import row_tile


@triton.jit
def block_offsets(
    row, rows, first_block, blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    FIRST: tl.constexpr = 0, COUNT: tl.constexpr = None,
):  # fmt: skip
    """Locate BLOCKS blocks of each row: block [K], offsets [R, K, B], and masks [R, K] and [R, K, B].

    FIRST, COUNT: take only COUNT elements of each block, from element FIRST on.
    """
    block = first_block + tl.arange(0, BLOCKS)
    element = FIRST + tl.arange(0, BLOCK if COUNT is None else COUNT)
    offsets = (row * (blocks * BLOCK))[:, None, None] + (block * BLOCK)[None, :, None] + element[None, None, :]
    block_mask = (row < rows)[:, None] & (block < blocks)[None, :]
    return block, offsets, block_mask, block_mask[:, :, None]


@triton.jit
def load_terms(x_ptr, residual_ptr, offsets, mask, RESIDUAL: tl.constexpr):
    """Load (x,), or (x, residual), as they are stored."""
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    if RESIDUAL:
        return x, tl.load(residual_ptr + offsets, mask=mask, other=0.0)
    else:
        return (x,)


@triton.jit
def total_of(terms, total_ptr, offsets, mask, RESIDUAL: tl.constexpr, STORE: tl.constexpr):
    """x, or x + residual rounded to the dtype of x, as fp32.  terms: from ``load_terms``.  STORE: store that sum."""
    x = terms[0].to(tl.float32)
    if RESIDUAL:
        x += terms[1].to(tl.float32)
        total = rounded(x, terms[0].dtype)
        if STORE:
            tl.store(total_ptr + offsets, total, mask=mask)
        x = total.to(tl.float32)
    return x


@triton.jit
def block_sums(x, amax, P: tl.constexpr, ESTIMATOR: tl.constexpr, RCEIL: tl.constexpr, EIGHTS: tl.constexpr):
    """Sum of x^2 ("exact"), or the maximum to the power P, of each block in fp64.  x [R, K, B], amax [R, K] -> [R, K]

    A row has one term per block, so fp64 costs nothing, and rho does not depend on the order of their sum.
    EIGHTS: x is a tuple of that many tuples of eight tensors [R, K], and their squares are added in that order.
    """
    if ESTIMATOR == "exact":
        # Squares of large and small numbers leave the range of fp32. A power of two brings the block's maximum near 1.
        exponent = tl.minimum(tl.maximum(magnitude_bits(amax) >> 23, 1), 253)
        down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        up = (exponent << 23).to(tl.float32, bitcast=True).to(tl.float64)
        if EIGHTS:
            squares = tl.zeros(amax.shape, tl.float32)
            for i in tl.static_range(EIGHTS):
                eight = tl.zeros(amax.shape, tl.float32)
                for j in tl.static_range(8):
                    scaled = x[i][j] * down
                    eight += scaled * scaled
                squares += eight
        else:
            scaled = x * down[:, :, None]
            squares = tl.sum(scaled * scaled, 2)
        terms = squares.to(tl.float64) * (up * up)
    else:
        if ESTIMATOR == "post_round":
            amax = rounded_amax(amax, RCEIL)
        terms = amax.to(tl.float64)
        if P == 2:
            terms *= terms
    return terms


@triton.jit
def inverse_rms(row_sum, eps, FACTOR: tl.constexpr, P: tl.constexpr, ESTIMATOR: tl.constexpr):
    """rho = 1 / sqrt(r^2 + eps) in fp32, from the sum over a row. FACTOR: see ``_mean_factor``"""
    mean_square = row_sum * FACTOR
    if P == 1 and ESTIMATOR != "exact":
        mean_square *= mean_square
    return (1.0 / tl.sqrt(mean_square + eps)).to(tl.float32)


@triton.jit
def normalize_and_cast(
    load: tl.constexpr, blocks_of: tl.constexpr, store_cast: tl.constexpr,
    x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps, tensor_scale,
    FACTOR: tl.constexpr, P: tl.constexpr, ESTIMATOR: tl.constexpr, RCEIL: tl.constexpr, FORM: tl.constexpr,
    RESIDUAL: tl.constexpr, HARDWARE: tl.constexpr, EIGHTS: tl.constexpr, PERSISTENT: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Body of both kernels: rho of ROWS rows, and the cast of x * rho. See ``mxfp8.norm_cast`` for the three functions.

    A tensor in a kernel has a power of two of elements, so a row of 24 blocks is held as three PARTS of BLOCKS = 8.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    sums = tl.zeros((ROWS, BLOCKS), tl.float64)
    if PERSISTENT:
        # All loads come before the first store, across which the compiler moves no load. With a residual, NVFP4 codes
        # take 136 instead of 149 us at 32768 x 2048.
        loaded = ()
        for i in tl.static_range(PARTS):
            loaded = loaded + (load(x_ptr, residual_ptr, row, rows, i * BLOCKS, blocks, FORM, RESIDUAL, BLOCKS),)
        parts = ()
        for i in tl.static_range(PARTS):
            x, amax = blocks_of(loaded[i], total_ptr, row, rows, i * BLOCKS, blocks, FORM, RESIDUAL, True, BLOCKS)
            sums += block_sums(x, amax, P, ESTIMATOR, RCEIL, EIGHTS)
            parts = parts + ((x, amax),)
        rho = inverse_rms(tl.sum(sums, 1), eps, FACTOR, P, ESTIMATOR)
        for i in tl.static_range(PARTS):
            x, amax = parts[i]
            store_cast(
                x, amax, rho, tensor_scale, row, rows, i * BLOCKS, blocks, data_ptr, scales_ptr,
                FORM, RCEIL, HARDWARE, BLOCKS,
            )  # fmt: skip
    else:
        for first in range(0, blocks, BLOCKS):
            terms = load(x_ptr, residual_ptr, row, rows, first, blocks, FORM, RESIDUAL, BLOCKS)
            x, amax = blocks_of(terms, total_ptr, row, rows, first, blocks, FORM, RESIDUAL, False, BLOCKS)
            sums += block_sums(x, amax, P, ESTIMATOR, RCEIL, EIGHTS)
        rho = inverse_rms(tl.sum(sums, 1), eps, FACTOR, P, ESTIMATOR)
        for first in range(0, blocks, BLOCKS):
            terms = load(x_ptr, residual_ptr, row, rows, first, blocks, FORM, RESIDUAL, BLOCKS)
            x, amax = blocks_of(terms, total_ptr, row, rows, first, blocks, FORM, RESIDUAL, True, BLOCKS)
            store_cast(
                x, amax, rho, tensor_scale, row, rows, first, blocks, data_ptr, scales_ptr,
                FORM, RCEIL, HARDWARE, BLOCKS,
            )  # fmt: skip
    tl.store(rho_ptr + row, rho, mask=row < rows)


def _mean_factor(columns: int, estimator: str, p: int, constant: float, block: int) -> float:
    """Return the factor that turns the sum over a row into r^2, or into r for the p-mean with p = 1."""
    if estimator == "exact":
        return 1.0 / columns
    return 1.0 / (columns // block * constant**p)


def launch_norm_cast(
    kernel: Callable,
    storage: Storage,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    p: int,
    estimator: str,
    eps: float,
    constant: float,
    form: str,
    *scalars: float,
    **constants,
) -> tuple[list[torch.Tensor], Launch | None]:
    """Allocate the results of an MXNorm cast and return them with the launch of ``kernel`` that fills them.

    Args:
        kernel: calls ``normalize_and_cast``.
        scalars: the kernel's arguments behind eps.
        constants: compile-time constants that only this kernel has.
    """
    rows, columns = x.shape
    data, scales = empty_cast(storage, rows, columns, form, x.device)
    rho = torch.empty(rows, dtype=torch.float32, device=x.device)
    total = None if residual is None else torch.empty_like(x)
    results = flat(data, scales, rho, total)
    if x.numel() == 0:
        return results, None
    block, tile = storage.block_size, row_tile(columns, form, estimator)
    launch = Launch(
        kernel,
        (cdiv(rows, tile.rows),),
        (
            x, residual, total, as_bytes(data), as_bytes(scales), rho, rows, columns // block, eps, *scalars,
        ),
        dict(
            FACTOR=_mean_factor(columns, estimator, p, constant, block), P=p, ESTIMATOR=estimator, FORM=form,
            RESIDUAL=residual is not None, PERSISTENT=tile.persistent, ROWS=tile.rows, BLOCKS=tile.columns // block,
            PARTS=tile.parts, num_warps=tile.warps, **constants,
        ),
    )  # fmt: skip
    return results, launch


def contiguous_rows(
    x: torch.Tensor, residual: torch.Tensor | None, block: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return x and the residual contiguous; ValueError unless kernels take their shape, dtype and device."""
    check_matrix("x", x)
    if not 0 < x.shape[1] <= MAX_COLUMNS or x.shape[1] % block:
        raise ValueError(f"x {tuple(x.shape)}: expected rows of a multiple of {block} elements, {MAX_COLUMNS} at most")
    if residual is None:
        return x.contiguous(), None
    check_matrix("residual", residual)
    check_same("residual", residual, "x", x)
    return x.contiguous(), residual.contiguous()


class MXNormCast(NamedTuple):
    """Result of ``mxnorm_cast`` and ``nvfp4_norm``.

    Attributes:
        data: codes, or the image.
        scales: the scales of the codes. None for an image.
        rho: the inverse RMS of every row, fp32.
        total: x + residual in the dtype of x. None without a residual.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    rho: torch.Tensor
    total: torch.Tensor | None

    @classmethod
    def of(cls, results: list[torch.Tensor], form: str, has_residual: bool) -> "MXNormCast":
        """Name the tensors that an op returned."""
        data, *scales = results[: 1 if form == "image" else 2]
        rho = results[1 + len(scales)]
        return cls(data, *(scales or [None]), rho, results[-1] if has_residual else None)
