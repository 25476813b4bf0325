"""How far the result of a quantized GEMM is from the product of its operands in high precision.

The ratio of a gradient's norm to its quantization noise is

    ||G|| / ||Q - G||        G the gradient of a weight in high precision, Q what wgrad's quantized operands give

With noise of standard deviation s in each of d elements, the denominator is s sqrt(d). Chmiel, Fishman, Banner, Soudry,
"FP4 All the Way: Fully Quantized Training of LLMs", arXiv 2505.19115, find that training stalls below sqrt(3).
"""

import torch

from mxtrain.diagnostics.totals import Totals, norms, ratio
from mxtrain.ops.gemm import Operand, matmul


def both_products(
    a: torch.Tensor, b: torch.Tensor, a_cast: Operand, b_cast: Operand
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a b^T, and the product of the operands that the casts give, both fp32 [M, N].

    Args:
        a, b: [M, K] and [N, K], fp32, before the casts.
        a_cast, b_cast: the operands with their values as images, [M, K] and [N, K].
    """
    return matmul(Operand(a), Operand(b), torch.float32), matmul(a_cast, b_cast, torch.float32)


def product_totals(found: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Totals]:
    """Compare the two products of every GEMM; by name."""
    exact, quantized = zip(*found.values())
    measured = norms([*exact, *torch._foreach_sub(quantized, exact)])
    return {
        name: Totals({}, {}, {}, {"signal": signal, "noise": noise})
        for name, signal, noise in zip(found, measured, measured[len(found) :])
    }


def relative_error(totals: Totals) -> float:
    """Return the norm of the difference over the norm of the product in high precision."""
    return ratio(totals.norms["noise"], totals.norms["signal"])


def norm_to_noise(totals: Totals) -> float:
    """Return the norm of the product in high precision over the norm of the difference."""
    return ratio(totals.norms["signal"], totals.norms["noise"])
