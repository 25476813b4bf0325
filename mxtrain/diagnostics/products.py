"""How far the result of a quantized GEMM is from the product of its operands in high precision.

The ratio of a gradient's norm to its quantization noise is

    ||G|| / ||Q - G||        G the gradient of a weight in high precision, Q what wgrad's quantized operands give

With noise of standard deviation s in each of d elements, the denominator is s sqrt(d). Chmiel, Fishman, Banner, Soudry,
"FP4 All the Way: Fully Quantized Training of LLMs", arXiv 2505.19115, find that training stalls below sqrt(3).
"""

import torch

from mxtrain.diagnostics.totals import Totals, norms, ratio
from mxtrain.ops.gemm import Operand, matmul


def product_totals(a: torch.Tensor, b: torch.Tensor, a_cast: Operand, b_cast: Operand) -> Totals:
    """Compare a b^T with the product of the operands that the casts give.

    Args:
        a, b: [M, K] and [N, K], fp32, before the casts.
        a_cast, b_cast: the operands with their values as images, [M, K] and [N, K].
    """
    exact = matmul(Operand(a), Operand(b), torch.float32)
    quantized = matmul(a_cast, b_cast, torch.float32)
    signal, noise = norms([exact, quantized - exact])
    return Totals({}, {}, {}, {"signal": signal, "noise": noise})


def relative_error(totals: Totals) -> float:
    """Return the norm of the difference over the norm of the product in high precision."""
    return ratio(totals.norms["noise"], totals.norms["signal"])


def norm_to_noise(totals: Totals) -> float:
    """Return the norm of the product in high precision over the norm of the difference."""
    return ratio(totals.norms["signal"], totals.norms["noise"])
