"""Formats and recipes, without PyTorch, so that the command line can check settings before it loads PyTorch.

A format says how elements are stored. A recipe says to which format each GEMM of a linear layer casts its operands.
Formats and recipes have names.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import Literal, get_args

from mxtrain.errors import ConfigError, require_one_of, require_positive_integer
from mxtrain.launch import Keyed

ScaleRounding = Literal["rceil", "rceil_0_18", "floor"]
SCALE_ROUNDINGS = get_args(ScaleRounding)
TensorScale = Literal["static", "dynamic", "row"]
TENSOR_SCALES = get_args(TensorScale)
FourOverSix = Literal[False, "weights", "activations", "both"]
FOUR_OVER_SIX = get_args(FourOverSix)
_FOUR_OVER_SIX_OF = {"weight": "weights", "input": "activations"}
FourOverSixError = Literal["mae", "mse"]
FOUR_OVER_SIX_ERRORS = get_args(FourOverSixError)
Backward = Literal["quantized", "dequantized"]
BACKWARDS = get_args(Backward)
LONGEST_BLOCK = 32
"""This number of rows is whole blocks in every format"""


@dataclass(frozen=True)
class Layout:
    """How compressed-tensors stores a format.

    Attributes:
        compression: ``format`` in compressed-tensors' config.
        weights: ``QuantizationArgs`` of the weights.
        activations: ``QuantizationArgs`` of the inputs; None if they stay in high precision.
    """

    compression: str
    weights: dict
    activations: dict | None


def quantization_args(bits: int, block_size: int, strategy: str, scale_dtype: str, dynamic: bool = False) -> dict:
    """Return compressed-tensors' ``QuantizationArgs``."""
    return {
        "num_bits": bits,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "group_size": block_size,
        "scale_dtype": scale_dtype,
        "dynamic": dynamic,
    }


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Format:
    """A format in which ``block_size`` consecutive elements share one scale (OCP Microscaling Formats v1.0).

    By default, scales are powers of two (E8M0), plain PyTorch computes, and matrix products multiply values in bf16.
    So a new format of this kind is a few numbers, which ``mxtrain.formats.register_format`` makes known. A format with
    its own kernels or scales names a subclass of ``FormatOps``.

    Attributes:
        name: the usual name, in lower case.
        block_size: elements per scale, along the reduction axis of the GEMM; divides ``LONGEST_BLOCK``.
        element_max: largest finite element magnitude.
        element_max_exponent: floor(log2(element_max)), the exponent that FLOOR scale rounding targets.
        element_bits: bits of an element; a scale has 8.
        element: name of PyTorch's dtype of the codes.
        settings: the settings of a ``Recipe`` that change the cast -> the allowed values.
        has_tensor_scale: whether a matrix has a scale besides the scales of its blocks. Its codes then depend on all of
            its rows: several matrices are not one native operand, and experts and other processes cast rows themselves.
        has_signs: whether the Hadamard transform of a recipe takes random signs. Otherwise, the transform is fixed.
        is_native: whether MX tensor cores multiply codes. Otherwise, mode "native" multiplies values.
        merges: whether mode "fp8_merged" gives codes to FP8 tensor cores. Otherwise, that mode refuses the format.
        gradients_of: for a format of output gradients alone, the name of the other operand's format. A trial product
            says whether tensor cores multiply the two formats.
        layout: how an export stores codes and scales; None for a format that cannot be exported.
        implementation: where the subclass of ``FormatOps`` is: "module:class".
    """

    name: str
    block_size: int
    element_max: float
    element_max_exponent: int
    element_bits: int
    element: str
    settings: Mapping[str, tuple] = field(default_factory=lambda: {"scale_rounding": SCALE_ROUNDINGS})
    has_tensor_scale: bool = False
    has_signs: bool = False
    is_native: bool = False
    merges: bool = False
    gradients_of: str | None = None
    layout: Layout | None = None
    implementation: str = "mxtrain.formats.mx.reference:MXOps"

    @property
    def bytes_per_element(self) -> float:
        """Bytes of codes and block scales per element."""
        return self.element_bits / 8 + 1 / self.block_size

    @cached_property
    def ops(self):
        """The ``mxtrain.formats.ops.FormatOps`` that computes with this format."""
        module, _, name = self.implementation.partition(":")
        return getattr(import_module(module), name)(self)

    def __str__(self) -> str:
        return self.name.upper()

    def __repr__(self) -> str:
        return f"Format({self.name!r})"

    def __reduce__(self):
        return format_named, (self.name,)  # copies are the same object


FORMATS: dict[str, Format] = {}
"""Name -> format; ``mxtrain.formats.register_format`` adds formats"""


