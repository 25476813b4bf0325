"""One GEMM of quantized operands."""

import torch
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from mxtrain.quantize import Operand
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
        return scaled_mm(
            a.data,
            b.data.t(),
            scale_a=a.scales,
            scale_recipe_a=ScalingType.BlockWise1x32,
            scale_b=b.scales,
            scale_recipe_b=ScalingType.BlockWise1x32,
            swizzle_a=SwizzleType.SWIZZLE_32_4_4,
            swizzle_b=SwizzleType.SWIZZLE_32_4_4,
            output_dtype=out_dtype,
        )
