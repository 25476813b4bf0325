"""The random Hadamard transform in blocks of 16. It spreads an outlier over its block before a cast.

y = H diag(signs) x / 4 for every block x of 16, with H the Sylvester matrix, H_ij = (-1)^popcount(i & j). H / 4 is
orthonormal: transforming both factors along the reduced axis, with the same signs, leaves their product unchanged.
Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, which transforms both operands of
wgrad. torchao's ``get_rht_matrix`` is the same matrix, applied from the right.

The order of operations fixes the bits (fp32, each operation rounded once):

1. Multiply element i of a block by signs[i] / 16.
2. Do four rounds of butterflies, at distance 1, 2, 4, 8: for every i without that bit, elements i and i + distance
   become their sum and their difference (the lower minus the upper).
3. Multiply every element by 4.

Easy to simplify wrongly:

* The scaling is split so that no sum exceeds the block's largest magnitude: finite input never makes inf - inf.
  Dividing by 16 is exact for every bf16 number, subnormal numbers included. In fp32, products below 2^-126 can be
  rounded; a multiply-add fused into the first round would not round them.
* A matrix product sums in another order, and tensor cores do not round sums as fp32 does.
* The result is not rounded to bf16 before the cast; torchao's kernels do round it.
"""

from collections.abc import Sequence

import torch

from mxtrain.formats.matrices import at_least_fp32
from mxtrain.rng.seeds import HADAMARD_SIZE


def unpack_signs(mask: torch.Tensor) -> torch.Tensor:
    """Unpack the signs of ``mxtrain.rng.seeds.sign_mask``: int64 [] -> fp32 [16] of +1 and -1."""
    bits = mask >> torch.arange(HADAMARD_SIZE, device=mask.device)
    return 1.0 - 2.0 * (bits & 1)


def hadamard(x: torch.Tensor, signs: Sequence[int] | torch.Tensor, dim: int) -> torch.Tensor:
    """Transform ``x`` in blocks of 16 along ``dim``.

    If a block holds an infinity or a NaN, all its results are infinite or NaN. A finite block overflows to infinity
    only where the exact result does.

    Args:
        x: any shape, a multiple of 16 (or 0) along ``dim``; see ``pad``.
        signs: 16 of +1 or -1, from ``mxtrain.rng.seeds.hadamard_signs`` or, in a tensor, from ``unpack_signs``.

    Returns:
        fp32 (fp64 for fp64 input), shape of ``x``.
    """
    dim %= x.ndim
    count, before, after = x.shape[dim] // HADAMARD_SIZE, x.shape[:dim], x.shape[dim + 1 :]
    wide = at_least_fp32(x)
    factors = torch.as_tensor(signs, dtype=wide.dtype, device=x.device) / HADAMARD_SIZE
    # The block stays where it is, so sums across rows run over whole rows: four to six times as fast on a CPU.
    blocks = wide.reshape(*before, count, HADAMARD_SIZE, *after) * factors.view(-1, *[1] * len(after))
    for distance in (1, 2, 4, 8):
        pairs = blocks.reshape(*before, count * 8 // distance, 2, distance, *after)
        lower, upper = pairs.unbind(dim + 1)
        blocks = torch.stack((lower + upper, lower - upper), dim + 1)
    return (blocks * 4).reshape(x.shape)


def pad(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Append zeros along ``dim`` up to a multiple of 16; return ``x`` itself if nothing is missing.

    Both wgrad operands get the same zero tokens, which leaves their product unchanged. The padding stays: the
    transform fills all rows of the last block with values, and the product sums over them.
    """
    missing = -x.shape[dim] % HADAMARD_SIZE
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim)