def format_named(name: str) -> Format:
    """Return the format that is registered under this name."""
    return FORMATS[name]


_NUMBERS = {"block_size": LONGEST_BLOCK, "element_max": math.inf, "element_max_exponent": 0, "element_bits": 16}
HIGH_PRECISION = Format(
    name="high precision", **_NUMBERS, element="bfloat16", implementation="mxtrain.formats.ops:FormatOps"
)
"""What computes for recipes without a format: operands keep their values"""


GEMMS = ("fprop", "dgrad", "wgrad")
FLAGS = ("weight_tiles", "hadamard", "stochastic_rounding")
"""Settings of a recipe that are on or off"""
UNSET = {
    "scale_rounding": None,
    "tensor_scale": None,
    **dict.fromkeys(FLAGS, False),
    "four_over_six": False,
    "four_over_six_error": "mae",
}
"""Values of settings in the recipes of formats that do not have them"""


class LinearRecipe(Keyed):
    """The recipe of a linear layer: a ``Recipe`` for all three GEMMs, or a ``MixedRecipe`` with one for each.

    Attributes:
        name: as in the TOML.
        fprop, dgrad, wgrad: the Recipe of each GEMM.
        high_precision_share: share of a model's last blocks that ``mxtrain.convert`` does not change.
        high_precision_last: number of these blocks, instead of a share; 0 uses the share.
        own_name: a MixedRecipe's name; None without a name.
    """

    name: str
    fprop: "Recipe"
    dgrad: "Recipe"
    wgrad: "Recipe"
    high_precision_share: float
    high_precision_last: int
    own_name: str | None = None

    @property
    def gemms(self) -> "tuple[Recipe, Recipe, Recipe]":
        """The recipes of fprop, dgrad and wgrad."""
        return self.fprop, self.dgrad, self.wgrad

    @property
    def quantizes(self) -> bool:
        """Whether any GEMM casts its operands to a format."""
        return any(gemm.format is not None for gemm in self.gemms)

    @property
    def tensor_scaled(self) -> Format | None:
        """The format of the first GEMM with a tensor scale; None if no GEMM has a tensor scale."""
        return next((gemm.format for gemm in self.gemms if gemm.format and gemm.format.has_tensor_scale), None)

    @property
    def has_one_code(self) -> bool:
        """Whether fprop and dgrad read the same codes of a weight, in tiles that depend on no other tile."""
        fprop, dgrad = self.fprop, self.dgrad
        is_same = (dgrad.format, dgrad.scale_rounding, dgrad.weight_tiles) == (fprop.format, fprop.scale_rounding, True)
        return fprop.weight_tiles and fprop.sends_rows and (is_same or dgrad.dequantizes)

    def joins(self, mode: str) -> bool:
        """Return whether one operand takes several matrices in this mode.

        A GEMM in high precision needs no cast, so joining its operands would copy them. A native operand has only one
        tensor scale, but every matrix needs its own. The same holds for an operand with an exact tensor scale.
        """
        one_scale = mode == "native" and self.tensor_scaled
        return all(gemm.rounds and not gemm.error_for("weight") for gemm in self.gemms) and not one_scale

    @property
    def input_of_wgrad(self) -> "tuple[Recipe, int]":
        """The recipe that casts X for wgrad, and the dimension along which its blocks lie."""
        return (self.fprop, 1) if self.wgrad.dequantizes else (self.wgrad, 0)

    @property
    def needs_signs(self) -> bool:
        """Whether wgrad's Hadamard transform takes signs, from the layer or its norm."""
        return self.wgrad.hadamard and self.wgrad.format.has_signs

    @property
    def needs_draws(self) -> bool:
        """Whether output gradients are rounded stochastically, which takes random bits from the layer's key."""
        return self.dgrad.stochastic_rounding or self.wgrad.stochastic_rounding


