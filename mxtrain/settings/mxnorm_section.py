"""Which converters read the settings of [mxnorm], and the recipes, schedule and guard that these describe."""

from collections.abc import Iterable

from mxtrain.errors import ConfigError
from mxtrain.recipes.parse import SWITCHES, get_recipes
from mxtrain.recipes.recipe import RMSEstimate
from mxtrain.recipes.schedule import CHANGE_KEYS, RecipeChange, ScheduleEntry, parse_entries, require_no_norm_keys

SCHEDULE, GUARD = "mxnorm.schedule", "mxnorm.guard"
QUANTIZING_CONVERTERS = ("mxnorm", "mx_linear")


def quantizing_among(converters: Iterable[str]) -> list[str]:
    """Return the names of mxtrain's quantizing converters among ``converters``."""
    return [name for name in converters if name in QUANTIZING_CONVERTERS]


def check_recipes(s) -> None:
    """Raise ConfigError for recipes, a schedule or a guard that cannot be, or do not go with the converter.

    ``s`` has the values of a job that quantizes, as attributes.
    """
    try:
        recipe, _ = get_recipes(s.mxnorm.recipe, s.mxnorm.recipes, **switches_of(s.mxnorm))
        RMSEstimate.for_recipe(recipe.fprop, s.mxnorm.p, s.mxnorm.estimator)
    except ConfigError as error:
        raise ConfigError(f"mxnorm.{error}") from None
    schedule_of(s.mxnorm, s.training.steps)
    fallback_of(s.mxnorm, s.mxnorm.guard)
    converter, *_ = quantizing_among(s.model.converters)
    if converter != "mxnorm":
        for index, entry in enumerate(s.mxnorm.schedule):
            require_no_norm_keys(entry, f"{SCHEDULE}[{index}]", converter)
        require_no_norm_keys(vars(s.mxnorm.guard), GUARD, converter)


def switches_of(section) -> dict:
    """The settings of [mxnorm] that override those of its recipes."""
    return {switch: getattr(section, switch) for switch in SWITCHES}


def schedule_of(section, steps: int) -> list[ScheduleEntry]:
    """The entries of [[mxnorm.schedule]] in a run of so many steps; ``section`` has the settings of [mxnorm]."""
    return parse_entries(section.schedule, steps, switches_of(section), SCHEDULE)


def fallback_of(section, guard) -> RecipeChange | None:
    """What the guard with the settings ``guard`` changes; None if there is no guard."""
    given = {key: getattr(guard, key) for key in CHANGE_KEYS}
    is_on = any(value is not None for value in given.values())
    return RecipeChange.parse(GUARD, given, switches_of(section), "set one of the two") if is_on else None
