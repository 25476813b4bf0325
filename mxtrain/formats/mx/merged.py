"""MXFP8 on FP8 tensor cores that take one scale per 128 elements: mode "fp8_merged", in plain PyTorch.

Hopper's FP8 tensor cores know no scale per 32 elements. cuBLAS 12.9 multiplies E4M3 codes with fp32 scales of 1 x 128
elements along K, or of 128 x 128. So the four blocks of a group of 128 share their largest scale, and their codes are
rounded once more, to the grid of that scale:

    merged code = E4M3(code 2^(scale of the block - scale of the group))     nearest even, never saturated

An element changes only if it becomes a denormal number of the group's grid: its block's scale is at least 2^1 smaller,
and it is small in its block. Then the change is at least one step of its own grid, because the group's steps are
multiples of its steps.

    GEMM    operand     blocks along    one scale for
    fprop   X           D               1 x 128
            W           D               128 x 128
    dgrad   dY          N               1 x 128
            W^T         N               128 x 128
    wgrad   dY^T        tokens          1 x 128
            X^T         tokens          128 x 128

cuBLAS reaches 1.5 to 1.7 times bf16's speed with 128 x 128 on one side, and 1.1 to 1.25 with 1 x 128 on both (H200). W
gets the tiles because its magnitudes vary least. In wgrad X^T gets them: most inputs come from a norm, which has made
tokens alike. In a small Llama, merging then costs 3e-7 to 9e-7 of such a linear's weight gradient, and with tiles of
dY^T 2.4e-6 to 3.7e-6. Behind SwiGLU, it is 3e-6 and 5e-7. Operands in tiles on both sides are not possible.

A block with a NaN has NaN in all its merged codes and does not count for the scale of its group, so a NaN poisons its
block alone. A scale is at least 2^-126, because cuBLAS may flush denormal scales to zero.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from mxtrain.formats.gemm import wide_product
from mxtrain.formats.matrices import Codes, Operand, converted, split_blocks
from mxtrain.launch.functions import define_op

GROUP = 128
_BLOCK, _NAN, _BIAS = 32, 255, 127
FARTHEST = 40
"""A code is zero on a grid that is coarser by this many powers of two, or more"""


def why_not_merged(in_features: int, out_features: int) -> str | None:
    """Return why a linear with these features cannot run in this mode, with any recipe; None if it can."""
    for name, value in (("input", in_features), ("output", out_features)):
        if value % GROUP:
            return f"{GROUP} does not divide its {value} {name} features"
    return None


def shares_tile(role: str, dim: int) -> bool:
    """Return whether the cast of a matrix of this role along ``dim`` has one scale per 128 x 128 elements."""
    return role == "weight" or (role == "input" and dim == 0)


def check_parts(parts: Sequence[torch.Tensor], axis: int) -> None:
    """Raise ValueError unless matrices that are joined along ``axis`` are whole groups."""
    sizes = [part.shape[axis] for part in parts]
    if len(sizes) > 1 and any(size % GROUP for size in sizes):
        raise ValueError(f"matrices of {sizes} share no operand in mode 'fp8_merged', which needs multiples of {GROUP}")


def _padded(x: torch.Tensor, rows: int = 1, columns: int = 1) -> torch.Tensor:
    """Pad a matrix with zeros to multiples of ``rows`` and ``columns``."""
    missing = -x.shape[0] % rows, -x.shape[1] % columns
    return torch.nn.functional.pad(x, (0, missing[1], 0, missing[0])) if any(missing) else x


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent (fp32) of int32 from -126 to 127."""
    return ((exponent + _BIAS) << 23).view(torch.float32)