@dataclass(frozen=True, eq=False)
class Recipe(LinearRecipe):
    """How one GEMM casts its two operands. As the recipe of a layer, it applies to fprop, dgrad and wgrad alike.

    Every operand is cast in blocks along the axis that its GEMM reduces over: fprop along the input features,
    dgrad along the output features, wgrad along the tokens.

    Attributes:
        name: the recipe's name in the TOML.
        format: the format of both operands; None leaves them in high precision.
        block_size: elements per scale, and per block maximum of MXNorm's estimate; None takes the format's.
        scale_rounding: how block scales are rounded to a power of two. ``"rceil"`` is the smallest power of two that
            is at least fp32(amax * fp32(1 / element_max)), as in TransformerEngine and in torchao after 0.18.
            ``"rceil_0_18"`` is torchao 0.18's 2^ceil(log2(amax / element_max)) in fp32, so an amax within its rounding
            error above a power of two times element_max saturates. ``"floor"`` is OCP's rule,
            2^(floor(log2 amax) - element_max_exponent); elements that overflow saturate. None for a format with other
            scales.
        tensor_scale: the source of the scale of a whole matrix, a power of two. ``"dynamic"`` takes the largest
            element. ``"static"`` takes the bound of MXNorm's output for this output, and the largest element for all
            other operands. ``"row"`` gives every row of fprop's X a scale from the row's largest element, so no row
            depends on other rows; other operands are as with "dynamic". None for a format without tensor scales.
        weight_tiles: weights have one scale per square tile, so fprop and dgrad use the same codes. If False,
            weights have blocks along the reduced axis, like all other operands.
        hadamard: both operands of wgrad are Hadamard-transformed along the tokens before their cast.
        stochastic_rounding: output gradients are rounded stochastically, for dgrad and wgrad.
        four_over_six: ``"weights"``, ``"activations"`` or ``"both"``: a block's largest element becomes 4 instead of 6
            where the error of the block gets smaller. These operands have exact tensor scales, which are not rounded to
            powers of two. Output gradients never take part.
        four_over_six_error: the error of a block: the sum of magnitudes (``"mae"``) or of squares (``"mse"``).
        dequantizes: for dgrad and wgrad, without a format: W and X are the decoded values of fprop's codes, and output
            gradients are not rounded.
        gradient_format: the format of output gradients if it differs from ``format``, else None.
        only: the GEMMs that the recipe is for. Recipes that differ only in this field are equal.
        high_precision_share, high_precision_last: as in ``LinearRecipe``. Equal recipes may differ in them.
    """

    name: str
    format: Format | None
    block_size: int | None = None
    scale_rounding: ScaleRounding | None = "rceil"
    tensor_scale: TensorScale | None = None
    weight_tiles: bool = False
    hadamard: bool = False
    stochastic_rounding: bool = False
    four_over_six: FourOverSix = False
    four_over_six_error: FourOverSixError = "mae"
    dequantizes: bool = False
    gradient_format: Format | None = None
    only: tuple[str, ...] = field(default=GEMMS, compare=False)
    high_precision_share: float = field(default=0.0, compare=False)
    high_precision_last: int = field(default=0, compare=False)

    def __post_init__(self):
        if self.format is not None and not isinstance(self.format, Format):
            require_one_of("format", self.format, (None, *FORMATS.values()))
        if self.block_size is None and self.format is not None:
            object.__setattr__(self, "block_size", self.format.block_size)
        if self.format is None:
            require_positive_integer("block_size", self.block_size)
        else:
            require_one_of("block_size", self.block_size, (self.format.block_size,))
        of, fmt = self.gradient_format, self.format
        if of is not None and (fmt is None or getattr(of, "gradients_of", None) != fmt.name):
            raise ConfigError(f"gradient_format = {of!r} is not a gradient format beside {fmt}; leave it unset")
        for setting, unset in UNSET.items():
            value = getattr(self, setting)
            if setting in FLAGS:
                require_one_of(setting, value, (True, False))
            if self.has(setting):
                require_one_of(setting, value, self._rules.settings[setting])
            elif value != unset or type(value) is not type(unset):
                if setting == "scale_rounding":
                    raise ConfigError(
                        f"scale_rounding = {value!r} does not apply to recipe {self.name!r}, whose block scales are "
                        "rounded to nearest; leave it unset"
                    )
                raise ConfigError(f"{setting} = {value!r} needs {recipe_with(setting)}, not {self.name!r}")
        share = self.high_precision_share
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share < 1:
            raise ConfigError(f"high_precision_share = {share!r} is not a number from 0 to less than 1")
        last = self.high_precision_last
        if not isinstance(last, int) or isinstance(last, bool) or last < 0:
            raise ConfigError(f"high_precision_last = {last!r} is not a number of blocks, 0 or more")
        self._register()

    def has_tiles(self, role: str) -> bool:
        """Whether matrices of this role ("input", "weight" or "gradient") have one scale per square tile."""
        return role == "weight" and self.weight_tiles

    @property
    def rounds(self) -> bool:
        """Whether the GEMM multiplies values of a format: decoded from its own codes, or from fprop's."""
        return self.format is not None or self.dequantizes

    @property
    def sends_rows(self) -> bool:
        """Whether rows are codes and block scales alone, so that rows can be sent one by one."""
        return self.format is not None and not self.format.has_tensor_scale

    @cached_property
    def of_gradients(self) -> "Recipe":
        """The recipe that casts output gradients."""
        fmt = self.gradient_format
        return self if fmt is None else replace(self, format=fmt, gradient_format=None)

    @property
    def _rules(self) -> Format:
        return HIGH_PRECISION if self.format is None else self.format

    @property
    def ops(self):
        """The ``mxtrain.formats.ops.FormatOps`` that computes with this recipe's operands."""
        return self._rules.ops

    @property
    def fprop(self) -> "Recipe":
        return self

    @property
    def dgrad(self) -> "Recipe":
        return self

    @property
    def wgrad(self) -> "Recipe":
        return self

    def error_for(self, role: str) -> str:
        """The error by which four over six casts operands of a role ("input", "weight", "gradient"); empty for none."""
        takes_part = role in _FOUR_OVER_SIX_OF and self.four_over_six in ("both", _FOUR_OVER_SIX_OF[role])
        return self.four_over_six_error if takes_part else ""

    def has(self, switch: str) -> bool:
        """Whether ``switch``, one of ``SWITCHES``, applies to this format."""
        return switch.startswith("high_precision") or switch in self._rules.settings

    def __str__(self) -> str:
        if self.format is None:
            return self.name
        values = {setting: getattr(self, setting) for setting in self.format.settings}
        error = values.pop("four_over_six_error", None)
        if self.four_over_six:
            values["four_over_six"] = f"four over six of {self.four_over_six} by {error}"
        return "/".join((self.name, *(name if value is True else value for name, value in values.items() if value)))


