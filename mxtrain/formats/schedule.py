"""The precision schedule: which steps of a run have another recipe or norm than the rest, as a value.

Steps are counted from 1, as in the log. ``mxtrain.conversion.schedule`` applies the entries to the layers of a model,
whose states by step are a ``Timeline``.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from mxtrain.errors import ConfigError
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.parse import parse_gemms, with_switches
from mxtrain.formats.recipe import GEMMS, LinearRecipe, Recipe, linear_recipe

RMSNORM = "rmsnorm"


@dataclass(frozen=True)
class RecipeChange:
    """What differs from the settings of the whole run.

    Attributes:
        gemms: GEMM -> its recipe; GEMMs that are not named keep theirs.
        norm: "rmsnorm" runs norms and the linears that they feed in high precision, as before the conversion; None
            keeps them.
    """

    gemms: Mapping[str, Recipe] = field(default_factory=dict)
    norm: str | None = None

    @classmethod
    def parse(cls, name: str, given: Mapping, switches: Mapping) -> "RecipeChange":
        """Parse "recipe" or "norm" in ``given``.

        Error messages call the entry ``name``, "mxnorm.schedule[0]". ``switches`` are as for ``get_recipe``, and hold
        for these recipes, too.

        Raises:
            ConfigError: nothing is changed, a recipe is unknown, or both are given.
        """
        recipe, norm = given.get("recipe"), given.get("norm")
        if recipe is None and norm is None:
            raise ConfigError(f"{name} changes nothing; set recipe or norm")
        if norm is not None and recipe is not None:
            raise ConfigError(
                f'{name}.recipe = {recipe!r} has no effect beside norm = "{RMSNORM}", which leaves the norm and the '
                "linears that it feeds in high precision; write two entries for different modules"
            )
        gemms = {} if recipe is None else parse_gemms(f"{name}.recipe", recipe)
        if switches.get("backward") == "dequantized" and "fprop" not in gemms and any(r.format for r in gemms.values()):
            raise ConfigError(
                f"{name}.recipe = {recipe!r} has no effect with backward = 'dequantized', which gives dgrad and wgrad "
                "no format; name 'bf16', or a recipe for fprop"
            )
        return cls({gemm: with_switches(gemms[gemm], gemm, switches) for gemm in GEMMS if gemm in gemms}, norm)

    def of_recipe(self, base: LinearRecipe) -> LinearRecipe:
        """Return the recipe of a linear that had ``base``.

        A GEMM in high precision has blocks, too: those of MXNorm's estimate. They stay the blocks of ``base``, so that
        the estimate does not change when only the cast goes away.
        """
        gemms = (self.gemms.get(gemm, getattr(base, gemm)) for gemm in GEMMS)
        return linear_recipe(*(r if r.rounds else replace(r, block_size=base.fprop.block_size) for r in gemms))

    def __str__(self) -> str:
        if self.norm is not None:
            return self.norm
        names = {gemm: recipe.name for gemm, recipe in self.gemms.items()}
        same = len(names) == len(GEMMS) and len(set(names.values())) == 1
        return names["fprop"] if same else ", ".join(f"{gemm}={name}" for gemm, name in names.items())


@dataclass(frozen=True)
class ScheduleEntry:
    """One entry of the schedule.

    Attributes:
        name: as in error messages, "mxnorm.schedule[0]".
        first, last: the first and the last step with the change.
        modules: patterns of modules; None for all that are swapped.
    """

    name: str
    first: int
    last: int
    modules: tuple[str, ...] | None
    change: RecipeChange

    def covers(self, step: int) -> bool:
        """Whether the change is in effect at a step."""
        return self.first <= step <= self.last

    def __str__(self) -> str:
        where = "all swapped layers" if self.modules is None else ", ".join(self.modules)
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{steps}: {self.change} in {where}"


def parse_entries(tables: Iterable[Mapping], steps: int, switches: Mapping, name: str) -> list[ScheduleEntry]:
    """Parse the entries of a run with ``steps`` steps.

    Args:
        tables: for each entry the keys from_step or from_share, until_step or until_share or neither, modules if not
            all, and those of ``RecipeChange``. A share s stands for the first floor(s * steps) steps: the entry begins
            after them, or ends with the last of them.
        name: of the setting.

    Raises:
        ConfigError: for a wrong entry. It names the entry and says what is allowed.
    """
    return [_entry(f"{name}[{index}]", table, steps, switches) for index, table in enumerate(tables)]


def _entry(name: str, given: Mapping, steps: int, switches: Mapping) -> ScheduleEntry:
    starts = [key for key in ("from_step", "from_share") if key in given]
    ends = [key for key in ("until_step", "until_share") if key in given]
    if len(starts) != 1:
        raise ConfigError(f"{name} has {'both' if starts else 'neither'} of from_step and from_share; set one of them")
    if len(ends) > 1:
        raise ConfigError(f"{name} has both of until_step and until_share; set at most one of them")
    for key in (*starts, *ends):
        low, high, of = (1, steps, "a step of this run") if key.endswith("step") else (0, 1, "a share of the run")
        if not low <= given[key] <= high:
            raise ConfigError(f"{name}.{key} = {given[key]!r} is not {of}; allowed is {low} to {high}")
    first = given["from_step"] if "from_step" in given else _done(given["from_share"], steps) + 1
    last = given["until_step"] if "until_step" in given else _done(given.get("until_share", 1), steps)
    if first > steps:
        raise ConfigError(f"{name}.{starts[0]} = {given[starts[0]]!r} is after the last step, {steps}; lower it")
    if last < first:
        raise ConfigError(f"{name}.{ends[0]} = {given[ends[0]]!r} is before the first step, {first}; raise it")
    modules = given.get("modules")
    if modules == []:
        raise ConfigError(f"{name}.modules = [] names no module; leave it unset for all swapped layers")
    change = RecipeChange.parse(name, given, switches)
    return ScheduleEntry(name, first, last, None if modules is None else tuple(modules), change)


def _done(share: float, steps: int) -> int:
    """The number of steps in the first ``share`` of a run, of the decimal number as written: 0.29 of 100 are 29."""
    return math.floor(Fraction(str(share)) * steps)


@dataclass(frozen=True)
class LayerState:
    """What a swapped layer computes with.

    Attributes:
        recipe: of the layer; a norm has one of the linears that it feeds.
        estimate: of a norm; None for a linear.
        is_plain: a norm is an RMSNorm and the linears behind it are ``nn.Linear``, all in high precision.
    """

    recipe: LinearRecipe
    estimate: RMSEstimate | None = None
    is_plain: bool = False


@dataclass(frozen=True)
class Timeline:
    """The states of a layer over a run. The state of a step follows from its number, so a resumed run has the same.

    Attributes:
        states: step -> the state from that step on; step 1 is among them.
    """

    states: Mapping[int, LayerState]

    def at(self, step: int) -> LayerState:
        """Return the state of a step."""
        return self.states[max(first for first in self.states if first <= step)]

    @property
    def all_states(self) -> tuple[LayerState, ...]:
        """Every state that the layer may get."""
        return tuple(dict.fromkeys(self.states.values()))
