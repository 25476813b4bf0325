"""Recipes: which format each GEMM of a linear layer casts its operands to; and how MXNorm estimates the RMS."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Literal, get_args

from mxtrain.errors import ConfigError, require_one_of, require_positive_integer
from mxtrain.recipes.formats import (
    MXFP8,
    NVFP4,
    P_VALUES,
    SCALE_ROUNDINGS,
    BlockFormat,
    P,
    ScaleRounding,
    norm_constant,
)

Estimator = Literal["pre_round", "post_round", "exact"]
ESTIMATORS = get_args(Estimator)
TensorScale = Literal["static", "dynamic"]
TENSOR_SCALES = get_args(TensorScale)
GEMMS = ("fprop", "dgrad", "wgrad")
FLAGS = ("weight_tiles", "hadamard", "stochastic_rounding")
"""Fields of an NVFP4 recipe that are on or off"""


class Keyed:
    """Base class of frozen dataclasses that compiled code takes as a text: their key, by which ``from_key`` finds them.

    They are compared by their keys. Dynamo makes every number that has changed since the last compilation an input of
    the graph. A text stays a constant, and another text is compiled anew. So an ``untraced`` function takes the key in
    the place of the numbers, and traced code compares keys. PyTorch 2.13 and 2.15 stop with an error if numbers that
    have changed are compared.

    Subclasses are declared with ``eq=False``, and their ``__post_init__`` calls ``_register``.

    Attributes:
        key: names the class and the values of all fields with ``compare=True``. Objects with the same key compute the
            same.
    """

    key: str

    def __eq__(self, other) -> bool:
        return isinstance(other, Keyed) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def _register(self) -> None:
        values = [getattr(self, field.name) for field in fields(self) if field.compare]
        key = repr((type(self).__qualname__, *(value.key if isinstance(value, Keyed) else value for value in values)))
        object.__setattr__(self, "key", key)
        _REGISTERED[key] = self

    def __setstate__(self, state: dict) -> None:
        # A copy, maybe from another process, does not run __init__.
        self.__dict__.update(state)
        self._register()


_REGISTERED: dict[str, Keyed] = {}


def from_key(key: str):
    """Return the object with this key."""
    return _REGISTERED[key]


class LinearRecipe(Keyed):
    """The recipe of a linear layer: a ``Recipe`` for all three GEMMs, or a ``MixedRecipe`` with one for each.

    Attributes:
        name: as in the TOML.
        fprop, dgrad, wgrad: the Recipe of each GEMM.
        high_precision_share: share of a model's blocks, the last ones, that ``mxtrain.convert`` does not change.
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
        """Whether wgrad Hadamard-transforms its operands, which takes signs from the layer or its norm."""
        return self.wgrad.hadamard

    @property
    def needs_draws(self) -> bool:
        """Whether output gradients are rounded stochastically, which takes random bits from the layer's key."""
        return self.dgrad.stochastic_rounding or self.wgrad.stochastic_rounding

    @property
    def needs_seeds(self) -> bool:
        """Whether a layer needs signs or a key."""
        return self.needs_signs or self.needs_draws