@dataclass(frozen=True, eq=False)
class MixedRecipe(LinearRecipe):
    """A recipe for each GEMM of a linear layer, where the three recipes are not all equal.

    A MixedRecipe with a name can be registered. Its parts then have this name, unless they are registered themselves.
    """

    fprop: Recipe
    dgrad: Recipe
    wgrad: Recipe
    own_name: str | None = field(default=None, compare=False)

    def __post_init__(self):
        self._register()

    @property
    def name(self) -> str:
        return self.own_name or ", ".join(f"{gemm}={recipe.name}" for gemm, recipe in zip(GEMMS, self.gemms))

    @property
    def high_precision_share(self) -> float:
        """The largest of the three."""
        return max(recipe.high_precision_share for recipe in self.gemms)

    @property
    def high_precision_last(self) -> int:
        """The largest of the three."""
        return max(recipe.high_precision_last for recipe in self.gemms)

    def __str__(self) -> str:
        return ", ".join(f"{gemm}={recipe}" for gemm, recipe in zip(GEMMS, self.gemms))


def linear_recipe(fprop: Recipe, dgrad: Recipe, wgrad: Recipe, own_name: str | None = None) -> LinearRecipe:
    """Return the recipe of a linear whose GEMMs have these recipes."""
    if fprop.format is None:  # there are no codes to decode
        dgrad, wgrad = (fprop if gemm.dequantizes else gemm for gemm in (dgrad, wgrad))
    return fprop if fprop == dgrad == wgrad else MixedRecipe(fprop, dgrad, wgrad, own_name)


def recipe_of_norm(fed: Sequence[LinearRecipe]) -> LinearRecipe:
    """Return the recipe of a norm that feeds linears with these recipes, which agree on fprop.

    If any linear transforms its wgrad operands, the norm draws the signs for all.
    """
    return max(fed, key=lambda recipe: recipe.needs_signs)


RECIPES: dict[str, LinearRecipe] = {}
"""Name -> recipe; ``register_format`` adds recipes"""
DEFAULT_RECIPE = "mxfp8"
# The recipe of a GEMM in high precision. ``mxtrain.convert`` does not swap a linear with this recipe for all GEMMs.
HIGH_PRECISION_RECIPE = "bf16"
DEQUANTIZED = Recipe("dequantized", None, LONGEST_BLOCK, dequantizes=True, only=("dgrad", "wgrad"))


def register_format(format: Format | None, *recipes: LinearRecipe) -> None:
    """Let settings and ``mxtrain.convert`` name a format and its recipes.

    A job calls this in a module that ``experimental.custom_import`` names.

    Raises:
        ConfigError: for a name that is taken, or a block size that does not divide ``LONGEST_BLOCK``.
    """
    if format is not None:
        if LONGEST_BLOCK % format.block_size:
            raise ConfigError(f"format {format.name!r}: block_size = {format.block_size} must divide {LONGEST_BLOCK}")
        if FORMATS.setdefault(format.name, format) is not format:
            raise ConfigError(f"format {format.name!r} is already registered; choose another name")
    for recipe in recipes:
        if RECIPES.setdefault(recipe.name, recipe) is not recipe:
            raise ConfigError(f"recipe {recipe.name!r} is already registered; choose another name")


def recipe_with(setting: str) -> str:
    """Return the first recipe that has a setting, in words."""
    return f"recipe {next((name for name, recipe in RECIPES.items() if recipe.fprop.has(setting)), None)!r}"
