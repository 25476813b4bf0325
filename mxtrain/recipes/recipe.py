"""Recipes: what the operands of every GEMM of a linear layer are cast to."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mxtrain.errors import ConfigError, require_one_of
from mxtrain.recipes.formats import MXFP8, NVFP4, P_VALUES, SCALE_ROUNDINGS, BlockFormat, norm_constant

ESTIMATORS = ("pre_round", "post_round", "exact")
TENSOR_SCALES = ("static", "dynamic")
GEMMS = ("fprop", "dgrad", "wgrad")


class LinearRecipe:
    """What a linear layer has: a ``Recipe`` that all its GEMMs share, or a ``MixedRecipe`` with one for each.

    Attributes:
        name: as in the TOML.
        fprop, dgrad, wgrad: the Recipe of each GEMM.
        high_precision_share: the last share of a model's blocks that ``mxtrain.convert`` leaves as it is.
    """

    name: str
    fprop: "Recipe"
    dgrad: "Recipe"
    wgrad: "Recipe"
    high_precision_share: float

    @property
    def gemms(self) -> "tuple[Recipe, Recipe, Recipe]":
        """The recipes of fprop, dgrad and wgrad."""
        return self.fprop, self.dgrad, self.wgrad

    @property
    def needs_signs(self) -> bool:
        """Whether wgrad transforms its operands, with signs of the layer's own or of its norm."""
        return self.wgrad.hadamard

    @property
    def needs_draws(self) -> bool:
        """Whether output gradients are rounded stochastically, with random bits of the layer's own."""
        return self.dgrad.stochastic_rounding or self.wgrad.stochastic_rounding

    @property
    def needs_seeds(self) -> bool:
        """Whether a layer needs any numbers of its own."""
        return self.needs_signs or self.needs_draws


