"""MXNorm in plain PyTorch: RMS estimate from block maxima, scaling, and the straight-through backward.

Source: McLean, Prince, Payot, Balanca, Luschi, "MXNorm: Reusing MXFP block scales for efficient tensor
normalisation", arXiv 2603.13180. Easy to simplify wrongly:

* The estimate reads the maxima of x; the cast needs the maxima of x * rho. fp32 multiplication is monotonic, so
  max|x| * rho == max|x * rho| exactly, and one set of maxima serves both. The cast of the fp32 product is therefore the
  oracle of a fused kernel, bit for bit.
* eps is added to the squared estimate, inside the root: a zero row gives rho = 1 / sqrt(eps), and zeros.
* The product x * rho is never rounded to bf16 before the cast.
"""

import torch

from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.matrices import at_least_fp32, split_blocks
from mxtrain.formats.recipe import Recipe


def block_amax(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the largest magnitude of every block: [..., D] -> [..., D / block_size], fp32 (fp64 for fp64 input)."""
    return at_least_fp32(split_blocks(x, block_size).abs().amax(-1))


def mean_square(x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe) -> torch.Tensor:
    """Estimate the squared RMS of every row in fp64: no square overflows, and the order of the sum does not matter."""
    if estimate.estimator == "exact":
        return x.double().square().mean(-1)
    amax = block_amax(x, estimate.block_size)
    if estimate.estimator == "post_round":
        amax = recipe.ops.rounded_amax(amax, recipe)
    if estimate.p == 1:
        return (amax.mean(-1, dtype=torch.float64) / estimate.constant).square()
    return amax.double().square().mean(-1) / estimate.constant**2


def inverse_rms(x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe) -> torch.Tensor:
    """Return rho = 1 / sqrt(r^2 + eps) of every row: [..., D] -> [...], fp32 (fp64 for fp64 input).

    A row with a NaN gives NaN; a row with an infinity gives 0.
    """
    return inverse_root(mean_square(x, estimate, recipe), estimate).to(torch.promote_types(x.dtype, torch.float32))


def inverse_root(squared: torch.Tensor, estimate: RMSEstimate) -> torch.Tensor:
    """Return 1 / sqrt(r^2 + eps) of every row from ``mean_square``: [...] -> [...], fp64."""
    return 1.0 / torch.sqrt(squared + estimate.eps)


def scale_rows(x: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    """Return xhat = x * rho, row by row: [..., D] and [...] -> [..., D], fp32 (fp64 for fp64 input).

    With rho [..., groups], as many dimensions as x, every group of features has its own.
    """
    if rho.ndim == x.ndim:
        return scale_rows(x.unflatten(-1, (rho.shape[-1], -1)), rho).flatten(-2)
    return at_least_fp32(x) * rho.unsqueeze(-1)


def norm_backward(g: torch.Tensor, x: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    """Return the straight-through gradient: RMSNorm's, with rho as the inverse RMS and the cast as identity.

    With xhat = x * rho:  dx = rho * (g - xhat * mean_D(g * xhat)).  g = dL/dxhat [..., D] already contains the gain,
    through the folded weight; x [..., D] and rho [...] are those of the forward. The arithmetic is fp32 (fp64 for fp64
    input), and dx [..., D] has the dtype of ``x``.
    """
    xhat = scale_rows(x, rho)
    g = at_least_fp32(g)
    projection = (g * xhat).mean(-1, keepdim=True)
    return ((g - xhat * projection) * rho.unsqueeze(-1)).to(x.dtype)


def fold_backward(g: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of a weight and the gain folded into it:  dW = G diag(gamma),  dgamma_j = sum_n W_nj G_nj.

    g is G = dL/d(W diag(gamma)) [N, D]; weight is W [N, D], gain is gamma [D]. The arithmetic is fp32 (fp64 for fp64
    input), and the gradients have the dtypes of ``weight`` and ``gain``.
    """
    g, w = at_least_fp32(g), at_least_fp32(weight)
    return (g * gain).to(weight.dtype), (g * w).sum(0).to(gain.dtype)
