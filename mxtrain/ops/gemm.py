"""One GEMM of quantized operands."""

import torch
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from mxtrain.ops.quantize import Operand
from mxtrain.reference.casts import converted


def matmul(a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
    """a [M, K] times b [N, K] transposed -> [M, N] in ``out_dtype``, accumulated in fp32.

    Operands with scales go to the MX tensor cores; without scales they hold their values, and an ordinary product
    of those is the same sum of the same exact products, up to its order.
    """
    # Autocast would round fp32 operands of the reference mode to bf16.
    with torch.autocast(device_type=a.data.device.type, enabled=False):
        if a.scales is None:
            return converted(a.data @ b.data.t(), out_dtype)
        a_data, a_scales, recipe, swizzle = _native(a)
        b_data, b_scales, _, _ = _native(b)
        return scaled_mm(
            a_data,
            b_data.t(),
            scale_a=a_scales,
            scale_recipe_a=recipe,
            scale_b=b_scales,
            scale_recipe_b=recipe,
            swizzle_a=swizzle,
            swizzle_b=swizzle,
            output_dtype=out_dtype,
        )


def _native(operand: Operand) -> tuple[torch.Tensor, list[torch.Tensor], list[ScalingType], list[SwizzleType]]:
    """Codes, scales, what they scale and how they are laid out, as ``scaled_mm`` takes them."""
    data, scales, tensor_scale = operand
    if tensor_scale is None:
        return data, [scales], [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
    return (
        data.view(torch.float4_e2m1fn_x2),
        [scales, tensor_scale],
        [ScalingType.BlockWise1x16, ScalingType.TensorWise],
        [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE],
    )
