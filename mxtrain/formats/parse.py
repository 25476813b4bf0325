"""Parses a recipe as written by a user, ``"mxfp8"`` or ``"fprop=nvfp4, dgrad=mxfp8, wgrad=bf16"``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mxtrain.errors import ConfigError, require_one_of
from mxtrain.formats.recipe import (
    BACKWARDS,
    DEFAULT_RECIPE,
    DEQUANTIZED,
    GEMMS,
    RECIPES,
    UNSET,
    LinearRecipe,
    Recipe,
    linear_recipe,
    recipe_with,
)

# Settings that override a recipe, in the TOML and in ``mxtrain.convert``, and the GEMMs that each one changes.
_CHANGES = {
    "scale_rounding": GEMMS,
    "tensor_scale": ("fprop",),
    "weight_tiles": ("fprop", "dgrad"),
    "hadamard": ("wgrad",),
    "stochastic_rounding": ("dgrad", "wgrad"),
    "four_over_six": GEMMS,
    "four_over_six_error": GEMMS,
}
SWITCHES = (*_CHANGES, "backward", "high_precision_share", "high_precision_last")


def get_recipe(recipe: str | LinearRecipe, **switches) -> LinearRecipe:
    """Parse a recipe and override its settings.

    Args:
        recipe: one of ``RECIPES`` for all GEMMs, one name for each ("fprop=nvfp4, dgrad=mxfp8, wgrad=bf16"), or a
            recipe.
        switches: any of ``SWITCHES``; None keeps the recipe's own. In a mixed recipe, a setting changes the GEMMs
            whose format has it. ``backward = "dequantized"`` changes dgrad and wgrad where they have a format.

    Raises:
        ConfigError: for an unknown recipe or GEMM, a wrong setting, or a setting that does not apply to the recipe.
    """
    return get_recipes(recipe, {}, **switches)[0]


def get_recipes(
    recipe: str | LinearRecipe, recipes: Mapping[str, str | LinearRecipe], **switches
) -> tuple[LinearRecipe, dict[str, LinearRecipe]]:
    """Parse the default recipe of a model and the exceptions ``recipes``, by pattern of layer names.

    The settings in ``switches`` change every GEMM whose format has them.

    Raises:
        ConfigError: as ``get_recipe``, and if ``recipes`` is not a mapping.
    """
    if not isinstance(recipes, Mapping):
        raise ConfigError(f'recipes = {recipes!r} is not a table of lines "pattern" = "recipe"')
    parsed = [_parse("recipe", recipe), *(_parse(f"recipes.{pattern!r}", spec) for pattern, spec in recipes.items())]
    given = {name: value for name, value in switches.items() if value is not None}
    for switch in given:
        require_one_of("setting of a recipe", switch, SWITCHES)
    if "high_precision_share" in given and "high_precision_last" in given:
        both = (f"{name} = {given[name]!r}" for name in SWITCHES[-2:])
        raise ConfigError(f"{' and '.join(both)} are both set; leave one of them unset")
    if "backward" in given:
        require_one_of("backward", given["backward"], BACKWARDS)
        # First, so that other settings are refused that no longer change anything.
        parsed = [_switched(recipe, {"backward": given["backward"]}) for recipe in parsed]
    for switch, value in given.items():
        _check_switch(switch, value, parsed)
    default, *others = (_switched(recipe, given) for recipe in parsed)
    return default, dict(zip(recipes, others))


def switches_in_effect(recipes: Sequence[LinearRecipe]) -> dict[str, str | bool | float | None]:
    """Return the value of every one of ``SWITCHES``: for the first GEMM that it changes; the blocks of recipe 0."""
    values = {}
    for switch, gemms in _CHANGES.items():
        found = [getattr(r, switch) for recipe in recipes for r in _named(recipe, gemms) if r.has(switch)]
        values[switch] = found[0] if found else False if UNSET[switch] is False else None
    backward = [BACKWARDS[gemm.dequantizes] for recipe in recipes for gemm in recipe.gemms[1:] if gemm.rounds]
    values["backward"] = backward[0] if backward else None
    return values | {name: getattr(recipes[0], name) for name in SWITCHES[-2:]}


def spec_of(recipe: LinearRecipe) -> str:
    """Return what a user writes for a recipe: its name, or names for all GEMMs where it is for some of them only."""
    only = recipe.fprop.only
    if only == GEMMS:
        return recipe.name
    return ", ".join(f"{gemm}={recipe.name if gemm in only else DEFAULT_RECIPE}" for gemm in GEMMS)


def parse_gemms(field: str, spec: str | LinearRecipe) -> dict[str, Recipe]:
    """Parse a recipe that may leave GEMMs out: GEMM -> recipe, for all three if ``spec`` is one name or a recipe.

    Error messages name the setting ``field``.

    Raises:
        ConfigError: for an unknown recipe or GEMM, or a GEMM that is named twice.
    """
    if not isinstance(spec, str) or "=" not in spec:
        return {gemm: _recipe_for(gemm, field, spec) for gemm in GEMMS}
    of_gemm = {}
    for part in spec.split(","):
        gemm, _, name = (word.strip() for word in part.partition("="))
        require_one_of(f"{field} = {spec!r}: GEMM", gemm, GEMMS)
        if gemm in of_gemm:
            raise ConfigError(f"{field} = {spec!r} names {gemm} twice; name it once")
        of_gemm[gemm] = _recipe_for(gemm, f"{field} = {spec!r}: {gemm}", name)
    return of_gemm


def with_switches(recipe: Recipe, gemm: str, switches: Mapping) -> Recipe:
    """Return the recipe of a GEMM with those ``switches`` that are not None and that its format has.

    ``backward = "dequantized"`` replaces a recipe with a format for dgrad or wgrad, also one that the user named.
    """
    backward = switches.get("backward")
    if backward == "dequantized" and gemm != "fprop" and recipe.format is not None:
        return DEQUANTIZED
    if backward == "quantized" and recipe.dequantizes:
        raise ConfigError(f"backward = 'quantized' gives {gemm} no format; name a recipe, as in '{gemm}=mxfp8'")
    given = {name: value for name, value in switches.items() if value is not None and recipe.has(name)}
    if not given.keys().isdisjoint(SWITCHES[-2:]):
        given = dict.fromkeys(SWITCHES[-2:], 0) | given  # one takes the other's place
    return replace(recipe, **given) if given else recipe


def _switched(recipe: LinearRecipe, switches: Mapping) -> LinearRecipe:
    gemms = (with_switches(getattr(recipe, gemm), gemm, switches) for gemm in GEMMS)
    return linear_recipe(*gemms, recipe.own_name)


def _recipe_for(gemm: str, field: str, recipe: str | LinearRecipe) -> Recipe:
    """Return the recipe of a GEMM in a recipe, which may be a name."""
    if not isinstance(recipe, LinearRecipe):
        require_one_of(field, recipe, RECIPES)
        recipe = RECIPES[recipe]
    own = getattr(recipe, gemm)
    if gemm not in own.only:
        raise ConfigError(f"{field} = {own.name!r} is not for {gemm}; write {spec_of(own)!r}")
    return own


def _parse(field: str, spec: str | LinearRecipe) -> LinearRecipe:
    if isinstance(spec, dict):  # from an unquoted key: layers.0 = "bf16"
        raise ConfigError(f'{field} = {spec!r} is not a string: write a pattern with dots in quotes, "layers.0" = ...')
    of_gemm = parse_gemms(field, spec)
    if missing := [gemm for gemm in GEMMS if gemm not in of_gemm]:
        raise ConfigError(f"{field} = {spec!r} leaves out {' and '.join(missing)}; name all of {', '.join(GEMMS)}")
    named = RECIPES.get(spec) if isinstance(spec, str) else spec
    return linear_recipe(**of_gemm, own_name=named and named.own_name)


def _check_switch(switch: str, value, recipes: list[LinearRecipe]) -> None:
    """Raise ConfigError if the switch changes no GEMM of the recipes. Switching something off is always allowed.

    So is the rule of an earlier version, which a resumed run may need for the recipes of its schedule only.
    """
    gemms = _CHANGES.get(switch)
    if gemms is None or (value is False and UNSET[switch] is False) or value == "rceil_0_18":
        return
    if any(r.has(switch) and r.format is not None for recipe in recipes for r in _named(recipe, gemms)):
        return
    if len(recipes) == 1 and isinstance(recipes[0], Recipe):
        replace(recipes[0], **{switch: value})  # raises the more specific error
        return
    wanted = "a format whose block scales are powers of two" if switch == "scale_rounding" else recipe_with(switch)
    names = ", ".join(repr(name) for name in dict.fromkeys(recipe.name for recipe in recipes))
    raise ConfigError(f"{switch} = {value!r} needs {wanted} for {' or '.join(gemms)}, not {names}; leave it unset")


def _named(recipe: LinearRecipe, gemms: tuple[str, ...]) -> list[Recipe]:
    return [getattr(recipe, gemm) for gemm in gemms]
