"""Plans the precision schedule of a converted model: for every swapped layer, its state at every step of the run."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import combinations

import torch.nn as nn

from mxtrain.conversion.selection import names_of, selected
from mxtrain.errors import ConfigError
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.recipe_module import RecipeModule
from mxtrain.nn.three_gemms import QuantizedLinear, check_features
from mxtrain.recipes.recipe import GEMMS, HIGH_PRECISION, RECIPES, LinearRecipe, Recipe, RMSEstimate, recipe_of_norm
from mxtrain.recipes.schedule import NORM_KEYS, LayerState, RecipeChange, ScheduleEntry, Timeline

# What an entry may change of a layer (a GEMM, or one of NORM_KEYS), and the FQN of the layer.
Part = tuple[str, str]
# The recipe of a plain norm and its linears.
_PLAIN = RECIPES[HIGH_PRECISION]
# Entries with everything that they change.
Active = Sequence[tuple[ScheduleEntry, frozenset[Part]]]


def attach_schedule(
    model: nn.Module,
    feeds: Mapping[str, Sequence[str]],
    entries: Sequence[ScheduleEntry],
    fallback: RecipeChange | None = None,
    guard: str = "guard",
) -> None:
    """Give every swapped layer its timeline: the states that entries and the guard's change lead to.

    A pattern selects linears by their names, and norms by their own names or those of the linears that they feed. So a
    norm and its linears, which share the recipe of fprop, are selected together.

    Args:
        model: a model whose modules are swapped, before it is split or wrapped.
        feeds: FQN of every MXNorm -> FQNs of the linears that it feeds (``Plan.norms``).
        entries: of the schedule.
        fallback: the change of the guard, in all swapped layers; None without a guard.
        guard: name of the guard's table in error messages.

    Raises:
        ConfigError: a pattern matches no module or no swapped one, an entry has nothing to change in what one of
            its patterns selects, two entries change the same thing at the same step, a layer does not take a recipe,
            or all layers compute the same without an entry or without the guard's change.
    """
    for fqn, timeline in _Planner(model, feeds, entries, fallback, guard).timelines().items():
        module = model.get_submodule(fqn)
        module.timeline = timeline
        # All later states have the attributes that this one sets, so that torch.compile knows a state that comes back.
        module.take(timeline.at(1))


def set_step(model: nn.Module, step: int, falls_back: bool = False) -> None:
    """Give every swapped layer of a model, or of a part of one, its state of this step.

    Args:
        step: from 1.
        falls_back: whether the guard's change is in effect, too.
    """
    for module in model.modules():
        if isinstance(module, RecipeModule) and module.timeline is not None:
            state = module.timeline.at(step, falls_back)
            if state != module.layer_state:
                module.take(state)


class _Planner:
    """The parts of the layers that every entry changes. Arguments and errors as for ``attach_schedule``."""

    def __init__(
        self,
        model: nn.Module,
        feeds: Mapping[str, Sequence[str]],
        entries: Sequence[ScheduleEntry],
        fallback: RecipeChange | None,
        guard: str,
    ):
        self.modules = dict(model.named_modules())
        self.names = names_of(model)
        self.feeds = {norm: tuple(linears) for norm, linears in feeds.items()}
        self.norm_of = {linear: norm for norm, linears in feeds.items() for linear in linears}
        self.linears = [fqn for fqn, module in self.modules.items() if isinstance(module, QuantizedLinear)]
        # In the order of the entries; the guard's change comes on top of all.
        self.parts = [(entry, self._parts(entry)) for entry in entries]
        _refuse_overlaps(self.parts)
        self.fallback = None
        if fallback is not None:
            always = ScheduleEntry(guard, 1, 1, None, fallback)
            self.fallback = (always, self._parts(always))

    def timelines(self) -> dict[str, Timeline]:
        steps = {1}
        for entry, _ in self.parts:
            steps |= {entry.first, entry.last + 1}
        states: dict[str, dict[int, LayerState]] = defaultdict(dict)
        fallbacks: dict[str, dict[int, LayerState]] = defaultdict(dict)
        for step in sorted(steps):
            active = self._active(step)
            for fqn, state in self._states(active).items():
                states[fqn][step] = state
            if self.fallback is not None:
                for fqn, state in self._states([*active, self.fallback]).items():
                    fallbacks[fqn][step] = state
        for entry, parts in self.parts:
            self._require_effect(entry, parts, filter(entry.covers, steps))
        if self.fallback is not None:
            self._require_effect(*self.fallback, steps)
        return {fqn: Timeline(of_steps, fallbacks[fqn]) for fqn, of_steps in states.items()}

    def _active(self, step: int) -> Active:
        return [(entry, parts) for entry, parts in self.parts if entry.covers(step)]

    def _require_effect(self, entry: ScheduleEntry, parts: frozenset[Part], steps: Iterable[int]) -> None:
        """Raise ConfigError if no layer computes anything else at these steps because of an entry."""
        for step in steps:
            others = [other for other in self._active(step) if other[0] is not entry]
            try:
                without = self._states(others)
            except ConfigError:  # the others need this one
                return
            states = self._states([*others, (entry, parts)])
            if any(_arithmetic(state) != _arithmetic(without[fqn]) for fqn, state in states.items()):
                return
        raise ConfigError(f"{entry.name} changes nothing: without its {entry.change}, all layers compute the same")

    def _parts(self, entry: ScheduleEntry) -> frozenset[Part]:
        """Everything that an entry changes."""
        change, parts = entry.change, set()
        for where, hits in self._selections(entry):
            of_hits = self._changed(change, hits)
            if not of_hits:
                raise _nothing_to_change(where, "linear" if change.gemms else "norm", change)
            parts |= of_hits
        keys_of = {"linear": change.gemms, "norm": [key for key in NORM_KEYS if getattr(change, key) is not None]}
        for kind, keys in keys_of.items():
            if keys and not any(key in keys for key, _ in parts):
                where = "" if entry.modules is None else f".modules = {list(entry.modules)}"
                raise _nothing_to_change(f"{entry.name}{where}", kind, change)
        return frozenset(parts)

    def _changed(self, change: RecipeChange, hits: set[str]) -> set[Part]:
        norms = [norm for norm, fed in self.feeds.items() if norm in hits or hits.intersection(fed)]
        parts = {(gemm, fqn) for gemm in change.gemms for fqn in self.linears if fqn in hits}
        if change.norm is not None:
            parts |= {(key, norm) for key in NORM_KEYS for norm in norms}
            parts |= {(gemm, fqn) for gemm in GEMMS for norm in norms for fqn in self.feeds[norm]}
        return parts | {(key, norm) for key in NORM_KEYS if getattr(change, key) is not None for norm in norms}

    def _selections(self, entry: ScheduleEntry) -> Iterator[tuple[str, set[str]]]:
        """Yield what each pattern selects, with the setting and the pattern in words."""
        if entry.modules is None:
            yield entry.name, {*self.linears, *self.feeds}
        for pattern in entry.modules or ():
            where = f"{entry.name}.modules"
            hits = set(selected(self.names, pattern, where))
            if not hits.intersection((*self.linears, *self.feeds)):
                raise ConfigError(
                    f"{where}: {pattern!r} selects no swapped layer: what it names stays in high precision"
                )
            yield f"{where}: {pattern!r}", hits

    def _states(self, active: Active) -> dict[str, LayerState]:
        """The state of every swapped layer while these changes are in effect."""
        recipes = {fqn: self._recipe(fqn, active) for fqn in self.linears}
        norms = {norm: self._norm(norm, active, recipes) for norm in self.feeds}
        plain = {norm for norm, state in norms.items() if state.is_plain}
        linears = {}
        for fqn, recipe in recipes.items():
            if self.norm_of.get(fqn) in plain:
                linears[fqn] = LayerState(_PLAIN, is_plain=True)
                continue
            linear = self.modules[fqn]
            with _named(active, fqn):
                check_features(linear.in_features, linear.out_features, recipe)
            linears[fqn] = LayerState(recipe)
        return {**linears, **norms}

    def _recipe(self, fqn: str, active: Active) -> LinearRecipe:
        recipe = self.modules[fqn].recipe
        gemms = {}
        for entry, parts in active:
            gemms |= {gemm: new for gemm, new in entry.change.gemms.items() if (gemm, fqn) in parts}
        return RecipeChange(gemms).of_recipe(recipe) if gemms else recipe

    def _norm(self, norm: str, active: Active, recipes: Mapping[str, LinearRecipe]) -> LayerState:
        module: MXNorm = self.modules[norm]
        now = {"p": module.estimate.p, "estimator": module.estimate.estimator, "norm": None}
        for entry, parts in active:
            now |= {key: getattr(entry.change, key) for key in NORM_KEYS if (key, norm) in parts}
        if now["norm"] is not None:
            return LayerState(_PLAIN, module.estimate, is_plain=True)
        fed = [recipes[linear] for linear in self.feeds[norm]]
        if len({recipe.fprop for recipe in fed}) > 1:
            fprops = ", ".join(f"{linear}: {recipes[linear].fprop.name}" for linear in self.feeds[norm])
            raise ConfigError(
                f"{_entries(active)} gives the linears behind {norm} different recipes of fprop ({fprops}): name all "
                "of them"
            )
        recipe = recipe_of_norm(fed)
        with _named(active, norm):
            estimate = RMSEstimate.for_recipe(recipe.fprop, now["p"], now["estimator"], module.estimate.eps)
        return LayerState(recipe, estimate)


def _arithmetic(state: LayerState) -> tuple:
    """What a state computes, without what makes no difference: names, and the p of an exact estimate."""
    names = [f.name for f in fields(Recipe) if f.compare and f.name != "name"]
    gemms = [[getattr(recipe, name) for name in names] for recipe in state.recipe.gemms]
    estimate = state.estimate
    is_exact = estimate is not None and estimate.estimator == "exact"
    return gemms, ("exact", estimate.eps) if is_exact else estimate, state.is_plain


def _nothing_to_change(where: str, kind: str, change: RecipeChange) -> ConfigError:
    return ConfigError(f"{where} selects no swapped {kind}, which its {change} could change")


@contextmanager
def _named(active: Active, fqn: str):
    """Put the entries and the name of a layer before a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{_entries(active)}: {fqn}: {error}") from None


def _entries(active: Active) -> str:
    return " and ".join(entry.name for entry, _ in active)


def _refuse_overlaps(of_entries: Active) -> None:
    for (one, parts), (other, other_parts) in combinations(of_entries, 2):
        first, last = max(one.first, other.first), min(one.last, other.last)
        common = sorted(parts & other_parts)
        if first <= last and common:
            part, fqn = common[0]
            more = f" and {len(common) - 1} more" if len(common) > 1 else ""
            raise ConfigError(
                f"{other.name} and {one.name} both change {part} of {fqn}{more} at steps {first} to {last}: end one "
                "before the other begins, or name different modules"
            )
