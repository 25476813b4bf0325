"""SwiGLU and its gradients, cast to an MX format for the linears of a gated feed-forward, and never stored themselves.

The forward kernel reads gate and up and writes casts of h = silu(gate) * up, the input of w2. The backward kernel reads
dh, gate and up, and writes the casts of dgate and dup, the output gradients of w1 and w3, and on request the cast of h
along its columns, an operand of w2's weight gradient. So h is not kept for the backward.

    s = 1 / (1 + exp(-gate))       silu = gate s
    h = silu up       dup = silu dh       dgate = dh up (s + silu (1 - s))

Everything is computed in fp32 and rounded once, to the dtype of the inputs, before the cast. This is what
``torch.compile`` makes of ``F.silu(gate) * up``. (PyTorch's eager operations also round silu(gate).) SwiGLU is from
Shazeer, *GLU Variants Improve Transformer*, arXiv 2002.05202.

Matrices [T, H] read + written, with images as casts: forward 2 + 1, or 2 + 2 with both casts of h; backward 3 + 5.
Separate kernels move 3 matrices for h, 2 for each cast of h, 5 for dgate and dup, 3 for both casts of dgate or of dup.
"""

import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import as_bytes, empty_casts, flat, is_merged, rounded, tile_start
from mxtrain.formats.mx.arithmetic import STORAGE
from mxtrain.formats.mx.cast import cast_along_columns, cast_along_rows
from mxtrain.formats.mx.merge import merge_along_rows
from mxtrain.launch.launch import Launch, cdiv, converts_fp8, register_op

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(gate):
    """1 / (1 + exp(-gate)), fp32."""
    # tl.exp2 drops denormal results, which tl.exp keeps with three more instructions, and which adding 1 drops anyway.
    return 1.0 / (1.0 + tl.exp2(gate * -_LOG2_E))


@triton.jit
def swiglu(silu, up, DTYPE: tl.constexpr):
    """silu(gate) * up, rounded to DTYPE. With dh in the place of ``up`` the result is dup."""
    return rounded(silu * up, DTYPE).to(tl.float32)


@triton.jit
def swiglu_dgate(silu, s, up, dh, DTYPE: tl.constexpr):
    """The gradient of gate with s = sigmoid(gate) and silu = gate * s, rounded to DTYPE."""
    return rounded(dh * up * (s + silu * (1.0 - s)), DTYPE).to(tl.float32)


