"""The operands of a GEMM and their product."""

from typing import NamedTuple

import torch
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from mxtrain.custom_op import define_op
from mxtrain.ops.full_precision import full_precision, is_full_precision, wide_product
from mxtrain.reference.casts import converted

# The form of operand that the kernels write for each mode that uses them.
KERNEL_FORM = {"native": "blocked", "emulated": "image"}


class Operand(NamedTuple):
    """One operand of a GEMM: a matrix [R, K] quantized in blocks along K, the axis that the GEMM reduces over.

    Attributes:
        data: native: codes [R, K], or [R, K / 2] for NVFP4, two codes per byte. Emulated and reference: the exact
            values of codes times scales, in bf16 (emulated) or fp32 (reference).
        scales: native: the block scales, E8M0 or E4M3, in the blocked 128x4 layout that the tensor cores read.
            Otherwise None.
        tensor_scale: native NVFP4: the scale of the whole matrix, fp32 []. Otherwise None.
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None


def image_dtype(x: torch.Tensor, mode: str) -> torch.dtype:
    """Return the dtype in which ``mode`` multiplies values: bf16 if emulated, fp32 (fp64 for fp64) in reference."""
    return torch.promote_types(x.dtype, torch.float32) if mode == "reference" else torch.bfloat16


def values_dtype(mode: str) -> torch.dtype:
    """Return the dtype in which ``mode`` multiplies the values of codes."""
    return torch.float32 if mode == "reference" else torch.bfloat16


def matmul(a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply a [M, K] by the transpose of b [N, K] -> [M, N], summed in fp32 and rounded once, to ``out_dtype``.

    Operands with scales run on the MX tensor cores. Operands without scales hold their values: an ordinary product
    sums the same exact products in another order.
    """
    # Autocast would round the fp32 operands of the reference mode to bf16.
    with torch.autocast(device_type=a.data.device.type, enabled=False):
        if a.scales is None:
            return _product_of_values(a.data, b.data.t(), out_dtype)
        return _product_of_codes(*a, *b, out_dtype)


# Dynamo of PyTorch 2.11 cannot look into scaled_mm.
@torch.compiler.allow_in_graph
def _product_of_codes(a, a_scales, a_tensor_scale, b, b_scales, b_tensor_scale, out_dtype: torch.dtype) -> torch.Tensor:
    """The fields of two operands with scales -> their product in ``out_dtype``."""
    a_data, a_scales, recipe, swizzle = _for_scaled_mm(Operand(a, a_scales, a_tensor_scale))
    b_data, b_scales, _, _ = _for_scaled_mm(Operand(b, b_scales, b_tensor_scale))
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


def _product_of_values(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """a [M, K] times b [K, N] in ``out_dtype``."""
    # A plain torch.mm wherever it is right: TorchTitan's own selective activation checkpointing knows no other product.
    # Where the result is converted, one op does both, so that checkpointing keeps the result, not the larger product.
    if out_dtype == a.dtype and is_full_precision(a.dtype, a.is_cuda):
        return torch.mm(a, b)
    return guarded_mm(a, b, out_dtype)


def _guarded_mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    if out_dtype.itemsize > a.dtype.itemsize:
        return converted(wide_product(torch.mm, a, b), out_dtype)
    with full_precision(a):
        return converted(torch.mm(a, b), out_dtype)


def _fake(a, b, out_dtype):
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)


# An op of its own, because no compiled graph can change PyTorch's settings around one of its products.
guarded_mm = define_op("guarded_mm(Tensor a, Tensor b, ScalarType out_dtype) -> Tensor", _guarded_mm, _fake)
"""a [M, K] b [K, N] in ``out_dtype`` with fp32 sums, without a gradient."""


def _for_scaled_mm(operand: Operand) -> tuple[torch.Tensor, list[torch.Tensor], list[ScalingType], list[SwizzleType]]:
    """Return codes, scales, the kind of each scale and the layout of each scale."""
    data, scales, tensor_scale = operand
    if tensor_scale is None:
        return data, [scales], [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
    return (
        data.view(torch.float4_e2m1fn_x2),
        [scales, tensor_scale],
        [ScalingType.BlockWise1x16, ScalingType.TensorWise],
        [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE],
    )
