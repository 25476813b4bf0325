"""The precision schedule of a converted model: every layer's state at every step, and the switch between steps."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

import torch
import torch.nn as nn

from mxtrain.checkpoints import terminal
from mxtrain.conversion.survey import selected
from mxtrain.errors import ConfigError, errors_begin_with
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.hardware import check_mode
from mxtrain.formats.recipe import GEMMS, HIGH_PRECISION_RECIPE, RECIPES, LinearRecipe, Recipe, recipe_of_norm
from mxtrain.formats.schedule import RMSNORM, LayerState, RecipeChange, ScheduleEntry, Timeline
from mxtrain.nn.experts import QuantizedExperts, check_experts
from mxtrain.nn.recipe_module import RecipeModule
from mxtrain.nn.three_gemms import QuantizedLayer, check_features

GRAPHS = 8
"""Graphs of a function that torch.compile allows by default"""
# The recipe of a plain norm and its linears.
_PLAIN = RECIPES[HIGH_PRECISION_RECIPE]
# What a change sets: a GEMM or "norm", and the FQN of the layer -> a recipe, or RMSNORM.
Values = Mapping[tuple[str, str], Recipe | str | None]


def attach_schedule(model: nn.Module, feeds: Mapping[str, Sequence[str]], entries: Sequence[ScheduleEntry]) -> None:
    """Give every swapped layer its timeline: the states that the entries lead to.

    A pattern selects linears and experts by their names, and norms by their own names or those of the layers that they
    feed. So a norm and its layers, which share the recipe of fprop, are selected together.

    Args:
        model: a model whose modules are swapped, before it is split or wrapped.
        feeds: FQN of every MXNorm -> FQNs of the linears and experts that it feeds (``Plan.feeds``).
    """
    layers = _Layers(model, feeds)
    changes = [(entry, layers.changed_by(entry)) for entry in entries]
    _refuse_overlaps(changes)
    states: dict[str, dict[int, LayerState]] = defaultdict(dict)
    for step in sorted({1, *(step for entry in entries for step in (entry.first, entry.last + 1))}):
        active = [(entry, values) for entry, values in changes if entry.covers(step)]
        for fqn, state in layers.states(active).items():
            states[fqn][step] = state
    for fqn, of_steps in states.items():
        module = layers.modules[fqn]
        module.timeline = Timeline(of_steps)
        # All later states have the attributes that this one sets, so that torch.compile knows a state that comes back.
        module.take(module.timeline.at(1))


def set_step(model: nn.Module, step: int) -> None:
    """Give every swapped layer of a model, or of a part of one, its state of this step, counted from 1."""
    for module in model.modules():
        if isinstance(module, RecipeModule) and module.timeline is not None:
            state = module.timeline.at(step)
            if state != module.layer_state:
                module.take(state)


def allow_graphs(graphs: int) -> None:
    """Let torch.compile make this many graphs of a function. Beyond its limit it stops training.

    TorchTitan compiles every block alone, and all blocks share one count, because they run the same code. A block needs
    graphs for training, for validation and for other shapes; blocks with other recipes need graphs of their own.
    """
    config = torch.compiler.config
    config.recompile_limit = max(config.recompile_limit, graphs)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)


class RecipeSwitch:
    """Switches the layers of a run's model, or of this rank's stages, between steps, and tells the user.

    Every rank decides by the number of the step, so no rank waits.

    Args:
        model_parts: modules with the timelines of ``attach_schedule``.
        log_event: (step, text) logs the beginning or end of a change.
    """

    def __init__(
        self,
        entries: Sequence[ScheduleEntry],
        model_parts: Sequence[nn.Module],
        log_event: Callable[[int, str], None],
    ):
        self._entries, self._parts, self._log_event = entries, model_parts, log_event
        self._in_effect: list[ScheduleEntry] | None = None
        if entries:
            states = len({step for e in entries for step in (e.first, e.last + 1)}) + 1
            modules = (module for part in model_parts for module in part.modules())
            # A graph more of every block for every state of its layers.
            allow_graphs(GRAPHS + states * sum(getattr(module, "timeline", None) is not None for module in modules))

    def begin_step(self, step: int) -> bool:
        """Give the layers their states of ``step``, before its first forward. Return whether they have others now."""
        is_first = self._in_effect is None
        before = self._covering(step - 1) if is_first else self._in_effect
        now = self._in_effect = self._covering(step)
        if is_first or now != before:
            for part in self._parts:
                set_step(part, step)
        for entry in before:
            if entry not in now:
                self._tell(step, f"end of {_words(entry)}", f" ({entry.name})")
        for entry in now:
            if entry not in before:
                self._tell(step, _words(entry), f", to step {entry.last} ({entry.name})")
            elif is_first:
                terminal.note(f"in effect from step {entry.first} to {entry.last}: {_words(entry)} ({entry.name})")
        return now != before

    def _covering(self, step: int) -> list[ScheduleEntry]:
        return [entry for entry in self._entries if entry.covers(step)]

    def _tell(self, step: int, text: str, details: str) -> None:
        terminal.note(f"step {step}: {text}{details}")
        self._log_event(step, text)


def _words(entry: ScheduleEntry) -> str:
    return str(entry.change) if entry.modules is None else f"{entry.change} in {', '.join(entry.modules)}"


class _Layers:
    """The swapped layers of a model, and what changes make of them. Arguments as for ``attach_schedule``."""

    def __init__(self, model: nn.Module, feeds: Mapping[str, Sequence[str]]):
        self.modules, self._feeds = dict(model.named_modules()), feeds
        self._layers = {fqn: module for fqn, module in self.modules.items() if isinstance(module, QuantizedLayer)}
        self._estimates = {norm: self.modules[norm].estimate for norm in feeds}
        # Experts behind a plain norm stay quantized.
        are_experts = {fqn: isinstance(layer, QuantizedExperts) for fqn, layer in self._layers.items()}
        self._norm_of = {fqn: norm for norm, fed in feeds.items() for fqn in fed if not are_experts[fqn]}

    def changed_by(self, entry: ScheduleEntry) -> Values:
        change, values = entry.change, {}
        for where, hits in self._selections(entry):
            of_hits = {(gemm, fqn): new for gemm, new in change.gemms.items() for fqn in self._layers if fqn in hits}
            for norm, fed in self._feeds.items() if change.norm is not None else ():
                if norm in hits or hits.intersection(fed):
                    of_hits["norm", norm] = RMSNORM
                    of_hits |= {(gemm, fqn): _PLAIN for fqn in fed if fqn in self._norm_of for gemm in GEMMS}
            if not of_hits:
                kind = "linear" if change.gemms else "norm"
                raise ConfigError(f"{where} selects no swapped {kind} for {change}; name one")
            values |= of_hits
        return values

    def _selections(self, entry: ScheduleEntry) -> Iterator[tuple[str, set[str]]]:
        """Yield what each pattern selects, with the setting and the pattern in words."""
        swapped = {*self._layers, *self._feeds}
        if entry.modules is None:
            yield entry.name, swapped
        for pattern in entry.modules or ():
            where = f"{entry.name}.modules"
            hits = swapped.intersection(selected(list(filter(None, self.modules)), pattern, where))
            if not hits:
                raise ConfigError(
                    f"{where}: {pattern!r} selects only modules that stay in high precision; name swapped layers"
                )
            yield f"{where}: {pattern!r}", hits

    def states(self, active: Sequence[tuple[ScheduleEntry, Values]]) -> dict[str, LayerState]:
        """The state of every swapped layer while these changes are in effect."""
        names, changed = " and ".join(entry.name for entry, _ in active), {}
        for _, values in active:
            changed |= values
        recipes, states = {}, {}
        for fqn, layer in self._layers.items():
            gemms = {gemm: changed[gemm, fqn] for gemm in GEMMS if (gemm, fqn) in changed}
            recipes[fqn] = RecipeChange(gemms).of_recipe(layer.recipe) if gemms else layer.recipe
            if changed.get(("norm", self._norm_of.get(fqn))):
                states[fqn] = LayerState(_PLAIN, is_plain=True)
                continue
            with errors_begin_with(f"{names}: {fqn}: "):
                _check_recipe(layer, recipes[fqn])
            states[fqn] = LayerState(recipes[fqn])
        for norm, fed in self._feeds.items():
            own = self._estimates[norm]
            if changed.get(("norm", norm)):
                states[norm] = LayerState(_PLAIN, own, is_plain=True)
                continue
            if len({recipes[fqn].fprop for fqn in fed}) > 1:
                fprops = ", ".join(f"{fqn}: {recipes[fqn].fprop.name}" for fqn in fed)
                raise ConfigError(
                    f"{names} gives the layers behind {norm} different recipes of fprop ({fprops}); name all"
                )
            recipe = recipe_of_norm([recipes[fqn] for fqn in fed])
            with errors_begin_with(f"{names}: {norm}: "):
                estimate = RMSEstimate.for_recipe(recipe.fprop, own.p, own.estimator, own.eps, own.ratio)
                states[norm] = LayerState(recipe, estimate)
        return states


def _check_recipe(layer: QuantizedLayer, recipe: LinearRecipe) -> None:
    check_mode(layer.mode, recipe)
    if isinstance(layer, QuantizedExperts):
        if layer.fed_by and (fmt := recipe.fprop.tensor_scaled):
            raise ConfigError(f"fprop in {fmt} would round an MXNorm's output twice; give these experts another fprop")
        check_experts(layer, recipe, layer.mode)
    else:
        check_features(layer.in_features, layer.out_features, recipe)


def _refuse_overlaps(changes: Sequence[tuple[ScheduleEntry, Values]]) -> None:
    for (one, values), (other, others) in combinations(changes, 2):
        first, last = max(one.first, other.first), min(one.last, other.last)
        common = sorted(values.keys() & others.keys())
        if first <= last and common:
            part, fqn = common[0]
            more = f" and {len(common) - 1} more" if len(common) > 1 else ""
            raise ConfigError(
                f"{other.name} and {one.name} both change {part} of {fqn}{more} at steps {first} to {last}: end one "
                "before the other begins, or name different modules"
            )
