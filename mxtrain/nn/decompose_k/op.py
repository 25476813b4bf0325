"""A matrix product with a small result and a long reduction, by kernels that split K or by torch.mm.

The route is chosen when the op runs: a compiled graph holds one op and is not compiled again when the number of tokens
changes.
"""

import torch

from mxtrain.formats.gemm import full_precision, wide_product
from mxtrain.formats.hardware import HAS_TRITON, runs_kernels
from mxtrain.formats.matrices import at_least_fp32
from mxtrain.launch.functions import define_op
from mxtrain.nn.decompose_k import reference

if HAS_TRITON:
    from mxtrain.nn.decompose_k import kernels

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_operands(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, epilogue: str | None, out_dtype: torch.dtype | None
) -> None:
    """Raise ValueError unless ``mxtrain.decompose_k_mm`` supports these arguments."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} do not fit; they must be [M, K] and [K, N]")
    if a.dtype not in DTYPES or b.dtype != a.dtype:
        raise ValueError(
            f"a is {a.dtype} and b is {b.dtype}; both must be the same: bfloat16, float16, float32 or float64"
        )
    others = {"b": b} if bias is None else {"b": b, "bias": bias}
    for name, other in others.items():
        if other.device != a.device:
            raise ValueError(f"{name} is on {other.device}; move it to {a.device}, where a is")
    if bias is not None and (bias.shape != b.shape[1:] or bias.dtype not in (a.dtype, torch.float32)):
        raise ValueError(
            f"bias {tuple(bias.shape)} of {bias.dtype} does not fit b {tuple(b.shape)}; "
            f"it must be ({b.shape[1]},) of {a.dtype} or float32"
        )
    if epilogue not in reference.EPILOGUES:
        raise ValueError(f"epilogue = {epilogue!r} is not one of: {', '.join(map(repr, reference.EPILOGUES))}")
    if out_dtype not in (None, a.dtype, torch.float32):
        raise ValueError(f"out_dtype = {out_dtype} does not fit operands of {a.dtype}; it must be float32 or theirs")


def _run(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, epilogue: str | None, out_dtype: torch.dtype
) -> torch.Tensor:
    device_type = a.device.type
    if torch.is_autocast_enabled(device_type):
        # Autocast would cast the CPU's fp32 operands back down.
        with torch.autocast(device_type, enabled=False):
            return _run(a, b, bias, epilogue, out_dtype)
    # Modes native and emulated use the same kernels. float64 is for gradcheck and oracles.
    (rows, depth), columns = a.shape, b.shape[1]
    has_kernels = a.dtype != torch.float64 and runs_kernels("emulated", device_type)
    if not has_kernels or 0 in (rows, columns, depth):
        a, b = at_least_fp32(a), at_least_fp32(b)
        with full_precision(a):
            return reference.decompose_k_mm(a, b, bias, epilogue, out_dtype)
    along_k = kernels.lie_along_k(a, b)
    plan, _ = kernels.choose(rows, columns, depth, a.dtype, a.device, along_k)
    if plan is not None:
        return kernels.decompose_k(a, b, bias, epilogue, out_dtype, plan)
    return mm(a, b, bias, epilogue, out_dtype)


def mm(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, epilogue: str | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """epilogue(a b + bias) by one torch.mm with fp32 sums."""
    if bias is None and epilogue in (None, "relu") and out_dtype == a.dtype:
        with full_precision(a):
            product = torch.mm(a, b)
        # Rounding keeps the sign, so relu may come after it.
        return product if epilogue is None else product.relu_()
    return reference.finish(wide_product(torch.mm, a, b), bias, epilogue, out_dtype)


def _fake(a, b, bias, epilogue, out_dtype):
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)


decompose_k_mm = define_op(
    "decompose_k_mm(Tensor a, Tensor b, Tensor? bias, str? epilogue, ScalarType out_dtype) -> Tensor", _run, _fake
)
"""epilogue(a b + bias) [M, N] in ``out_dtype``, without gradient and without checks."""
