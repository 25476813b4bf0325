"""Casts to and from block-scaled formats, through torchao.

This is the only file that imports torchao's prototype names, which move between releases; tests run it with every
release in the package's range. All scale arithmetic is torchao's own.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import torch

from mxtrain.recipes.formats import BlockFormat

# On import, torchao warns of compiled extensions that do not fit this machine (we use none), and torch warns of how
# torchao registers its enums. Users can do nothing about either.
with (
    patch.object(logging.getLogger("torchao"), "disabled", True),
    patch.object(logging.getLogger("torch.utils._pytree"), "disabled", True),
):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import get_fp_scale, to_mx
    from torchao.prototype.mx_formats.utils import from_blocked as from_blocked
    from torchao.prototype.mx_formats.utils import to_blocked as to_blocked

_TORCHAO_MODE = {"rceil": ScaleCalculationMode.RCEIL, "floor": ScaleCalculationMode.FLOOR}


def joined(parts: Sequence[torch.Tensor], axis: int, experts: int = 1) -> torch.Tensor:
    """Join matrices along ``axis``; along 0, where each is so many stacked experts, expert by expert."""
    if axis or experts == 1:
        return torch.cat(tuple(parts), axis)
    return torch.cat([part.unflatten(0, (experts, -1)) for part in parts], 1).flatten(0, 1)


def rows_in_order(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """x [R, C], source int64 [S] -> [S, C]: row source[i] of x at place i, zeros where source[i] is negative."""
    with_zeros = torch.cat((x, x.new_zeros(1, x.shape[1])))
    return with_zeros[torch.where(source < 0, x.shape[0], source)]


def at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """Return x in fp32, or unchanged if it is fp64."""
    return converted(x, torch.promote_types(x.dtype, torch.float32))


def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x in ``dtype``; x itself if it already has that dtype.

    Not ``Tensor.to``: in torch 2.11, if the forward of a compiled autograd function calls a ``to`` that does nothing
    on a result, the result loses its gradient.
    """
    return x if x.dtype == dtype else x.to(dtype)


def split_blocks(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """[..., D] -> [..., D / block_size, block_size]."""
    # Not Tensor.unflatten: under torch.set_default_device, Dynamo cannot trace it.
    return x.reshape(*x.shape[:-1], x.shape[-1] // block_size, block_size)


def cast(x: torch.Tensor, fmt: BlockFormat, scale_rounding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast ``x`` in blocks along its last dimension.

    A block with a NaN gets a NaN scale. A block with an infinity decodes to infinity or NaN. (Both are torchao's
    rules.) So a non-finite input never turns into a finite number.

    Args:
        x: bf16 or fp32, [..., D] with D a multiple of ``fmt.block_size``.

    Returns:
        codes: float8_e4m3fn, shape of ``x``.
        scales: float8_e8m0fnu, [..., D / block_size].
    """
    if x.numel() == 0:
        codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scales = torch.empty(*x.shape[:-1], x.shape[-1] // fmt.block_size, device=x.device, dtype=torch.float8_e8m0fnu)
        return codes, scales
    scales, codes = to_mx(
        x.contiguous(), torch.float8_e4m3fn, fmt.block_size, scaling_mode=_TORCHAO_MODE[scale_rounding]
    )
    return codes, scales


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, fmt: BlockFormat, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the values of ``codes`` [..., D] with ``scales`` [..., D / block_size], shape of ``codes``.

    An E4M3 code times a power of two is exact in bf16 and fp32, except below their smallest normal numbers.
    """
    blocks = split_blocks(_values(codes), fmt.block_size)
    return (blocks * get_fp_scale(scales).unsqueeze(-1)).flatten(-2).to(dtype)


def _values(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of E4M3 codes without their scales, fp32."""
    if codes.device.type != "cpu":
        return codes.to(torch.float32)
    # On a CPU a table takes 0.5 ms for 1024 x 768 codes, PyTorch's conversion 2.4, half of the whole cast.
    table = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).to(torch.float32)
    return table.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


def image(x: torch.Tensor, fmt: BlockFormat, scale_rounding: str, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Round ``x`` [R, C] to the format: cast in blocks along ``dim`` (0 or 1), then dequantize to ``dtype``.

    Along dimension 0 the last block may be incomplete. Zeros pad it, which changes neither its scale nor its codes.
    """
    if dim == 1:
        return dequantize(*cast(x, fmt, scale_rounding), fmt, dtype)
    rows, columns = x.shape
    padding = -rows % fmt.block_size
    if padding:
        x = torch.nn.functional.pad(x, (0, 0, 0, padding))
    # [R / B, B, C] -> [R / B, C, B]: moves blocks to the last dimension without transposing the whole matrix.
    blocks = x.reshape(-1, fmt.block_size, columns).transpose(1, 2)
    values = dequantize(*cast(blocks, fmt, scale_rounding), fmt, dtype)
    return values.transpose(1, 2).reshape(rows + padding, columns)[:rows]


def rounded_amax(amax: torch.Tensor, fmt: BlockFormat, scale_rounding: str) -> torch.Tensor:
    """Return the block maximum that the rounded scale of ``amax`` stands for, fp32, shape of ``amax``.

    For ``"rceil"`` this is scale * element_max (amax or more, up to rounding), for ``"floor"`` scale *
    2^element_max_exponent (amax rounded down to a power of two). torchao computes the scale: each amax is cast as a
    block of one element.
    """
    _, scales = cast(amax.unsqueeze(-1), replace(fmt, block_size=1), scale_rounding)
    top = fmt.element_max if scale_rounding == "rceil" else 2.0**fmt.element_max_exponent
    values = get_fp_scale(scales.squeeze(-1)) * top
    # Zero blocks and tiny blocks share the smallest scale, but a zero block must not look like a nonzero one.
    return torch.where(amax == 0, torch.zeros_like(values), values)