@dataclass(frozen=True, eq=False)
class Recipe(LinearRecipe):
    """How one GEMM casts its two operands. As the recipe of a layer, it applies to fprop, dgrad and wgrad alike.

    Every operand is cast in blocks along the axis that its GEMM reduces over: fprop along the input features,
    dgrad along the output features, wgrad along the tokens.

    Attributes:
        name: the recipe's name in the TOML.
        format: the format of both operands; None leaves them in high precision.
        block_size: elements per scale, and per block maximum of MXNorm's estimate.
        scale_rounding: how block scales are rounded to a power of two. ``"rceil"`` is
            2^ceil(log2(amax / element_max)) in fp32, so an amax within its rounding error above a power of two times
            element_max saturates. ``"floor"`` is OCP's rule, 2^(floor(log2 amax) - element_max_exponent); elements
            that overflow saturate. None for NVFP4: its scales are E4M3, rounded to nearest.
        tensor_scale: NVFP4: the source of the scale of a whole matrix, always a power of two. ``"dynamic"`` takes the
            largest element. ``"static"`` takes the bound of MXNorm's output for that output, and the largest element
            for all other operands. None for other formats.
        weight_tiles: NVFP4: weights have one scale per tile of 16 x 16, so that fprop and dgrad see the same weight.
            If False, weights have blocks of 16 along the reduced axis, like all other operands.
        hadamard: NVFP4: both operands of wgrad are Hadamard-transformed along the tokens before their cast.
        stochastic_rounding: NVFP4: output gradients are rounded stochastically, for dgrad and wgrad.
        high_precision_share: share of a model's blocks, the last ones, that ``mxtrain.convert`` does not change. Not
            compared when recipes are: a layer computes the same.
    """

    name: str
    format: BlockFormat | None
    block_size: int
    scale_rounding: ScaleRounding | None = "rceil"
    tensor_scale: TensorScale | None = None
    weight_tiles: bool = False
    hadamard: bool = False
    stochastic_rounding: bool = False
    high_precision_share: float = field(default=0.0, compare=False)

    def __post_init__(self):
        require_one_of("format", self.format, (None, MXFP8, NVFP4))
        if self.format is None:
            require_positive_integer("block_size", self.block_size)
        else:
            require_one_of("block_size", self.block_size, (self.format.block_size,))
        if self.is_nvfp4:
            if self.scale_rounding is not None:
                raise ConfigError(
                    f"scale_rounding = {self.scale_rounding!r} does not apply to recipe {self.name!r}, whose block "
                    "scales are rounded to nearest: leave it unset"
                )
            require_one_of("tensor_scale", self.tensor_scale, TENSOR_SCALES)
        else:
            require_one_of("scale_rounding", self.scale_rounding, SCALE_ROUNDINGS)
        for switch in FLAGS:
            if not isinstance(getattr(self, switch), bool):
                raise ConfigError(f"{switch} = {getattr(self, switch)!r} is not one of: True, False")
        for switch in ("tensor_scale", *FLAGS):
            value, unset = getattr(self, switch), None if switch == "tensor_scale" else False
            if value is not unset and not self.is_nvfp4:
                raise ConfigError(f"{switch} = {value!r} needs recipe 'nvfp4', not {self.name!r}")
        share = self.high_precision_share
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share < 1:
            raise ConfigError(f"high_precision_share = {share!r} is not a number from 0 to less than 1")
        self._register()

    @property
    def is_nvfp4(self) -> bool:
        """Whether operands are cast to NVFP4."""
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
        """Whether ``switch``, one of ``SWITCHES``, applies to this format."""
        return switch == "high_precision_share" or self.is_nvfp4 != (switch == "scale_rounding")

    def __str__(self) -> str:
        if self.is_nvfp4:
            return "/".join((self.name, self.tensor_scale, *(flag for flag in FLAGS if getattr(self, flag))))
        return self.name if self.format is None else f"{self.name}/{self.scale_rounding}"


@dataclass(frozen=True, eq=False)
class MixedRecipe(LinearRecipe):
    """A recipe for each GEMM of a linear layer. The three are not all equal."""

    fprop: Recipe
    dgrad: Recipe
    wgrad: Recipe

    def __post_init__(self):
        self._register()

    @property
    def name(self) -> str:
        return ", ".join(f"{gemm}={recipe.name}" for gemm, recipe in zip(GEMMS, self.gemms))

    @property
    def high_precision_share(self) -> float:
        """The largest of the three."""
        return max(recipe.high_precision_share for recipe in self.gemms)

    def __str__(self) -> str:
        return ", ".join(f"{gemm}={recipe}" for gemm, recipe in zip(GEMMS, self.gemms))


def linear_recipe(fprop: Recipe, dgrad: Recipe, wgrad: Recipe) -> LinearRecipe:
    """Return the recipe of a linear with these recipes of its GEMMs."""
    return fprop if fprop == dgrad == wgrad else MixedRecipe(fprop, dgrad, wgrad)


def recipe_of_norm(fed: Sequence[LinearRecipe]) -> LinearRecipe:
    """Return the recipe of a norm that feeds linears with these recipes, which agree on fprop.

    If any linear transforms its wgrad operands, the norm draws the signs for all.
    """
    return max(fed, key=lambda recipe: recipe.needs_signs)


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

    p: P
    estimator: Estimator
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
    def for_recipe(
        cls, recipe: Recipe, p: P = 2, estimator: Estimator = "pre_round", eps: float = 1e-5
    ) -> "RMSEstimate":
        """Return the estimate over the blocks of ``recipe``.

        Raises:
            ConfigError: for a wrong setting, or for "post_round" with a recipe that has no power-of-two scales.
        """
        estimate = cls(p, estimator, eps, recipe.block_size)
        if estimator == "post_round" and (recipe.format is None or recipe.is_nvfp4):
            why = f"and those of recipe = {recipe.name!r} follow from a tensor scale, which follows from the norm"
            if recipe.format is None:
                why = f"and recipe = {recipe.name!r} has none"
            raise ConfigError(
                f"estimator = 'post_round' reads rounded block scales, {why}; use one of: 'pre_round', 'exact'"
            )
        return estimate


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
# The recipe of a GEMM in high precision. ``mxtrain.convert`` does not swap a linear with this recipe for all GEMMs.
HIGH_PRECISION = "bf16"

RECIPES = {
    "mxfp8": Recipe("mxfp8", MXFP8, MXFP8.block_size),
    # No cast: only MXNorm's estimate, folding and backward. Separates the effects of norm and cast, and lets
    # tests check the gradients in float64.
    "unquantized": _UNQUANTIZED,
    # The recipe of NVIDIA's "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), TransformerEngine and
    # torchao.
    "nvfp4": _NVFP4,
    "nvfp4_dynamic": replace(_NVFP4, name="nvfp4_dynamic", tensor_scale="dynamic"),
    HIGH_PRECISION: replace(_UNQUANTIZED, name=HIGH_PRECISION),
}
