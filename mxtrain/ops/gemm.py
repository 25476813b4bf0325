"""The operands of a GEMM, and their product with fp32 sums, whatever PyTorch is set to.

PyTorch lets cuBLAS round fp32 operands to TF32, add up partial sums in bf16 or fp16 where it splits a product, and sum
all products of fp16 operands in fp16. On a CPU that multiplies bf16 itself, it lets oneDNN round fp32 operands to bf16
(``torch.set_float32_matmul_precision("medium")``).
"""

import contextlib
from typing import NamedTuple

import torch
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from mxtrain.launch.custom_op import define_op
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


class Codes(NamedTuple):
    """The same matrix as it is sent between processes, in every execution mode.

    Attributes:
        data: codes, float8_e4m3fn [R, K], or uint8 [R, K / 2] for NVFP4, two per byte. For a recipe without a format,
            the values [R, K].
        scales: row-major block scales, float8_e8m0fnu [R, K / 32] or float8_e4m3fn [R, K / 16]; None without a format.
        tensor_scale: NVFP4: the scale of the whole matrix, fp32 []. Otherwise None.
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


# {dtype of the operands: settings, each as (where it is, its name, forbidden values, value to use instead)}
_CUDA, _CPU = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
_ON_CUDA = {
    torch.float32: ((_CUDA, "fp32_precision", ("tf32",), "ieee"),),
    torch.bfloat16: ((_CUDA, "allow_bf16_reduced_precision_reduction", (True,), False),),
    torch.float16: (
        (_CUDA, "allow_fp16_reduced_precision_reduction", (True,), False),
        (_CUDA, "allow_fp16_accumulation", (True,), False),
    ),
}
_ON_CPU = {torch.float32: ((_CPU, "fp32_precision", ("bf16", "tf32"), "ieee"),)}
_UNCHANGED = contextlib.nullcontext()


def full_precision(a: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context in which products of tensors like ``a`` have fp32 sums.

    ``torch.compile`` can trace it only where PyTorch's settings need no change.
    """
    if is_full_precision(a.dtype, a.is_cuda):
        return _UNCHANGED
    return _set(_to_change(a.dtype, a.is_cuda))


@torch.compiler.assume_constant_result
def is_full_precision(dtype: torch.dtype, is_cuda: bool) -> bool:
    """Whether products of tensors of this dtype have fp32 sums as PyTorch is set.

    To ``torch.compile`` the answer is a constant: a compiled graph keeps to the settings that it was traced under.
    """
    return not _to_change(dtype, is_cuda)


def sum_bf16_products_in_fp32() -> None:
    """Set PyTorch so that all bf16 products of this process have fp32 sums, not only those of mxtrain."""
    for settings, name, _, wanted in _ON_CUDA[torch.bfloat16]:
        setattr(settings, name, wanted)


def wide_product(matmul, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The fp32 product of matrices, or of batches of matrices, of any dtype; ``matmul`` is torch.mm or torch.bmm."""
    if a.is_cuda and a.dtype != torch.float32 and a.numel() and b.numel():
        with full_precision(a):
            return matmul(a, b, out_dtype=torch.float32)
    a, b = a.float(), b.float()
    with full_precision(a):
        return matmul(a, b)


def _to_change(dtype: torch.dtype, is_cuda: bool) -> list[tuple]:
    """The settings that allow less than fp32: where each is, its name, and the value to use instead."""
    found = (_ON_CUDA if is_cuda else _ON_CPU).get(dtype, ())
    return [
        (settings, name, wanted) for settings, name, unwanted, wanted in found if getattr(settings, name) in unwanted
    ]


@contextlib.contextmanager
def _set(changes: list[tuple]):
    before = [(settings, name, getattr(settings, name)) for settings, name, _ in changes]
    try:
        for settings, name, value in changes:
            setattr(settings, name, value)
        yield
    finally:
        for settings, name, value in before:
            if name == "fp32_precision":
                # It may have been inherited. Set to it, a later change of the whole backend would not reach it.
                setattr(settings, name, "none")
            if getattr(settings, name) != value:
                setattr(settings, name, value)
