"""Casts to and from NVFP4 in plain PyTorch: E2M1 elements, an E4M3 scale per block of 16, an fp32 scale per tensor.

An element's value is E2M1 * block scale * tensor scale. The arithmetic follows torchao
(``torchao.prototype.mx_formats.nvfp4_tensor.nvfp4_quantize``); the E2M1 encoder is ours and can also round
stochastically. Easy to simplify wrongly:

* Block scales are clamped to [2^-6, 448] before they are rounded: tiny blocks and zero blocks get 2^-6.
* An element is x * ((1 / tensor scale) / block scale). Dividing by the product of the scales rounds differently.
* A block scale that is rounded down leaves the largest elements up to 1/16 above 6. They saturate, whatever the
  rounding.
* Divisors are tensors. On CUDA, PyTorch divides by a Python number by multiplying with its rounded inverse, and a few
  codes would depend on the device.
"""

import torch

from mxtrain.formats.e2m1 import decode, encode, pack
from mxtrain.formats.matrices import at_least_fp32, converted, split_blocks
from mxtrain.formats.nvfp4 import NVFP4, RANGE, SCALE_MAX, SCALE_MIN, TENSOR_SCALE_MIN


def dynamic_tensor_scale(x: torch.Tensor) -> torch.Tensor:
    """Return max|x| / (6 * 448), the tensor scale that maps the largest element to the top of the range.

    Like torchao's ``per_tensor_amax_to_scale``, but at least ``TENSOR_SCALE_MIN``, so that a zero tensor gives
    zeros and not NaN. For a tensor in several pieces, pass the maxima of the pieces.

    Args:
        x: bf16 or fp32, any shape. An empty tensor counts as zeros.

    Returns:
        fp32 [] on the device of ``x``: NaN or infinity if ``x`` holds one.
    """
    if x.numel() == 0:
        return torch.full((), TENSOR_SCALE_MIN, dtype=torch.float32, device=x.device)
    return _dynamic(x.abs().amax().float())


def power_of_two_tensor_scale(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two >= ``dynamic_tensor_scale(x)``, fp32 []. Multiplying by it is exact.

    NaN or infinity if ``x`` holds one. An element above 2^128 (1 - 1/64), within 2 % of the largest number of fp32 and
    bf16, dequantizes to infinity: the nearest value that the scales can express is above all numbers.
    """
    return _to_power_of_two(dynamic_tensor_scale(x))


def power_of_two_tensor_scales(amax: torch.Tensor) -> torch.Tensor:
    """Return ``power_of_two_tensor_scale`` of several matrices from their largest magnitudes, fp32, same shape."""
    return _to_power_of_two(_dynamic(amax))


def _dynamic(amax: torch.Tensor) -> torch.Tensor:
    return (amax / amax.new_full((), RANGE)).clamp(min=TENSOR_SCALE_MIN)


def _to_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    # In the bits of fp32: carry any mantissa into the exponent, then drop the mantissa.
    rounded = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(scale.isfinite(), rounded, scale)


def cast(
    x: torch.Tensor, tensor_scale: float | torch.Tensor, bits: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast ``x`` in blocks of 16 along its last dimension.

    Without ``bits``, elements are rounded to nearest, ties to even, and the result has torchao's bits.

    With ``bits``, elements are rounded stochastically, as if the bits were added to the fraction and the rest cut off.
    Let an element lie a fraction f of the way from its smaller E2M1 neighbour to its larger one, and let t be
    f * 2^16 rounded to an integer. The result is the larger neighbour if bits + t >= 2^16. With uniform bits its
    probability is t / 2^16, within 2^-17 of f on either side. The probability is zero only for f <= 2^-17, for
    elements below 7e-7 of the largest element that the block can hold. E2M1 values (zero is one) do not change, and
    elements above 6 saturate. Block scales are always rounded to nearest.

    A NaN in the block or as tensor scale makes the block scale NaN; its codes are meaningless. Infinities saturate to
    6 * 448 * tensor_scale. An infinite tensor scale, as a dynamic scale then is, makes everything dequantize to NaN.

    Args:
        x: bf16 or fp32, [..., D] with D a multiple of 16.
        tensor_scale: a number or fp32, at least ``TENSOR_SCALE_MIN``: [], or one for each block or for each row,
            in a shape that broadcasts to that of ``scales``.
        bits: int64, shape of ``x``, uniform in [0, 2^16).

    Returns:
        codes: uint8, [..., D / 2], two elements per byte, the first in the low half.
        scales: float8_e4m3fn, [..., D / 16].
    """
    blocks = split_blocks(at_least_fp32(x), NVFP4.block_size)
    tensor_scale = _as_tensor(tensor_scale, x)
    scales = block_scales(blocks.abs().amax(-1), tensor_scale)
    scaled = blocks * _inverse(scales, tensor_scale).unsqueeze(-1)
    return pack(encode(scaled.reshape(x.shape), bits)).contiguous(), scales.contiguous()


def cast_tiles(w: torch.Tensor, tensor_scale: float | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast a weight with one scale per tile of 16 x 16, rounded to nearest.

    The transpose casts to the same values, so fprop and dgrad see the same weight. The last tile along rows may be
    incomplete: zeros pad it, which changes nothing.

    Args:
        w: bf16 or fp32, [N, D] with D a multiple of 16.
        tensor_scale: see ``cast``.

    Returns:
        codes: uint8, [N, D / 2], as in ``cast``.
        scales: float8_e4m3fn, [N, D / 16], equal in all 16 rows of a tile. ``cast`` returns the same scales if every
            block has the maximum of its tile.
    """
    rows, tile = w.shape[0], NVFP4.block_size
    blocks = split_blocks(at_least_fp32(w), tile)
    amax = torch.nn.functional.pad(blocks.abs().amax(-1), (0, 0, 0, -rows % tile))
    amax = amax.reshape(-1, tile, amax.shape[1]).amax(1)
    tensor_scale = _as_tensor(tensor_scale, w)
    scales = block_scales(amax.repeat_interleave(tile, 0)[:rows], tensor_scale)
    scaled = blocks * _inverse(scales, tensor_scale).unsqueeze(-1)
    return pack(encode(scaled.reshape(w.shape), None)).contiguous(), scales.contiguous()


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: float | torch.Tensor = 1.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the values of ``codes`` [..., D / 2] with ``scales`` [..., D / 16]: [..., D] in ``dtype``.

    Element times block scale is zero or in [2^-7, 2688] and has at most 6 significant bits. This is exact in bf16 and
    fp32, and stays exact if the tensor scale is a power of two. (torchao multiplies the scales first, release 0.17
    even in the dtype of the original tensor, so its values can differ in the last bit.)
    """
    values = decode(codes)
    blocks = split_blocks(values, NVFP4.block_size) * scales.float().unsqueeze(-1)
    return converted((blocks * _as_tensor(tensor_scale, codes).unsqueeze(-1)).reshape(values.shape), dtype)


def _as_tensor(tensor_scale: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """fp32 on the device of ``like``."""
    if isinstance(tensor_scale, torch.Tensor):
        return tensor_scale.to(device=like.device, dtype=torch.float32)
    return torch.full((), tensor_scale, device=like.device, dtype=torch.float32)


def block_scales(amax: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    """Return the float8_e4m3fn scales of block maxima, same shape."""
    wanted = amax / amax.new_full((), NVFP4.element_max) / tensor_scale
    return wanted.clamp(SCALE_MIN, SCALE_MAX).to(torch.float8_e4m3fn)


def _inverse(scales: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / (block scale * tensor scale) in fp32, in torchao's order of operations."""
    return (1.0 / tensor_scale) / scales.float()
