"""Recipes: what the operands of every GEMM of a linear layer are cast to."""

import math
from dataclasses import dataclass, field, replace

from mxtrain.errors import ConfigError, require_one_of
from mxtrain.formats import MXFP8, NVFP4, P_VALUES, SCALE_ROUNDINGS, BlockFormat, norm_constant

ESTIMATORS = ("pre_round", "post_round", "exact")
TENSOR_SCALES = ("static", "dynamic")


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
            element_max_exponent), OCP's rule, which can overflow and then saturates). None for NVFP4, whose scales
            are E4M3, rounded to nearest.
        tensor_scale: NVFP4: where the scale of a whole matrix comes from, a power of two always. ``"dynamic"``: its
            largest element. ``"static"``: the bound of MXNorm's output, for that; for all other operands as "dynamic".
            None for other formats.
        weight_tiles: NVFP4: weights share a scale in tiles of 16 x 16, so that fprop and dgrad see the same weight;
            otherwise in blocks of 16 along the reduced axis, as all other operands do.
        hadamard: NVFP4: both operands of wgrad are Hadamard-transformed along the tokens before their cast.
        stochastic_rounding: NVFP4: output gradients are rounded stochastically, for dgrad and for wgrad.
        high_precision_share: the last share of a model's blocks that ``mxtrain.convert`` leaves as it is.
    """

    name: str
    format: BlockFormat | None
    block_size: int
    scale_rounding: str | None = "rceil"
    tensor_scale: str | None = None
    weight_tiles: bool = False
    hadamard: bool = False
    stochastic_rounding: bool = False
    high_precision_share: float = 0.0

    def __post_init__(self):
        if self.is_nvfp4:
            if self.scale_rounding is not None:
                raise ConfigError(
                    f"scale_rounding = {self.scale_rounding!r} does not apply to recipe {self.name!r}, whose block "
                    "scales are rounded to nearest: leave it unset"
                )
            require_one_of("tensor_scale", self.tensor_scale, TENSOR_SCALES)
        else:
            require_one_of("scale_rounding", self.scale_rounding, SCALE_ROUNDINGS)
        for switch in _FLAGS:
            if not isinstance(getattr(self, switch), bool):
                raise ConfigError(f"{switch} = {getattr(self, switch)!r} is not one of: True, False")
        for switch in ("tensor_scale", *_FLAGS):
            if getattr(self, switch) and not self.is_nvfp4:
                raise ConfigError(f"{switch} = {getattr(self, switch)!r} needs recipe 'nvfp4', not {self.name!r}")
        share = self.high_precision_share
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share < 1:
            raise ConfigError(f"high_precision_share = {share!r} is not a number from 0 to less than 1")

    @property
    def is_nvfp4(self) -> bool:
        """Whether operands are cast to NVFP4, with a scale per tensor and the casts that go with it."""
        return self.format == NVFP4

    @property
    def needs_seeds(self) -> bool:
        """Whether layers need numbers of their own: signs of the transform, keys of stochastic rounding."""
        return self.hadamard or self.stochastic_rounding

    def __str__(self) -> str:
        if self.is_nvfp4:
            return "/".join((self.name, self.tensor_scale, *(flag for flag in _FLAGS if getattr(self, flag))))
        return self.name if self.format is None else f"{self.name}/{self.scale_rounding}"


_FLAGS = ("weight_tiles", "hadamard", "stochastic_rounding")
# What can be set apart from the recipe: in the TOML, in ``mxtrain.convert``.
SWITCHES = ("scale_rounding", "tensor_scale", *_FLAGS, "high_precision_share")
_NVFP4 = Recipe(
    "nvfp4",
    NVFP4,
    NVFP4.block_size,
    scale_rounding=None,
    tensor_scale="static",
    weight_tiles=True,
    hadamard=True,
    stochastic_rounding=True,
    high_precision_share=0.15,
)


RECIPES = {
    "mxfp8": Recipe("mxfp8", MXFP8, MXFP8.block_size),
    # No cast at all: MXNorm's estimate, folding and backward alone. Separates what the norm costs from what the
    # cast costs, and, in float64, lets the gradients be checked to rounding error.
    "unquantized": Recipe("unquantized", None, MXFP8.block_size),
    # As NVIDIA's "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), TransformerEngine and torchao do.
    "nvfp4": _NVFP4,
    "nvfp4_dynamic": replace(_NVFP4, name="nvfp4_dynamic", tensor_scale="dynamic"),
}


def get_recipe(recipe: "str | Recipe", scale_rounding: str | None = None, **switches) -> Recipe:
    """The recipe of that name (a Recipe passes through), with the settings that are given in the place of its own.

    Args:
        scale_rounding, switches: any of ``SWITCHES``; None keeps the recipe's own.

    Raises:
        ConfigError: naming the recipes there are, or a setting that is wrong or does not go with the recipe.
    """
    if not isinstance(recipe, Recipe):
        require_one_of("recipe", recipe, RECIPES)
        recipe = RECIPES[recipe]
    given = {"scale_rounding": scale_rounding, **switches}
    given = {name: value for name, value in given.items() if value is not None}
    return replace(recipe, **given) if given else recipe


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
        if estimator == "post_round" and recipe.is_nvfp4:
            raise ConfigError(
                f"estimator = 'post_round' reads rounded block scales, and those of recipe = {recipe.name!r} follow "
                "from a tensor scale, which follows from the norm; use one of: 'pre_round', 'exact'"
            )
        return estimate
