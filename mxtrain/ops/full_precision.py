"""Matrix products with fp32 sums, whatever PyTorch is set to.

PyTorch lets cuBLAS round fp32 operands to TF32, and add up partial sums in bf16 or fp16 where it splits a product.
"""

import contextlib

import torch

# {dtype of the operands: (setting in torch.backends.cuda.matmul, forbidden value, value to use instead)}
_PRECISION = {
    torch.float32: ("fp32_precision", "tf32", "ieee"),
    torch.bfloat16: ("allow_bf16_reduced_precision_reduction", True, False),
    torch.float16: ("allow_fp16_reduced_precision_reduction", True, False),
}
_UNCHANGED = contextlib.nullcontext()


def full_precision(a: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context in which products of tensors like ``a`` have fp32 sums. ``torch.compile`` cannot trace it."""
    if _is_strict(a.dtype, a.is_cuda):
        return _UNCHANGED
    name, _, wanted = _PRECISION[a.dtype]
    return _set(name, wanted)


@torch.compiler.assume_constant_result
def is_full_precision(dtype: torch.dtype, is_cuda: bool) -> bool:
    """Whether products of tensors of this dtype have fp32 sums as PyTorch is set.

    To ``torch.compile`` the answer is a constant: a compiled graph keeps to the settings that it was traced under.
    """
    return _is_strict(dtype, is_cuda)


def sum_bf16_products_in_fp32() -> None:
    """Set PyTorch so that all bf16 products of this process have fp32 sums, not only those of mxtrain."""
    name, _, wanted = _PRECISION[torch.bfloat16]
    setattr(torch.backends.cuda.matmul, name, wanted)


def wide_product(matmul, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The fp32 product of matrices, or of batches of matrices, of any dtype; ``matmul`` is torch.mm or torch.bmm."""
    if a.is_cuda and a.dtype != torch.float32 and a.numel() and b.numel():
        with full_precision(a):
            return matmul(a, b, out_dtype=torch.float32)
    a, b = a.float(), b.float()
    with full_precision(a):
        return matmul(a, b)


def _is_strict(dtype: torch.dtype, is_cuda: bool) -> bool:
    name, unwanted, _ = _PRECISION.get(dtype, ("", None, None))
    return not is_cuda or not name or getattr(torch.backends.cuda.matmul, name) != unwanted


@contextlib.contextmanager
def _set(name: str, value: str | bool):
    settings = torch.backends.cuda.matmul
    before = getattr(settings, name)
    setattr(settings, name, value)
    try:
        yield
    finally:
        setattr(settings, name, before)
