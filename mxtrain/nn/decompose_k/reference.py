"""A router's matrix product with bias and epilogue, in plain PyTorch.

Easy to simplify wrongly:

* Operands are widened before the product: a bf16 matmul rounds its result to bf16.
* Bias and epilogue come after the last sum, in fp32, and the result is rounded once.
"""

from typing import Literal, get_args

import torch

from mxtrain.formats.matrices import at_least_fp32, converted

Epilogue = Literal["relu", "sigmoid", "softmax"]
EPILOGUES = (None, *get_args(Epilogue))


def decompose_k_mm(
    a: torch.Tensor, b: torch.Tensor, bias=None, epilogue: str | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Compute epilogue(a b + bias) [M, N] in fp32 (fp64 for fp64). Arguments as for ``mxtrain.decompose_k_mm``."""
    return finish(at_least_fp32(a) @ at_least_fp32(b), bias, epilogue, a.dtype if out_dtype is None else out_dtype)


def finish(
    total: torch.Tensor, bias: torch.Tensor | None, epilogue: str | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """Compute epilogue(total + bias) in fp32 (fp64 for fp64) and round it once to ``out_dtype``."""
    total = at_least_fp32(total)
    if bias is not None:
        total = total + at_least_fp32(bias)
    if epilogue == "relu":
        total = torch.relu(total)
    elif epilogue == "sigmoid":
        total = torch.sigmoid(total)
    elif epilogue == "softmax":
        total = torch.softmax(total, dim=1)
    return converted(total, out_dtype)
