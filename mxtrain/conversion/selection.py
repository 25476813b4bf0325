"""Which modules of a model a setting means: those that patterns name, and the last of its blocks."""

import fnmatch
import math
from collections.abc import Mapping

import torch.nn as nn

from mxtrain.errors import ConfigError
from mxtrain.recipes.recipe import LinearRecipe


def matches(fqn: str, pattern: str) -> bool:
    """Whether ``pattern`` names ``fqn``: its segments, each a literal or a glob, match a run of whole segments.

    ``layers.1`` names ``layers.1`` and everything in it, but not ``layers.10``; ``*.wo`` and ``wo`` name every wo.
    """
    names, globs = fqn.split("."), pattern.split(".")
    return any(
        all(fnmatch.fnmatchcase(name, glob) for name, glob in zip(names[start:], globs))
        for start in range(len(names) - len(globs) + 1)
    )


def named(model: nn.Module, pattern: str, field: str) -> list[str]:
    """FQNs of the modules that ``pattern`` names; ConfigError, with the name of the field, if there are none."""
    if not isinstance(pattern, str):
        raise ConfigError(f"{field}: {pattern!r} is not the name of a module")
    hits = [fqn for fqn, _ in model.named_modules() if fqn and matches(fqn, pattern)]
    if not hits:
        top = ", ".join(name for name, _ in model.named_children())
        raise ConfigError(f"{field}: {pattern!r} matches no module; the top-level modules are: {top}")
    return hits


def recipes_of_linears(
    model: nn.Module, recipe: LinearRecipe, by_pattern: Mapping[str, LinearRecipe]
) -> dict[str, tuple[LinearRecipe, str]]:
    """The recipe of every linear, and the setting that it comes from: the last pattern that names it, or ``recipe``.

    Raises:
        ConfigError: for a pattern that names no linear.
    """
    linears = {fqn for fqn, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen = dict.fromkeys(linears, (recipe, f"recipe = {recipe.name!r}"))
    for pattern, its_recipe in by_pattern.items():
        hits = linears.intersection(named(model, pattern, "recipes"))
        if not hits:
            raise ConfigError(
                f"recipes: {pattern!r} names no linear layer; a norm has the recipe of the linears that it feeds, and "
                "what filter_fqns names keeps its precision"
            )
        chosen |= dict.fromkeys(hits, (its_recipe, f"recipes.{pattern!r} = {its_recipe.name!r}"))
    return chosen


def last_blocks(model: nn.Module, share: float) -> dict[str, str]:
    """FQNs of the last share of the model's blocks and of everything in them, with that as a reason to leave them."""
    containers, blocks = [], []
    for fqn, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not any(_is_in(fqn, outer) for outer in containers):
            containers.append(fqn)
            blocks += [f"{fqn}.{name}".removeprefix(".") for name, _ in module.named_children()]
    count = math.floor(share * len(blocks) + 0.5)
    last = blocks[len(blocks) - count :]
    reason = f"in the last {count} of {len(blocks)} blocks (high_precision_share = {share})"
    return {fqn: reason for fqn, _ in model.named_modules() if any(_is_in(fqn, block) for block in last)}


def _is_in(fqn: str, outer: str) -> bool:
    return not outer or fqn == outer or fqn.startswith(outer + ".")
