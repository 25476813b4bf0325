"""Block-scaled element formats, and the constant that turns block maxima into an RMS."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from mxtrain.errors import require_one_of, require_positive_integer


@dataclass(frozen=True)
class BlockFormat:
    """A format in which ``block_size`` consecutive elements share one scale (OCP Microscaling Formats v1.0).

    Attributes:
        name: the usual name, in lower case.
        block_size: elements per scale, along the reduction axis of the GEMM.
        element_max: largest finite element magnitude.
        element_max_exponent: floor(log2(element_max)), the exponent that FLOOR scale rounding targets.
        element_bits: bits of an element; a scale has 8.
    """

    name: str
    block_size: int
    element_max: float
    element_max_exponent: int
    element_bits: int

    @property
    def bytes_per_element(self) -> float:
        """Bytes of codes and block scales per element."""
        return self.element_bits / 8 + 1 / self.block_size


# E4M3 elements, one E8M0 (power of two) scale per block.
MXFP8 = BlockFormat("mxfp8", block_size=32, element_max=448.0, element_max_exponent=8, element_bits=8)

# E2M1 elements, one E4M3 scale per block, one fp32 scale per tensor. As in torchao, the smallest block scale is E4M3's
# smallest normal number; TransformerEngine lets block scales go down to zero.
NVFP4 = BlockFormat("nvfp4", block_size=16, element_max=6.0, element_max_exponent=2, element_bits=4)
NVFP4_SCALE_MAX = 448.0
NVFP4_SCALE_MIN = 2.0**-6
# The largest magnitude, in units of the tensor scale.
NVFP4_RANGE = NVFP4.element_max * NVFP4_SCALE_MAX
# With smaller tensor scales, (1 / tensor scale) / NVFP4_SCALE_MIN overflows fp32, and zeros become NaN.
NVFP4_TENSOR_SCALE_MIN = 2.0**-121

P = Literal[1, 2]
P_VALUES = get_args(P)
ScaleRounding = Literal["rceil", "floor"]
SCALE_ROUNDINGS = get_args(ScaleRounding)

# Beyond this many standard deviations the survival function is below 1e-30 for any block that fits in memory.
_UPPER_LIMIT = 16.0
_INTERVALS = 4096


def norm_constant(p: P, block_size: int) -> float:
    """Return c(p, B), the ratio of the p-mean of block maxima to the RMS for an infinitely long Gaussian row.

    c = E[m^p]^(1/p), with m the largest of ``block_size`` magnitudes |N(0, 1)|. The survival function of m is
    1 - erf(m / sqrt 2)^B, so E[m^p] = int_0^inf p m^(p-1) (1 - erf(m / sqrt 2)^B) dm. Simpson's rule computes the
    integral: the integrand is smooth and vanishes like a Gaussian.

    Source: McLean et al., "MXNorm", arXiv 2603.13180. They estimate c by Monte Carlo.

    Args:
        p: exponent of the mean, 1 or 2.
        block_size: elements per block, at least 1.

    Raises:
        ConfigError: for any other ``p`` or ``block_size``.
    """
    require_one_of("p", p, P_VALUES)
    require_positive_integer("block_size", block_size)
    return _solved(p, int(block_size))


# A function of its own, because type checkers lose the arguments of a cached one.
@cache
def _solved(p: int, block_size: int) -> float:
    def integrand(m: float) -> float:
        tail = math.erfc(m / math.sqrt(2.0))
        # 1 - (1 - tail)^B, without cancellation where the tail is small.
        survival = 1.0 if tail >= 1.0 else -math.expm1(block_size * math.log1p(-tail))
        return p * m ** (p - 1) * survival

    h = _UPPER_LIMIT / _INTERVALS
    total = integrand(0.0) + integrand(_UPPER_LIMIT)
    total += math.fsum((4 if i % 2 else 2) * integrand(i * h) for i in range(1, _INTERVALS))
    return (total * h / 3) ** (1 / p)
