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

from mxtrain.formats.e2m1 import decode, elements, encode, pack
from mxtrain.formats.matrices import at_least_fp32, converted, split_blocks, tile_amax
from mxtrain.formats.nvfp4 import FOUR_OVER_SIX_RANGE, NVFP4, RANGE, SCALE_MAX, SCALE_MIN, TENSOR_SCALE_MIN
from mxtrain.formats.recipe import FourOverSixError


def dynamic_tensor_scale(x: torch.Tensor) -> torch.Tensor:
    """Return max|x| / (6 * 448), fp32 []: the tensor scale that maps the largest element to the top of the range.

    Like torchao's ``per_tensor_amax_to_scale``, but at least ``TENSOR_SCALE_MIN``, so that a zero tensor gives zeros
    and not NaN. NaN or infinity if ``x`` holds one; an empty tensor counts as zeros. For a tensor in several pieces,
    pass the maxima of the pieces.
    """
    return _dynamic(largest_magnitude(x))


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """Return max|x|, fp32 []; zero for an empty tensor."""
    return x.abs().amax().float() if x.numel() else torch.zeros((), dtype=torch.float32, device=x.device)


def power_of_two_tensor_scale(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two >= ``dynamic_tensor_scale(x)``, fp32 []. Multiplying by it is exact.

    NaN or infinity if ``x`` holds one. An element above 2^128 (1 - 1/64), within 2 % of the largest number of fp32 and
    bf16, dequantizes to infinity: the nearest value that the scales can express is above all numbers.
    """
    return power_of_two_tensor_scales(largest_magnitude(x))


def power_of_two_tensor_scales(amax: torch.Tensor) -> torch.Tensor:
    """Return ``power_of_two_tensor_scale`` of several matrices from their largest magnitudes, fp32, same shape."""
    scale = _dynamic(amax)
    # In the bits of fp32: carry any mantissa into the exponent, then drop the mantissa.
    rounded = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(scale.isfinite(), rounded, scale)


def _dynamic(amax: torch.Tensor) -> torch.Tensor:
    return (amax / amax.new_full((), RANGE)).clamp(min=TENSOR_SCALE_MIN)


def cast(
    x: torch.Tensor, tensor_scale: float | torch.Tensor, bits: torch.Tensor | None = None, tiles: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast ``x`` in blocks of 16 along its last dimension.

    Without ``bits``, elements are rounded to nearest, ties to even, and the result has torchao's bits.

    With ``bits``, elements are rounded stochastically, as if the bits were added to the fraction and the rest cut off.
    Let an element lie a fraction f of the way from its smaller E2M1 neighbor to its larger one, and let t be
    f * 2^16 rounded to an integer. The result is the larger neighbor if bits + t >= 2^16. With uniform bits its
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
        tiles: every 16 rows of ``x`` [N, D] share their scales, so the transpose casts to the same values. Zeros pad
            the last tile, which changes nothing.

    Returns:
        codes: uint8, [..., D / 2], two elements per byte, the first in the low half.
        scales: float8_e4m3fn, [..., D / 16].
    """
    blocks = split_blocks(at_least_fp32(x), NVFP4.block_size)
    amax, tensor_scale = blocks.abs().amax(-1), _as_tensor(tensor_scale, x)
    scales = block_scales(tile_amax(amax, NVFP4.block_size, 0) if tiles else amax, tensor_scale)
    # One over both scales, in torchao's order of operations.
    scaled = blocks * ((1.0 / tensor_scale) / scales.float()).unsqueeze(-1)
    return pack(encode(scaled.reshape(x.shape), bits)).contiguous(), scales.contiguous()


def cast_four_over_six(
    x: torch.Tensor,
    amax: torch.Tensor,
    error: FourOverSixError = "mae",
    tiles: bool = False,
    top: float = FOUR_OVER_SIX_RANGE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast ``x`` with the better of two scales for each block: its largest element becomes 6, or 4.

    Between 4 and 6, E2M1 has no number, so a block with many elements near its maximum loses less with 4. The result
    has the bits of TransformerEngine 2.20 and of torchao's cast. Easy to simplify wrongly:

    * Errors are those of decoded values. Every operation is rounded, and so is every addition, in the order of the
      elements. The errors of a tile's rows are added as halves: the first eight to the last eight, and so on.
    * Equal errors take 6.
    * Block scales have no lower bound. The codes of a block whose scale is zero are meaningless.

    Args:
        x: bf16 or fp32, [..., D] with D a multiple of 16; [N, D] for tiles.
        amax: the largest magnitude of the matrix, fp32 [], or of parts of it, in a shape that broadcasts to ``scales``.
        error: sum of the magnitudes ("mae") or of the squares ("mse") of the errors.
        tiles: as for ``cast``.
        top: the tensor scale is amax / top. 6 * 256 leaves room for block scales that are larger by half.

    Returns:
        codes, scales: as from ``cast``. Values are element * block scale * (amax / top).
    """
    size = NVFP4.block_size
    # Contiguous, because in compiled graphs PyTorch has other strides for some of these operations on transposed ones.
    blocks = split_blocks(at_least_fp32(x.contiguous()), size)
    largest = blocks.abs().amax(-1)
    if tiles:
        largest = tile_amax(largest, size, 0)
    top = amax.new_full((), top)
    up = (top / amax).clamp(max=torch.finfo(torch.float32).max)
    up = torch.where((amax == 0) | (up == 0), torch.ones_like(up), up)
    wanted = largest / largest.new_full((), NVFP4.element_max) * up
    found = []
    for growth in (1.0, 1.5):
        scales = (wanted * growth).clamp(max=SCALE_MAX).to(torch.float8_e4m3fn)
        wide = scales.float().unsqueeze(-1)
        factor = (1.0 / (wide * (1.0 / up).unsqueeze(-1))).clamp(max=torch.finfo(torch.float32).max)
        codes = encode(blocks * factor)
        difference = elements(x.device)[codes.int()] * wide * amax.unsqueeze(-1) / top - blocks
        of_elements = difference.abs() if error == "mae" else difference * difference
        total = of_elements[..., 0]
        for i in range(1, size):
            total = total + of_elements[..., i]
        if tiles:
            rows = torch.nn.functional.pad(total, (0, 0, 0, -len(total) % size)).unflatten(0, (-1, size))
            while rows.shape[1] > 1:
                half = rows.shape[1] // 2
                rows = rows[:, :half] + rows[:, half:]
            total = rows.squeeze(1).repeat_interleave(size, 0)[: len(total)]
        found.append((codes, scales, total))
    (six, six_scales, six_error), (four, four_scales, four_error) = found
    takes_four = four_error < six_error
    codes = torch.where(takes_four.unsqueeze(-1), four, six).reshape(x.shape)
    scales = torch.where(takes_four, four_scales.view(torch.uint8), six_scales.view(torch.uint8))
    return pack(codes).contiguous(), scales.view(torch.float8_e4m3fn).contiguous()


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


def dequantize_by_amax(
    codes: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the values of ``cast_four_over_six`` as TransformerEngine decodes them, rounded to ``dtype``."""
    return dequantize(codes, scales.float() * amax * (1 / FOUR_OVER_SIX_RANGE), dtype=dtype)


def _as_tensor(tensor_scale: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """fp32 on the device of ``like``."""
    if isinstance(tensor_scale, torch.Tensor):
        return tensor_scale.to(device=like.device, dtype=torch.float32)
    return torch.full((), tensor_scale, device=like.device, dtype=torch.float32)


def block_scales(amax: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    """Return the float8_e4m3fn scales of block maxima, same shape."""
    wanted = amax / amax.new_full((), NVFP4.element_max) / tensor_scale
    return wanted.clamp(SCALE_MIN, SCALE_MAX).to(torch.float8_e4m3fn)
