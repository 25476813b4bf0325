"""Rows of an MXNorm's result for experts, as expert parallelism sends them: MXFP8 codes and scales, joined as bytes.

A row of D elements is D + D / 32 bytes, where bf16 values are 2 D. Bytes also pass FSDP, which casts floating inputs
of experts, float8 among them.
"""

from typing import NamedTuple

import torch

from mxtrain.launch.custom_op import untraced
from mxtrain.launch.once_differentiable import once_differentiable
from mxtrain.ops.gemm import Codes
from mxtrain.recipes.formats import MXFP8
from mxtrain.reference.casts import dequantize


def pack(codes: Codes) -> torch.Tensor:
    """MXFP8 codes [R, D] and scales [R, D / 32] -> uint8 [R, D + D / 32]."""
    return torch.cat([codes.data.view(torch.uint8), codes.scales.view(torch.uint8)], 1)


def unpack(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [R, D + D / 32] -> values [R, D] in ``dtype``. Rows of zero bytes are zeros."""
    codes, scales = packed.tensor_split([packed.shape[1] // (MXFP8.block_size + 1) * MXFP8.block_size], 1)
    return dequantize(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu), MXFP8, dtype)


@untraced
class _Values(torch.autograd.Function):
    """h [R, D] and packed rows -> their values [R, D] in the dtype of h, with h's gradient."""

    @staticmethod
    def forward(ctx, h: torch.Tensor, packed: torch.Tensor):
        ctx.set_materialize_grads(False)
        return unpack(packed, h.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dx: torch.Tensor):
        return dx, None


class RoutedRows(NamedTuple):
    """Rows for experts. A tuple, because FSDP's hooks find tensors in tuples.

    Attributes:
        h: stands for the rows' values [T, D], with the same shape and dtype but without data; takes their gradient.
        packed: uint8 [T, D + D / 32] (``pack``).
        index: int64 [R]: the token of every row to be sent. None for rows that are in the order of experts.
    """

    h: torch.Tensor
    packed: torch.Tensor
    index: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """The rows [T, D] in the dtype of h."""
        return _Values.apply(self.h, self.packed)
