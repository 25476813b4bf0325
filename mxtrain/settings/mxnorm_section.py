"""The recipes, the schedule and the guard that the settings of [mxnorm] describe."""

from mxtrain.errors import ConfigError
from mxtrain.recipes.parse import SWITCHES, get_recipes
from mxtrain.recipes.recipe import RMSEstimate
from mxtrain.recipes.schedule import CHANGE_KEYS, RecipeChange, ScheduleEntry, parse_entries, require_no_norm_keys
from mxtrain.settings.registry import quantizing_among
from mxtrain.settings.values import Settings

SCHEDULE, GUARD = "mxnorm.schedule", "mxnorm.guard"


def check_recipes(s: Settings) -> None:
    """Raise ConfigError for recipes, a schedule or a guard that cannot be, or do not go with the converter."""
    section = s.section("mxnorm")
    switches = switches_of(section)
    try:
        recipe, _ = get_recipes(s["mxnorm.recipe"], s["mxnorm.recipes"], **switches)
        RMSEstimate.for_recipe(recipe.fprop, s["mxnorm.p"], s["mxnorm.estimator"])
    except ConfigError as error:
        raise ConfigError(f"mxnorm.{error}") from None
    guard = s.section("mxnorm.guard")
    schedule_of(section, s["training.steps"])
    fallback_of(section, guard)
    converter, *_ = quantizing_among(s["model.converters"])
    if converter != "mxnorm":
        for index, entry in enumerate(s[SCHEDULE]):
            require_no_norm_keys(entry, f"{SCHEDULE}[{index}]", converter)
        require_no_norm_keys(vars(guard), GUARD, converter)


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