@dataclass(frozen=True)
class Recipe(LinearRecipe):
    """How a GEMM of a linear layer (fprop, dgrad or wgrad) sees its operands; by itself, how all three do.

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
    def fprop(self) -> "Recipe":
        return self

    @property
    def dgrad(self) -> "Recipe":
        return self

    @property
    def wgrad(self) -> "Recipe":
        return self

    def has(self, switch: str) -> bool:
        """Whether that one of ``SWITCHES`` is of any meaning for these casts."""
        return switch == "high_precision_share" or self.is_nvfp4 != (switch == "scale_rounding")

    def __str__(self) -> str:
        if self.is_nvfp4:
            return "/".join((self.name, self.tensor_scale, *(flag for flag in _FLAGS if getattr(self, flag))))
        return self.name if self.format is None else f"{self.name}/{self.scale_rounding}"


_FLAGS = ("weight_tiles", "hadamard", "stochastic_rounding")
# What can be set apart from the recipe, in the TOML and in ``mxtrain.convert``, and the GEMMs that it changes.
_CHANGES = {
    "scale_rounding": GEMMS,
    "tensor_scale": ("fprop",),
    "weight_tiles": ("fprop", "dgrad"),
    "hadamard": ("wgrad",),
    "stochastic_rounding": ("dgrad", "wgrad"),
}
SWITCHES = (*_CHANGES, "high_precision_share")


@dataclass(frozen=True)
class MixedRecipe(LinearRecipe):
    """A recipe for each GEMM of a linear layer, not all the same."""

    fprop: Recipe
    dgrad: Recipe
    wgrad: Recipe

    @property
    def name(self) -> str:
        return ", ".join(f"{gemm}={recipe.name}" for gemm, recipe in zip(GEMMS, self.gemms))

    @property
    def high_precision_share(self) -> float:
        """The largest of the three."""
        return max(recipe.high_precision_share for recipe in self.gemms)

    def __str__(self) -> str:
        return ", ".join(f"{gemm}={recipe}" for gemm, recipe in zip(GEMMS, self.gemms))


def _linear_recipe(fprop: Recipe, dgrad: Recipe, wgrad: Recipe) -> LinearRecipe:
    return fprop if fprop == dgrad == wgrad else MixedRecipe(fprop, dgrad, wgrad)


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
_UNQUANTIZED = Recipe("unquantized", None, MXFP8.block_size)
# The name of a GEMM in high precision. ``mxtrain.convert`` leaves a linear alone whose three GEMMs are that.
HIGH_PRECISION = "bf16"

RECIPES = {
    "mxfp8": Recipe("mxfp8", MXFP8, MXFP8.block_size),
    # No cast at all: MXNorm's estimate, folding and backward alone. Separates what the norm costs from what the
    # cast costs, and, in float64, lets the gradients be checked to rounding error.
    "unquantized": _UNQUANTIZED,
    # As NVIDIA's "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), TransformerEngine and torchao do.
    "nvfp4": _NVFP4,
    "nvfp4_dynamic": replace(_NVFP4, name="nvfp4_dynamic", tensor_scale="dynamic"),
    HIGH_PRECISION: replace(_UNQUANTIZED, name=HIGH_PRECISION),
}


def get_recipe(recipe: str | LinearRecipe, scale_rounding: str | None = None, **switches) -> LinearRecipe:
    """The recipe that a spec stands for (a recipe passes through), with the settings given in the place of its own.

    Args:
        recipe: one of ``RECIPES`` for all GEMMs, or one for each: "fprop=nvfp4, dgrad=mxfp8, wgrad=bf16".
        scale_rounding, switches: any of ``SWITCHES``; None keeps the recipe's own. Of a mixed recipe they change the
            GEMMs whose format has them.

    Raises:
        ConfigError: naming the recipes and GEMMs there are, or a setting that is wrong or does not go with the recipe.
    """
    return get_recipes(recipe, {}, scale_rounding=scale_rounding, **switches)[0]


def get_recipes(
    recipe: str | LinearRecipe, recipes: Mapping[str, str | LinearRecipe], **switches
) -> tuple[LinearRecipe, dict[str, LinearRecipe]]:
    """``get_recipe`` for a model: the recipe of its layers, and those by pattern that differ from it.

    A setting changes every GEMM of any of them whose format has it.

    Raises:
        ConfigError: as ``get_recipe``, and for ``recipes`` that are no table of pattern and spec.
    """
    if not isinstance(recipes, Mapping):
        raise ConfigError(f'recipes = {recipes!r} is not a table of lines "pattern" = "recipe"')
    parsed = [_parse("recipe", recipe), *(_parse(f"recipes.{pattern!r}", spec) for pattern, spec in recipes.items())]
    given = {name: value for name, value in switches.items() if value is not None}
    for switch, value in given.items():
        _check_switch(switch, value, parsed)
    default, *others = (_with_switches(recipe, given) for recipe in parsed)
    return default, dict(zip(recipes, others))


def switches_in_effect(recipes: Sequence[LinearRecipe]) -> dict[str, str | bool | float | None]:
    """Every one of ``SWITCHES`` as it is for the first GEMM that it changes; the share is that of the first recipe."""
    values = {}
    for switch, gemms in _CHANGES.items():
        found = [getattr(r, switch) for recipe in recipes for r in _changed(recipe, gemms) if r.has(switch)]
        values[switch] = found[0] if found else False if switch in _FLAGS else None
    return {**values, "high_precision_share": recipes[0].high_precision_share}


def _parse(field: str, spec: str | LinearRecipe) -> LinearRecipe:
    if isinstance(spec, LinearRecipe):
        return spec
    if isinstance(spec, dict):  # from an unquoted key: layers.0 = "bf16"
        raise ConfigError(f'{field} = {spec!r} is not a string: write a pattern with dots in quotes, "layers.0" = ...')
    if not isinstance(spec, str) or "=" not in spec:
        require_one_of(field, spec, RECIPES)
        return RECIPES[spec]
    of_gemm = {}
    for part in spec.split(","):
        gemm, _, name = (word.strip() for word in part.partition("="))
        require_one_of(f"{field} = {spec!r}: GEMM", gemm, GEMMS)
        if gemm in of_gemm:
            raise ConfigError(f"{field} = {spec!r} names {gemm} twice")
        require_one_of(f"{field} = {spec!r}: {gemm}", name, RECIPES)
        of_gemm[gemm] = RECIPES[name]
    if missing := [gemm for gemm in GEMMS if gemm not in of_gemm]:
        raise ConfigError(f"{field} = {spec!r} says nothing of {' and '.join(missing)}; name all of {', '.join(GEMMS)}")
    return _linear_recipe(**of_gemm)


def _changed(recipe: LinearRecipe, gemms: tuple[str, ...]) -> list[Recipe]:
    return [getattr(recipe, gemm) for gemm in gemms]


def _check_switch(switch: str, value, recipes: list[LinearRecipe]) -> None:
    """Raise ConfigError if the switch changes no GEMM of the recipes; off (False) is true of any."""
    gemms = _CHANGES.get(switch)
    if gemms is None or value is False:
        return
    if any(r.has(switch) and r.format is not None for recipe in recipes for r in _changed(recipe, gemms)):
        return
    if len(recipes) == 1 and isinstance(recipes[0], Recipe):
        replace(recipes[0], **{switch: value})  # which says what does not go together
        return
    wanted = "a format whose block scales are powers of two" if switch == "scale_rounding" else "recipe 'nvfp4'"
    names = ", ".join(repr(name) for name in dict.fromkeys(recipe.name for recipe in recipes))
    raise ConfigError(f"{switch} = {value!r} needs {wanted} for {' or '.join(gemms)}; the recipes are: {names}")


def _with_switches(recipe: LinearRecipe, given: dict) -> LinearRecipe:
    if not given:
        return recipe
    return _linear_recipe(*(replace(r, **{k: v for k, v in given.items() if r.has(k)}) for r in recipe.gemms))


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