@triton.jit
def _load(ptr, stride, row, across, mask):
    return tl.load(ptr + (row * stride)[:, None] + across[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_casts(
    x, first_row, column, mask, rows, columns, left, width,
    row_data_ptr, row_scales_ptr, column_data_ptr, column_scales_ptr,
    ALONG_ROWS: tl.constexpr, ALONG_COLUMNS: tl.constexpr,
    FORM: tl.constexpr, ROUNDING: tl.constexpr, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the casts of a tile of a matrix [rows, columns], which begins in column ``left`` of [rows, width].

    x as for ``cast_along_rows``.
    """
    column += left
    row = first_row + tl.arange(0, ROWS)
    offsets = (row * width)[:, None] + (column + tl.arange(0, COLUMNS))[None, :]
    if is_merged(FORM):
        merge_along_rows(
            x, row, column, mask, first_row, rows, left + columns, rows, width, row_data_ptr, row_scales_ptr,
            FORM, ROUNDING, HARDWARE, COLUMNS, 1, False,
        )  # fmt: skip
    elif ALONG_ROWS:
        cast_along_rows(
            x, first_row, column, offsets, mask, rows, left + columns, width, row_data_ptr, row_scales_ptr,
            FORM, ROUNDING, ELEMENT, HARDWARE, ROWS, COLUMNS,
        )  # fmt: skip
    if ALONG_COLUMNS:
        cast_along_columns(
            x, first_row, column, offsets, mask, rows, left + columns, rows, column_data_ptr, column_scales_ptr,
            FORM, ROUNDING, ELEMENT, HARDWARE, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit
def _swiglu_cast_kernel(
    gate_ptr, up_ptr, row_data_ptr, row_scales_ptr, column_data_ptr, column_scales_ptr,
    rows, columns, gate_stride, up_stride,
    ALONG_ROWS: tl.constexpr, ALONG_COLUMNS: tl.constexpr,
    FORM: tl.constexpr, ROUNDING: tl.constexpr, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first_row, column = tile_start(columns, ROWS, COLUMNS)
    row, across = first_row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (across < columns)[None, :]
    gate = _load(gate_ptr, gate_stride, row, across, mask)
    up = _load(up_ptr, up_stride, row, across, mask)
    DTYPE: tl.constexpr = gate_ptr.dtype.element_ty
    h = swiglu(gate * sigmoid(gate), up, DTYPE)
    _store_casts(
        h, first_row, column, mask, rows, columns, 0, columns,
        row_data_ptr, row_scales_ptr, column_data_ptr, column_scales_ptr,
        ALONG_ROWS, ALONG_COLUMNS, FORM, ROUNDING, ELEMENT, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip


@triton.jit
def _swiglu_backward_cast_kernel(
    dh_ptr, gate_ptr, up_ptr,
    dgate_row_data_ptr, dgate_row_scales_ptr, dgate_column_data_ptr, dgate_column_scales_ptr,
    dup_row_data_ptr, dup_row_scales_ptr, dup_column_data_ptr, dup_column_scales_ptr,
    h_data_ptr, h_scales_ptr, rows, columns, dh_stride, gate_stride, up_stride, dup_left, width,
    ALONG_ROWS: tl.constexpr, ALONG_COLUMNS: tl.constexpr, H_COLUMNS: tl.constexpr, JOINED: tl.constexpr,
    H_ELEMENT: tl.constexpr, FORM: tl.constexpr, ROUNDING: tl.constexpr, ELEMENT: tl.constexpr,
    HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first_row, column = tile_start(columns, ROWS, COLUMNS)
    row, across = first_row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (across < columns)[None, :]
    DTYPE: tl.constexpr = gate_ptr.dtype.element_ty
    # A thread's registers hold silu and one result at a time, so dh and up are loaded again, from the L1 cache.
    gate = _load(gate_ptr, gate_stride, row, across, mask)
    up = _load(up_ptr, up_stride, row, across, mask)
    dh = _load(dh_ptr, dh_stride, row, across, mask)
    s = sigmoid(gate)
    silu = gate * s
    _store_casts(
        swiglu_dgate(silu, s, up, dh, DTYPE), first_row, column, mask, rows, columns, 0, width,
        dgate_row_data_ptr, dgate_row_scales_ptr, dgate_column_data_ptr, dgate_column_scales_ptr,
        ALONG_ROWS, ALONG_COLUMNS, FORM, ROUNDING, ELEMENT, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip
    dh = _load(dh_ptr, dh_stride, row, across, mask)
    if JOINED:
        dup_row_data_ptr, dup_row_scales_ptr = dgate_row_data_ptr, dgate_row_scales_ptr
        dup_column_data_ptr, dup_column_scales_ptr = dgate_column_data_ptr, dgate_column_scales_ptr
    _store_casts(
        swiglu(silu, dh, DTYPE), first_row, column, mask, rows, columns, dup_left, width,
        dup_row_data_ptr, dup_row_scales_ptr, dup_column_data_ptr, dup_column_scales_ptr,
        ALONG_ROWS, ALONG_COLUMNS, FORM, ROUNDING, ELEMENT, HARDWARE, ROWS, COLUMNS,
    )  # fmt: skip
    if H_COLUMNS:
        up = _load(up_ptr, up_stride, row, across, mask)
        _store_casts(
            swiglu(silu, up, DTYPE), first_row, column, mask, rows, columns, 0, columns,
            None, None, h_data_ptr, h_scales_ptr, False, True, FORM, ROUNDING, H_ELEMENT, HARDWARE, ROWS, COLUMNS,
        )  # fmt: skip


def _tile(along_columns: bool, backward: bool, form: str) -> tuple[int, int, int]:
    """Return (rows, columns, warps) per program."""
    if not along_columns:
        return 32, 128, 8
    if form == "image":
        return (32, 64, 2)
    # One warp holds whole columns, so neither their maxima nor transposed codes pass between warps.
    return (32, 64, 1) if backward else (32, 128, 1)


def _launch(kernel, results, tensors, numbers, tile, element, scale_rounding, form, **constants) -> Launch:
    """The launch of ``kernel`` over tiles of the matrix that ``tensors`` begins with."""
    x = tensors[0]
    rows_at_once, columns_at_once, warps = tile
    constants |= dict(
        FORM=form, ROUNDING=scale_rounding, ELEMENT=element, HARDWARE=converts_fp8(x),
        ROWS=rows_at_once, COLUMNS=columns_at_once, num_warps=warps,
    )  # fmt: skip
    grid = (cdiv(x.shape[0], rows_at_once) * cdiv(x.shape[1], columns_at_once),)
    return Launch(kernel, grid, (*tensors, *map(as_bytes, results), *x.shape, *numbers), constants)


def _casts(x: torch.Tensor, width: int, along_rows: bool, along_columns: bool, element: str, form: str) -> tuple:
    return empty_casts(STORAGE[element], x.shape[0], width, along_rows, along_columns, form, x.device)


def _forward(
    gate, up, along_rows: bool, along_columns: bool, element: str, scale_rounding: str, form: str
) -> tuple[list[torch.Tensor], Launch | None]:
    gate, up = _unit_stride(gate), _unit_stride(up)
    results = _casts(gate, gate.shape[1], along_rows, along_columns, element, form)
    if gate.numel() == 0:
        return flat(*results), None
    return flat(*results), _launch(
        _swiglu_cast_kernel, results, (gate, up), (gate.stride(0), up.stride(0)),
        _tile(along_columns, False, form), element, scale_rounding, form,
        ALONG_ROWS=along_rows, ALONG_COLUMNS=along_columns,
    )  # fmt: skip


def _backward(
    dh, gate, up, along_rows: bool, along_columns: bool, h_columns: bool, joined: bool,
    h_element: str, element: str, scale_rounding: str, form: str,
) -> tuple[list[torch.Tensor], Launch | None]:  # fmt: skip
    dh, gate, up = _unit_stride(dh), _unit_stride(gate), _unit_stride(up)
    columns = gate.shape[1]
    left, width = (columns, 2 * columns) if joined else (0, columns)
    dgate = _casts(gate, width, along_rows, along_columns, element, form)
    dup = (None,) * 4 if joined else _casts(gate, width, along_rows, along_columns, element, form)
    h = _casts(gate, columns, False, h_columns, h_element, form)[2:]
    results = flat(*dgate, *dup, *h)
    if gate.numel() == 0:
        return results, None
    return results, _launch(
        _swiglu_backward_cast_kernel, (*dgate, *dup, *h), (dh, gate, up),
        (dh.stride(0), gate.stride(0), up.stride(0), left, width),
        _tile(along_columns or h_columns, True, form), element, scale_rounding, form,
        ALONG_ROWS=along_rows, ALONG_COLUMNS=along_columns, H_COLUMNS=h_columns, JOINED=joined, H_ELEMENT=h_element,
    )  # fmt: skip


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    # Rows may lie at any distance: gate and up may be halves of one matrix.
    return x if x.stride(1) == 1 else x.contiguous()


def is_fused(along_columns: bool, form: str) -> bool:
    """Return whether the kernels write such casts.

    Of merged forms along columns, whose groups have 128 rows, a program cannot hold the casts of three matrices: from
    matrices that are stored in between they took 1.7 ms, in one kernel 4.1 (16384 x 14336, H200).
    """
    return not (along_columns and is_merged(form))


swiglu_cast = register_op(
    "swiglu_cast(Tensor gate, Tensor up, bool along_rows, bool along_columns, str element, str scale_rounding,"
    " str form) -> Tensor[]",
    _forward,
)
"""The casts of h = silu(gate) * up along its rows and along its columns, in this order where they are wanted.

gate, up: bf16 or fp32 [T, H], H a multiple of 32, both of one dtype, with any distance between rows. For merged forms
H is a multiple of 128, and casts are along rows.
"""
swiglu_backward_cast = register_op(
    "swiglu_backward_cast(Tensor dh, Tensor gate, Tensor up, bool along_rows, bool along_columns, bool h_columns,"
    " bool joined, str h_element, str element, str scale_rounding, str form) -> Tensor[]",
    _backward,
)
"""The casts of dgate, then of dup, then of h along its columns if ``h_columns``. dh: like gate.

``joined`` casts [dgate, dup], [T, 2 H], as one matrix instead of two. ``element`` is that of the gradients.
"""
