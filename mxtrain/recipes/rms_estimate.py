"""How MXNorm estimates the RMS of a row."""

import math
from dataclasses import dataclass, field
from numbers import Real

from mxtrain.errors import ConfigError, require_one_of
from mxtrain.recipes.formats import P_VALUES, norm_constant
from mxtrain.recipes.keyed import Keyed
from mxtrain.recipes.recipe import Recipe

ESTIMATORS = ("pre_round", "post_round", "exact")


@dataclass(frozen=True, eq=False)
class RMSEstimate(Keyed):
    """How MXNorm estimates the RMS of a row.

    Attributes:
        p: exponent of the mean over block maxima, 1 or 2; ``"exact"`` ignores it.
        estimator: ``"pre_round"`` reads exact block maxima (the method), ``"post_round"`` reads the maxima that the
            rounded block scales stand for (the paper's ablation), ``"exact"`` is the true mean square (a control).
        eps: added to the squared estimate, as in RMSNorm, so that zero rows stay finite.
        block_size: elements per block maximum.
        constant: c(p, B). Computed once here, so that ``torch.compile`` does not trace the integral.
    """

    p: int
    estimator: str
    eps: float
    block_size: int
    constant: float = field(init=False)

    def __post_init__(self):
        require_one_of("p", self.p, P_VALUES)
        require_one_of("estimator", self.estimator, ESTIMATORS)
        if not isinstance(self.eps, Real) or isinstance(self.eps, bool) or not 0 <= self.eps < math.inf:
            raise ConfigError(f"eps = {self.eps!r} is not a finite number >= 0")
        object.__setattr__(self, "eps", float(self.eps))  # also from a number of NumPy's
        object.__setattr__(self, "constant", norm_constant(self.p, self.block_size))
        self._register()

    @classmethod
    def for_recipe(cls, recipe: Recipe, p: int = 2, estimator: str = "pre_round", eps: float = 1e-5) -> "RMSEstimate":
        """Return the estimate over the blocks of ``recipe``.

        Raises:
            ConfigError: for a wrong setting, or for "post_round" with a recipe that has no power-of-two scales.
        """
        estimate = cls(p, estimator, eps, recipe.block_size)
        if estimator == "post_round" and recipe.format is None:
            raise ConfigError(
                f"estimator = 'post_round' reads rounded block scales, and recipe = {recipe.name!r} has none; "
                "use one of: 'pre_round', 'exact'"
            )
        if estimator == "post_round" and recipe.is_nvfp4:
            raise ConfigError(
                f"estimator = 'post_round' reads rounded block scales, and those of recipe = {recipe.name!r} follow "
                "from a tensor scale, which follows from the norm; use one of: 'pre_round', 'exact'"
            )
        return estimate
