"""A trial of the MX tensor cores: is the product of codes and scales the product of the values that they stand for?

GPUs of compute capability 12.x have MX instructions of their own kind, and a PyTorch build may lack kernels for them.
"""

import functools

import torch

from mxtrain.ops.gemm import Operand, matmul
from mxtrain.recipes.formats import MXFP8
from mxtrain.reference import casts, nvfp4

DEVICE = "cuda"
# More than one of the tiles that block scales are laid out in, along every dimension.
ROWS, COLUMNS, DEPTH = 160, 144, 256
# Of the product as a whole. Rounding to bf16 costs 2^-9; scales in a wrong order cost far more than everything.
TOLERANCE = 2.0**-7


@functools.cache
def fault_of_native_products() -> str | None:
    """Return what is wrong with small MXFP8 and NVFP4 products on this GPU, or None. Tried once per process."""
    for name, cast in (("MXFP8", _mxfp8), ("NVFP4", _nvfp4)):
        try:
            error = _relative_error(cast)
        except Exception as failure:  # PyTorch, cuBLAS and the driver raise what they like
            first_line = (str(failure).splitlines() or [""])[0]
            return f"a trial product in {name} failed with {type(failure).__name__}: {first_line}"
        if not error <= TOLERANCE:
            return f"a trial product in {name} has a relative error of {error:.2g}"
    return None


@torch.no_grad()
def _relative_error(cast) -> float:
    generator = torch.Generator("cpu").manual_seed(0)
    (a, a_values), (b, b_values) = (cast(_draw(rows, generator)) for rows in (ROWS, COLUMNS))
    want = a_values.double() @ b_values.double().t()
    return float((matmul(a, b, torch.bfloat16) - want).norm() / want.norm())


def _draw(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Gaussian numbers [rows, DEPTH] with another magnitude for every block."""
    in_fp32 = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    blocks = torch.randn(rows, DEPTH // 16, 16, **in_fp32) * torch.randn(rows, DEPTH // 16, 1, **in_fp32).exp()
    return blocks.flatten(1).to(DEVICE)


def _mxfp8(x: torch.Tensor) -> tuple[Operand, torch.Tensor]:
    """x as native operand, and its values."""
    codes, scales = casts.cast(x, MXFP8, "rceil")
    return Operand(codes, casts.to_blocked(scales)), casts.dequantize(codes, scales, MXFP8)


def _nvfp4(x: torch.Tensor) -> tuple[Operand, torch.Tensor]:
    tensor_scale = nvfp4.power_of_two_tensor_scale(x)
    codes, scales = nvfp4.cast(x, tensor_scale)
    return Operand(codes, casts.to_blocked(scales), tensor_scale), nvfp4.dequantize(codes, scales, tensor_scale)
