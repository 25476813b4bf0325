"""Recipes: what the operands of every GEMM of a linear layer are cast to."""

import math
from dataclasses import dataclass, field, replace

from mxtrain.errors import ConfigError, require_one_of
from mxtrain.formats import MXFP8, P_VALUES, SCALE_ROUNDINGS, BlockFormat, norm_constant

ESTIMATORS = ("pre_round", "post_round", "exact")


@dataclass(frozen=True)
class Recipe:
    """How the three GEMMs of a linear layer (fprop, dgrad, wgrad) see their operands.

    Every operand is cast in blocks along the axis that its GEMM reduces over: fprop along the input features,
    dgrad along the output features, wgrad along the tokens.

    Attributes:
        name: the recipe's name in the TOML.
        format: what operands are cast to; None leaves them in high precision.
        block_size: elements per scale, and per block maximum of MXNorm's estimate.
        scale_rounding: how a block's scale is rounded to a power of two: ``"rceil"``
            (2^ceil(log2(amax / element_max)), never overflows) or ``"floor"`` (2^(floor(log2 amax) -
            element_max_exponent), OCP's rule, which can overflow and then saturates).
    """

    name: str
    format: BlockFormat | None
    block_size: int
    scale_rounding: str = "rceil"

    def __post_init__(self):
        require_one_of("scale_rounding", self.scale_rounding, SCALE_ROUNDINGS)

    def __str__(self) -> str:
        return self.name if self.format is None else f"{self.name}/{self.scale_rounding}"


RECIPES = {
    "mxfp8": Recipe("mxfp8", MXFP8, MXFP8.block_size),
    # No cast at all: MXNorm's estimate, folding and backward alone. Separates what the norm costs from what the
    # cast costs, and, in float64, lets the gradients be checked to rounding error.
    "unquantized": Recipe("unquantized", None, MXFP8.block_size),
}


def get_recipe(recipe: "str | Recipe", scale_rounding: str | None = None) -> Recipe:
    """The recipe of that name (a Recipe passes through), with another scale rounding if one is given.

    Raises:
        ConfigError: naming the recipes, or the scale roundings, there are.
    """
    if not isinstance(recipe, Recipe):
        require_one_of("recipe", recipe, RECIPES)
        recipe = RECIPES[recipe]
    return recipe if scale_rounding is None else replace(recipe, scale_rounding=scale_rounding)


@dataclass(frozen=True)
class RMSEstimate:
    """How MXNorm gets the RMS of a row.

    Attributes:
        p: exponent of the mean over block maxima, 1 or 2; ``"exact"`` ignores it.
        estimator: ``"pre_round"`` (exact block maxima: the method), ``"post_round"`` (the maxima that the rounded
            block scales stand for: the paper's ablation) or ``"exact"`` (the true mean square: a control).
        eps: added to the squared estimate, as in RMSNorm, so that a zero row stays finite.
        block_size: elements per block maximum.
        constant: c(p, B), computed here once so that no graph traces the quadrature.
    """

    p: int
    estimator: str
    eps: float
    block_size: int
    constant: float = field(init=False)

    def __post_init__(self):
        require_one_of("p", self.p, P_VALUES)
        require_one_of("estimator", self.estimator, ESTIMATORS)
        if not isinstance(self.eps, (int, float)) or isinstance(self.eps, bool) or not 0 <= self.eps < math.inf:
            raise ConfigError(f"eps = {self.eps!r} is not a finite number >= 0")
        object.__setattr__(self, "constant", norm_constant(self.p, self.block_size))

    @classmethod
    def for_recipe(cls, recipe: Recipe, p: int = 2, estimator: str = "pre_round", eps: float = 1e-5) -> "RMSEstimate":
        """The estimate over the blocks of ``recipe``; ConfigError if it needs scales that the recipe does not have."""
        estimate = cls(p, estimator, eps, recipe.block_size)
        if estimator == "post_round" and recipe.format is None:
            raise ConfigError(
                f"estimator = 'post_round' reads rounded block scales, and recipe = {recipe.name!r} has none; "
                "use one of: 'pre_round', 'exact'"
            )
        return estimate
