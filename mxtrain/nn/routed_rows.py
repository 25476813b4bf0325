"""Rows of an MXNorm's result for experts, as expert parallelism sends them: codes and scales, joined as bytes.

A row of D 8-bit elements in blocks of 32 is D + D / 32 bytes, where bf16 values are 2 D. Bytes also pass FSDP, which
casts floating inputs of experts, float8 among them.
"""

from typing import NamedTuple

import torch

from mxtrain.formats.format import Format, format_named
from mxtrain.formats.matrices import Codes
from mxtrain.launch.functions import once_differentiable, untraced


def pack(codes: Codes) -> torch.Tensor:
    """8-bit codes [R, D] and scales [R, D / block] -> uint8 [R, D + D / block]."""
    return torch.cat([codes.data.view(torch.uint8), codes.scales.view(torch.uint8)], 1)


def unpack(packed: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [R, D + D / block] -> values [R, D] in ``dtype``. Rows of zero bytes are zeros."""
    data, scales = packed.tensor_split([packed.shape[1] // (fmt.block_size + 1) * fmt.block_size], 1)
    return fmt.ops.dequantize(Codes(data.view(getattr(torch, fmt.element)), scales.view(torch.float8_e8m0fnu)), dtype)


@untraced
class _Values(torch.autograd.Function):
    """h [R, D] and packed rows -> their values [R, D] in the dtype of h, with h's gradient."""

    @staticmethod
    def forward(ctx, h: torch.Tensor, packed: torch.Tensor, format: str):
        ctx.set_materialize_grads(False)
        return unpack(packed, format_named(format), h.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dx: torch.Tensor):
        return dx, None, None


class RoutedRows(NamedTuple):
    """Rows for experts. A tuple, because FSDP's hooks find tensors in tuples.

    Attributes:
        h: stands for the rows' values [T, D], with the same shape and dtype but without data; takes their gradient.
        packed: uint8 [T, D + D / block] (``pack``).
        format: name of their format.
        index: int64 [R]: the token of every row to be sent. None for rows that are in the order of experts.
    """

    h: torch.Tensor
    packed: torch.Tensor
    format: str
    index: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """The rows [T, D] in the dtype of h."""
        return _Values.apply(self.h, self.packed, self.format)