def merge(codes: Codes, tiles: bool) -> Operand:
    """Return MXFP8's codes [R, K] with block scales [R, K / 32] on the merged grid.

    Args:
        codes: K is whole blocks. Zeros pad the last group.
        tiles: one scale per 128 x 128 elements. Otherwise per 1 x 128.

    Returns:
        data: float8_e4m3fn [R, K rounded up to whole groups].
        scales: fp32 [groups along K, R]. For tiles fp32 [tiles along R, groups along K rounded up to a multiple of 4],
            padded with zeros. cuBLAS reads these layouts.
    """
    data, own = _padded(codes.data.view(torch.uint8), 1, GROUP), codes.scales.view(torch.uint8).int()
    own, rows = _padded(own, 1, GROUP // _BLOCK), own.shape[0]
    merged = torch.where(own == _NAN, 0, own).clamp(min=1)
    merged = split_blocks(merged, GROUP // _BLOCK).amax(-1)
    scales = merged.t()
    if tiles:
        scales = split_blocks(_padded(merged, GROUP).t(), GROUP).amax(-1).t()
        merged = scales.repeat_interleave(GROUP, 0)[:rows]
    scales = _power(scales - _BIAS)
    shift = (own - merged.repeat_interleave(GROUP // _BLOCK, 1)).clamp(min=-FARTHEST)
    factor = torch.where(own == _NAN, torch.nan, _power(shift.clamp(max=0)))
    values = split_blocks(data.view(codes.data.dtype).float(), _BLOCK) * factor.unsqueeze(-1)
    data = values.flatten(1).to(codes.data.dtype)
    return Operand(data, (_padded(scales, 1, 4) if tiles else scales).contiguous())


def is_tiled(data: torch.Tensor, scales: torch.Tensor) -> bool:
    """Return whether these scales of a merged operand [R, K] are those of tiles."""
    return scales.shape != (data.shape[1] // GROUP, data.shape[0])


def scales_of_groups(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the scale of every group of a merged operand [R, K], fp32 [R, K / 128]."""
    if not is_tiled(data, scales):
        return scales.t()
    return scales[:, : data.shape[1] // GROUP].repeat_interleave(GROUP, 0)[: data.shape[0]]


def values_of(operand: Operand, dtype: torch.dtype) -> torch.Tensor:
    """Return the values [R, K] of a merged operand, exact in bf16 and fp32 except below their normal numbers."""
    groups = split_blocks(operand.data.float(), GROUP)
    return (groups * scales_of_groups(operand.data, operand.scales).unsqueeze(-1)).flatten(1).to(dtype)


def codes_of(operand: Operand) -> Codes:
    """Return the same codes [R, K] with an E8M0 scale for each block, all equal within a group."""
    scales = scales_of_groups(operand.data, operand.scales).contiguous().view(torch.int32) >> 23
    scales = scales.to(torch.uint8).repeat_interleave(GROUP // _BLOCK, 1)
    return Codes(operand.data, scales.view(torch.float8_e8m0fnu))


def changed_elements(image: torch.Tensor, scales: torch.Tensor, dim: int, tiles: bool) -> torch.Tensor:
    """Return how many elements merging changes, fp64 []. NaN and infinite elements do not count.

    ``image`` [R, C] holds the values of codes in blocks along ``dim``, and ``scales`` the scale of each block, fp32
    [R, C / 32] or [R / 32, C]. ``tiles`` as for ``merge``.
    """
    if dim == 0:
        image, scales = image.t(), scales.t()
    scales = torch.where(scales.isfinite(), scales, 0.0).clamp(min=2.0**-126)
    groups = split_blocks(_padded(scales, 1, GROUP // _BLOCK), GROUP // _BLOCK).amax(-1)
    total = torch.zeros((), dtype=torch.float64, device=image.device)
    # 8 tiles at a time: an operand may be the largest weight, and copies of it fill the memory.
    for rows, own in zip(image.split(8 * GROUP), groups.split(8 * GROUP)):
        if tiles:
            own = torch.cat([tile.amax(0, keepdim=True).expand_as(tile) for tile in own.split(GROUP)])
        own = own.repeat_interleave(GROUP, 1)[:, : image.shape[1]]
        codes = rows.float() / own
        total += ((codes.to(torch.float8_e4m3fn).float() != codes) & rows.isfinite()).sum()
    return total


def reference_product(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """a [M, K] times the transpose of b [N, K]: fp32 sums of each group of 128, scaled, then added up in fp32."""
    by_group = zip(
        a.float().split(GROUP, 1),
        scales_of_groups(a, a_scales).split(1, 1),
        b.float().split(GROUP, 1),
        scales_of_groups(b, b_scales).split(1, 1),
    )
    total = a_scales.new_zeros(a.shape[0], b.shape[0])
    for a_codes, a_scale, b_codes, b_scale in by_group:
        total += wide_product(torch.mm, a_codes, b_codes.t()) * a_scale * b_scale.t()
    return converted(total, out_dtype)


def _product(
    a: torch.Tensor, b: torch.Tensor, a_scales: torch.Tensor, b_scales: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    b = b.t().contiguous()
    if not a.numel() or not b.numel():
        return a.new_zeros(a.shape[0], b.shape[0], dtype=out_dtype)
    if not a.is_cuda:
        return reference_product(a, a_scales, b, b_scales, out_dtype)
    kinds = [
        ScalingType.BlockWise128x128 if is_tiled(x, scales) else ScalingType.BlockWise1x128
        for x, scales in ((a, a_scales), (b, b_scales))
    ]
    rows, missing = a.shape[0], -a.shape[0] % 16
    if missing:  # cuBLAS wants whole 16 bytes between columns of scales, and PyTorch lets them lie no farther apart
        a = _padded(a.view(torch.uint8), 16).view(a.dtype)
        if kinds[0] == ScalingType.BlockWise1x128:
            a_scales = torch.nn.functional.pad(a_scales, (0, missing))
    settings = kinds[0], b_scales.t(), kinds[1], SwizzleType.NO_SWIZZLE, SwizzleType.NO_SWIZZLE
    return scaled_mm(a, b.t(), a_scales.t(), *settings, output_dtype=out_dtype)[:rows]


# An op of our own: PyTorch's has no kernel for a CPU.
merged_mm = define_op(
    "merged_mm(Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, ScalarType out_dtype) -> Tensor",
    _product,
    lambda a, b, a_scales, b_scales, out_dtype: a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype),
)
"""Merged operands a [M, K] and b [N, K], given as [K, N], of which one has tiles -> [M, N].

On a CPU ``reference_product``, on a GPU cuBLAS, which sums the codes of a group with 13 bits or more.
"""
