"""Products of values with fp32 sums, whatever PyTorch is set to.

PyTorch lets cuBLAS round fp32 operands to TF32, add up partial sums in bf16 or fp16 where it splits a product, and sum
all products of fp16 operands in fp16. On a CPU that multiplies bf16 itself, it lets oneDNN round fp32 operands to bf16
(``torch.set_float32_matmul_precision("medium")``).
"""

import contextlib

import torch
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from mxtrain.formats.matrices import converted
from mxtrain.launch.functions import define_op


def matmul(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply a [M, K] by the transpose of b [N, K] -> [M, N], summed in fp32 and rounded once, to ``out_dtype``."""
    # Autocast would round the fp32 operands of the reference mode to bf16.
    with torch.autocast(device_type=a.device.type, enabled=False):
        return _product_of_values(a, b.t(), out_dtype)


def product_of_codes(
    a: torch.Tensor, a_scales: list, b: torch.Tensor, b_scales: list, kinds: list[ScalingType], out_dtype: torch.dtype
) -> torch.Tensor:
    """``matmul`` on the MX tensor cores: of codes with block scales in the 128x4 layout, then a tensor scale if any."""
    swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][: len(kinds)]
    of_a = {"scale_a": a_scales, "scale_recipe_a": kinds, "swizzle_a": swizzle}
    of_b = {"scale_b": b_scales, "scale_recipe_b": kinds, "swizzle_b": swizzle}
    return scaled_mm(a, b.t(), **of_a, **of_b, output_dtype=out_dtype)


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
