"""The Hadamard transform. It spreads an outlier over its block before a cast.

y = H diag(signs) x / 4 for every block x of 16, with H the Sylvester matrix, H_ij = (-1)^popcount(i & j). H / 4 is
orthonormal: transforming both factors along the reduced axis, with the same signs, leaves their product unchanged.
Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, which transforms both operands of
wgrad. torchao's ``get_rht_matrix`` is the same matrix, applied from the right. Without signs, as for MXFP4, the
transform is a fixed one in blocks of 32 (arXiv 2605.09825): H x / sqrt(32).

The order of operations fixes the bits (fp32, each operation rounded once):

1. Multiply element i of a block of n by signs[i] / n.
2. Do rounds of butterflies, at distance 1, 2, 4 ... n / 2: for every i without that bit, elements i and i + distance
   become their sum and their difference (the lower minus the upper).
3. Multiply every element by sqrt(n), which for n = 32 is rounded to fp32.

Easy to simplify wrongly:

* The scaling is split so that no sum exceeds the block's largest magnitude: finite input never makes inf - inf.
  Dividing by n is exact for every bf16 number, subnormal numbers included. In fp32, products below 2^-126 can be
  rounded; a multiply-add fused into the first round would not round them.
* A matrix product sums in another order, and tensor cores do not round sums as fp32 does.
* The result is not rounded to bf16 before the cast; torchao's kernels do round it.
"""

import math
from collections.abc import Sequence

import torch

from mxtrain.formats.matrices import at_least_fp32
from mxtrain.formats.recipe import LONGEST_BLOCK
from mxtrain.rng.seeds import HADAMARD_SIZE


def unpack_signs(mask: torch.Tensor) -> torch.Tensor:
    """Unpack the signs of ``mxtrain.rng.seeds.sign_mask``: int64 [] -> fp32 [16] of +1 and -1."""
    bits = mask >> torch.arange(HADAMARD_SIZE, device=mask.device)
    return 1.0 - 2.0 * (bits & 1)


def hadamard(x: torch.Tensor, signs: Sequence[int] | torch.Tensor, dim: int) -> torch.Tensor:
    """Transform ``x`` along ``dim`` in blocks of as many elements as there are signs; fp32 (fp64 for fp64), same shape.

    ``x`` has whole blocks (or 0) along ``dim``; see ``pad``. ``signs`` are a power of two of +1 or -1; 16 of them come
    from ``mxtrain.rng.seeds.hadamard_signs`` or, in a tensor, from ``unpack_signs``. If a block holds an infinity or a
    NaN, all its results are infinite or NaN. A finite block overflows to infinity only where the exact result does.
    """
    dim %= x.ndim
    size = len(signs)
    count, before, after = x.shape[dim] // size, x.shape[:dim], x.shape[dim + 1 :]
    wide = at_least_fp32(x)
    factors = torch.as_tensor(signs, dtype=wide.dtype, device=x.device) / size
    # The block stays where it is, so sums across rows run over whole rows: four to six times as fast on a CPU.
    blocks = wide.reshape(*before, count, size, *after) * factors.view(-1, *[1] * len(after))
    for distance in (1 << level for level in range(size.bit_length() - 1)):
        pairs = blocks.reshape(*before, count * size // (2 * distance), 2, distance, *after)
        lower, upper = pairs.unbind(dim + 1)
        blocks = torch.stack((lower + upper, lower - upper), dim + 1)
    return (blocks * math.sqrt(size)).reshape(x.shape)


def along_tokens(x: torch.Tensor, signs: torch.Tensor | None) -> torch.Tensor:
    """Pad x [T, C] to whole blocks of tokens and transform it along them: blocks of 16 with packed signs (int64 []).

    Without signs, in blocks of 32. Returns fp32 (fp64 for fp64 input).
    """
    unpacked = torch.ones(LONGEST_BLOCK, device=x.device) if signs is None else unpack_signs(signs)
    return hadamard(pad(x, len(unpacked)), unpacked, 0)


def pad(x: torch.Tensor, size: int = HADAMARD_SIZE) -> torch.Tensor:
    """Append rows of zeros up to a multiple of ``size``; return ``x`` itself if none is missing.

    Both wgrad operands get the same zero tokens, which leaves their product unchanged. The padding stays: the
    transform fills all rows of the last block with values, and the product sums over them.
    """
    missing = -x.shape[0] % size
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x
