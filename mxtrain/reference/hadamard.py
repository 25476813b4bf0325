"""The random Hadamard transform in blocks of 16: it spreads an outlier over its block before a cast.

y = H diag(signs) x / 4 for every block x of 16, with H the Sylvester matrix, H_ij = (-1)^popcount(i & j). H / 4 is
orthonormal, so two matrices that are transformed along the axis they are multiplied over, with the same signs, have
the same product as before. Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, which
transforms both operands of wgrad; torchao's ``get_rht_matrix`` is the same matrix, applied from the right.

The order of operations, for whoever needs the same bits (fp32, each operation rounded once):

1. Element i of a block is multiplied by signs[i] / 16.
2. Four rounds of butterflies, at distance 1, 2, 4, 8: for every i without that bit, elements i and i + distance
   become their sum and their difference (the lower minus the upper).
3. Every element is multiplied by 4.

Easy to simplify wrongly:

* The scaling is split so that no sum exceeds the block's largest magnitude: finite input never makes inf - inf.
  Dividing by 16 is exact for all of bf16, denormal numbers included. In fp32, products below 2^-126 can be rounded, and
  a multiply-add fused into the first round would not round them.
* A matrix product has the sums in an order of its own, and tensor cores do not even round them like fp32.
* The result is not rounded to bf16 before the cast; torchao's kernels do that.
"""

from collections.abc import Sequence

import torch

from mxtrain.reference.casts import at_least_fp32, split_blocks
from mxtrain.rng.seeds import HADAMARD_SIZE


def unpack_signs(mask: torch.Tensor) -> torch.Tensor:
    """The signs that ``mxtrain.rng.seeds.sign_mask`` has packed: int64 [] -> fp32 [16] of +1 and -1."""
    bits = mask >> torch.arange(HADAMARD_SIZE, device=mask.device)
    return 1.0 - 2.0 * (bits & 1)


def hadamard(x: torch.Tensor, signs: Sequence[int] | torch.Tensor, dim: int) -> torch.Tensor:
    """``x`` transformed in blocks of 16 along ``dim``.

    A block with an infinity or a NaN comes out infinite or NaN throughout. A finite block can overflow to infinity
    only where the exact result does.

    Args:
        x: any shape, a multiple of 16 (or 0) along ``dim``; see ``pad``.
        signs: 16 of +1 or -1, as from ``mxtrain.rng.seeds.hadamard_signs``; or those in a tensor, whose values are not
            checked and do not make ``torch.compile`` compile anew.

    Returns:
        fp32 (fp64 for fp64 input), shape of ``x``.

    Raises:
        ValueError: for another length or other signs.
    """
    if x.shape[dim] % HADAMARD_SIZE:
        raise ValueError(f"shape {tuple(x.shape)}: dimension {dim} is not a multiple of {HADAMARD_SIZE}")
    wide = at_least_fp32(x).movedim(dim, -1)
    if isinstance(signs, torch.Tensor):
        factors = signs.to(device=x.device, dtype=wide.dtype) / HADAMARD_SIZE
    elif len(signs) != HADAMARD_SIZE or any(sign not in (1, -1) for sign in signs):
        raise ValueError(f"signs = {tuple(signs)}: expected {HADAMARD_SIZE} of +1 or -1")
    else:
        factors = torch.tensor([sign / HADAMARD_SIZE for sign in signs], dtype=wide.dtype, device=x.device)
    blocks = split_blocks(wide, HADAMARD_SIZE) * factors
    for distance in (1, 2, 4, 8):
        pairs = blocks.reshape(*blocks.shape[:-1], HADAMARD_SIZE // (2 * distance), 2, distance)
        lower, upper = pairs.unbind(-2)
        blocks = torch.stack((lower + upper, lower - upper), -2).reshape(blocks.shape)
    return (blocks * 4).reshape(wide.shape).movedim(-1, dim)


def pad(x: torch.Tensor, dim: int) -> torch.Tensor:
    """``x`` with zeros appended along ``dim`` up to a multiple of 16; ``x`` itself if it has that length.

    For tokens: both wgrad operands get the same zero rows, and their product stays what it was. After the transform
    the rows of the last block all hold values, so the padding is not cut off again: the product sums it away.
    """
    missing = -x.shape[dim] % HADAMARD_SIZE
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_zeros(shape)), dim)
