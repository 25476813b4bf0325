"""Which converters read the settings of [mxnorm], and the recipes and the schedule that these describe."""

from collections.abc import Iterable, Iterator

from mxtrain.errors import ConfigError, errors_begin_with
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.parse import SWITCHES, get_recipes
from mxtrain.formats.recipe import LinearRecipe
from mxtrain.formats.schedule import ScheduleEntry, parse_entries

SCHEDULE, FSDP_GATHER = "mxnorm.schedule", "mxnorm.fsdp_gather"
QUANTIZING_CONVERTERS = ("mxnorm", "mx_linear")


def quantizing_among(converters: Iterable[str]) -> list[str]:
    return [name for name in converters if name in QUANTIZING_CONVERTERS]


def check_recipes(s) -> None:
    """Raise ConfigError for recipes or a schedule that cannot be, or do not go with the converter.

    ``s`` has the values of a job that quantizes, as attributes.
    """
    with errors_begin_with("mxnorm."):
        recipe, others = get_recipes(s.mxnorm.recipe, s.mxnorm.recipes, **switches_of(s.mxnorm))
        RMSEstimate.for_recipe(recipe.fprop, s.mxnorm.p, s.mxnorm.estimator)
    if s.mxnorm.fsdp_gather == "quantized":
        _check_codes([recipe, *others.values()])
        if s.mxnorm.mode == "fp8_merged":
            raise ConfigError(
                f"{FSDP_GATHER} = 'quantized' and mxnorm.mode = 'fp8_merged' round weights twice; change one"
            )
        if s.training.enable_cpu_offload:
            raise ConfigError(f"{FSDP_GATHER} = 'quantized' casts shards on the GPU; unset training.enable_cpu_offload")
        if s.mxnorm.diagnostics.every:
            raise ConfigError(
                f"{FSDP_GATHER} = 'quantized' leaves no weights in high precision for mxnorm.diagnostics.every = "
                f"{s.mxnorm.diagnostics.every}; set one of them to its default"
            )
    schedule_of(s.mxnorm, s.training.steps)
    converter, *_ = quantizing_among(s.model.converters)
    if converter != "mxnorm":
        for index, entry in enumerate(s.mxnorm.schedule):
            if "norm" in entry:
                norm = f"{SCHEDULE}[{index}].norm = {entry['norm']!r}"
                raise ConfigError(f"{norm} needs the converter 'mxnorm', not {converter!r}; change model.converters")


def _check_codes(recipes: list[LinearRecipe]) -> None:
    """Raise ConfigError if FSDP can gather no weight as codes."""
    if not any(recipe.has_one_code for recipe in recipes):
        fmt = recipes[0].tensor_scaled
        why = f"{fmt}'s tensor scales need the largest element of the whole weight, which no process has"
        raise ConfigError(
            f"{FSDP_GATHER} = 'quantized' needs one code of a weight for fprop and dgrad, and recipe "
            f"{recipes[0].name!r} has none: {why if fmt else 'set mxnorm.weight_tiles = true, or another recipe'}"
        )


def switches_of(section) -> dict:
    """The settings of [mxnorm] that override those of its recipes."""
    return {switch: getattr(section, switch) for switch in SWITCHES}


def schedule_of(section, steps: int) -> list[ScheduleEntry]:
    """The entries of [[mxnorm.schedule]] in a run of so many steps; ``section`` has the settings of [mxnorm]."""
    return parse_entries(section.schedule, steps, switches_of(section), SCHEDULE)


def schedule_in(job) -> list[ScheduleEntry]:
    """The entries of a run's schedule, in the order of the settings; ``job`` has all sections as attributes."""
    return schedule_of(job.mxnorm, job.training.steps) if quantizing_among(job.model.converters) else []


def diagnostics_every(section) -> int:
    """``diagnostics.every`` in effect: unset, it is on where the guard of mode "fp8_merged" needs it."""
    every = section.diagnostics.every
    return (200 if section.mode == "fp8_merged" else 0) if every is None else every


def without_effect(job) -> Iterator[str]:
    """Yield a line for the user per setting that does nothing in this run. Shorter trials of a config may have some."""
    given, every = job.mxnorm.diagnostics.every, diagnostics_every(job.mxnorm)
    quantizes = quantizing_among(job.model.converters)
    for name, value in (("diagnostics.every", given), ("schedule", job.mxnorm.schedule)):
        if value and not quantizes:
            yield f"mxnorm.{name} has no effect without the converter 'mxnorm' or 'mx_linear'"
    if quantizes:
        default, others = get_recipes(job.mxnorm.recipe, job.mxnorm.recipes, **switches_of(job.mxnorm))
        gemms = [gemm for recipe in (default, *others.values()) for gemm in (recipe.fprop, recipe.dgrad)]
        if any(gemm.weight_tiles and gemm.error_for("weight") for gemm in gemms):
            yield (
                "mxnorm.four_over_six changes at most 4 % of the weights' tiles; "
                "set mxnorm.weight_tiles = false, or mxnorm.four_over_six = 'activations'"
            )
    if quantizes and job.mxnorm.mode == "fp8_merged":
        if not every:
            yield "mxnorm.merge_limit has no effect with mxnorm.diagnostics.every = 0: no layer is watched"
        elif job.mxnorm.diagnostics.fqns is not None:
            yield "mxnorm.merge_limit watches only the layers of mxnorm.diagnostics.fqns"
    if quantizes and (given or 0) > job.training.steps:
        yield f"mxnorm.diagnostics.every = {given} measures nothing in {job.training.steps} steps; lower it"
