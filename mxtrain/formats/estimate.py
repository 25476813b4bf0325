"""How MXNorm estimates the RMS of a row, and the constant that turns block maxima into an RMS."""

import math
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from typing import Literal, get_args

from mxtrain.errors import ConfigError, require_one_of, require_positive_integer
from mxtrain.formats.recipe import Recipe
from mxtrain.launch import Keyed

P = Literal[1, 2]
P_VALUES = get_args(P)
Estimator = Literal["pre_round", "post_round", "exact"]
ESTIMATORS = get_args(Estimator)

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


@dataclass(frozen=True, eq=False)
class RMSEstimate(Keyed):
    """How MXNorm estimates the RMS of a row.

    Attributes:
        p: exponent of the mean over block maxima, 1 or 2; ``"exact"`` ignores it.
        estimator: ``"pre_round"`` reads exact block maxima (the method), ``"post_round"`` reads the maxima that the
            rounded block scales stand for (the paper's ablation), ``"exact"`` is the true mean square (a control).
        eps: added to the squared estimate, as in RMSNorm, so that zero rows stay finite.
        block_size: elements per block maximum.
        ratio: divides the estimate by c(p, B) once more, for rows that are far from Gaussian.
        constant: c(p, B) * ratio. Computed once here, so that ``torch.compile`` does not trace the integral.
    """

    p: P
    estimator: Estimator
    eps: float
    block_size: int
    ratio: float = 1.0
    constant: float = field(init=False)

    def __post_init__(self):
        require_one_of("p", self.p, P_VALUES)
        require_one_of("estimator", self.estimator, ESTIMATORS)
        if not isinstance(self.eps, Real) or isinstance(self.eps, bool) or not 0 <= self.eps < math.inf:
            raise ConfigError(f"eps = {self.eps!r} is not a finite number >= 0")
        object.__setattr__(self, "eps", float(self.eps))  # also from a number of NumPy's
        object.__setattr__(self, "constant", norm_constant(self.p, self.block_size) * self.ratio)
        self._register()

    @classmethod
    def for_recipe(
        cls, recipe: Recipe, p: P = 2, estimator: Estimator = "pre_round", eps: float = 1e-5, ratio: float = 1.0
    ) -> "RMSEstimate":
        """Return the estimate over the blocks of ``recipe``.

        Raises:
            ConfigError: for a wrong setting, or for "post_round" with a recipe that has no power-of-two scales.
        """
        estimate = cls(p, estimator, eps, recipe.block_size, ratio)
        if estimator == "post_round" and (recipe.format is None or not recipe.has("scale_rounding")):
            why = f"and those of recipe = {recipe.name!r} follow from a tensor scale, which follows from the norm"
            if recipe.format is None:
                why = f"and recipe = {recipe.name!r} has none"
            raise ConfigError(
                f"estimator = 'post_round' reads rounded block scales, {why}; use one of: 'pre_round', 'exact'"
            )
        return estimate
