"""Values of 8-bit codes in tiles of 32 x 32 that share a scale.

Bytes per element: 1 + 1/1024 read, 2 or 4 written.
"""

import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import tile_start
from mxtrain.formats.mx.arithmetic import scale_value
from mxtrain.launch.launch import Launch, cdiv

ROWS, COLUMNS, WARPS = 32, 128, 4


@triton.jit
def _decode_kernel(
    codes_ptr, scales_ptr, values_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    first_row, column = tile_start(columns, ROWS, COLUMNS)
    row, across = first_row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    offsets = (row * columns)[:, None] + across[None, :]
    mask = (row < rows)[:, None] & (across < columns)[None, :]
    values = tl.load(codes_ptr + offsets, mask=mask).to(tl.float32)
    scale = tl.load(scales_ptr + first_row // 32 * (columns // 32) + across // 32, mask=across < columns, other=0)
    code = scale.to(tl.int32)  # 255 stands for NaN
    values *= tl.where(code == 255, float("nan"), scale_value(code))[None, :]
    tl.store(values_ptr + offsets, values.to(values_ptr.dtype.element_ty), mask=mask)


def decode_launch(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> Launch:
    """Return the launch of ``decode_tiles``."""
    rows, columns = codes.shape
    return Launch(
        _decode_kernel,
        (cdiv(rows, ROWS) * cdiv(columns, COLUMNS),),
        (codes, scales, values, rows, columns),
        dict(ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS),
    )


def decode_tiles(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
    """Write the values of codes, float8 [R, C], with scales, uint8 [R / 32, C / 32], to bf16 or fp32 [R, C].

    All are without gaps. This is no op, because FSDP's hooks call it, which are in no graph.
    """
    decode_launch(codes, scales, values).run(codes.device)
