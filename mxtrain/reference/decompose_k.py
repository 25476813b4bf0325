"""A matmul whose reduction is cut into chunks, in plain PyTorch: the oracle of the kernels, and what runs on a CPU.

Source of the method: Ellison, Zhang, "Decompose-K", PyTorch Conference 2025. Easy to simplify wrongly:

* Operands are widened before they are multiplied: a bf16 matmul would round every partial product to bf16.
* Bias and epilogue come after the last sum, in fp32, and the result is rounded once.
"""

import torch

from mxtrain.reference.casts import at_least_fp32, converted

EPILOGUES = (None, "relu", "sigmoid", "softmax")


def decompose_k_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str | None = None,
    out_dtype: torch.dtype | None = None,
    splits: int = 1,
) -> torch.Tensor:
    """epilogue(a @ b + bias); the arithmetic is fp32 (fp64 for fp64 input).

    Args:
        a: [M, K].
        b: [K, N].
        bias: [N], or None for zeros.
        epilogue: None, "relu", "sigmoid" or "softmax" (over N).
        out_dtype: None for the dtype of ``a``.
        splits: chunks of K that are multiplied one by one and summed up in order; the last may be shorter, or empty.

    Returns:
        [M, N] in ``out_dtype``.
    """
    wide_a, wide_b = at_least_fp32(a), at_least_fp32(b)
    chunk = max(1, -(-a.shape[1] // splits))
    total = wide_a[:, :chunk] @ wide_b[:chunk]
    for first in range(chunk, a.shape[1], chunk):
        total = total + wide_a[:, first : first + chunk] @ wide_b[first : first + chunk]
    return finish(total, bias, epilogue, a.dtype if out_dtype is None else out_dtype)


def finish(
    total: torch.Tensor, bias: torch.Tensor | None, epilogue: str | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """What comes after the last sum: epilogue(total + bias) in fp32 (fp64 for fp64), rounded once to ``out_dtype``.

    Raises:
        ValueError: for an unknown epilogue.
    """
    total = at_least_fp32(total)
    if bias is not None:
        total = total + at_least_fp32(bias)
    if epilogue == "relu":
        total = torch.relu(total)
    elif epilogue == "sigmoid":
        total = torch.sigmoid(total)
    elif epilogue == "softmax":
        total = torch.softmax(total, dim=1)
    elif epilogue is not None:
        raise ValueError(f"epilogue {epilogue!r}: expected one of {EPILOGUES}")
    return converted(total, out_dtype)
