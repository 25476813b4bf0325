"""Which modules a setting selects: the modules that a pattern matches, and the last share of the blocks."""

import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch.nn as nn

from mxtrain.errors import ConfigError
from mxtrain.recipes.recipe import LinearRecipe


def matches(fqn: str, pattern: str) -> bool:
    """Whether the segments of ``pattern``, each a literal or a glob, match a run of whole segments of ``fqn``.

    ``layers.1`` matches ``layers.1`` and everything in it, but not ``layers.10``; ``*.wo`` and ``wo`` match every wo.
    """
    names, globs = fqn.split("."), pattern.split(".")
    return any(
        all(fnmatch.fnmatchcase(name, glob) for name, glob in zip(names[start:], globs))
        for start in range(len(names) - len(globs) + 1)
    )


def names_of(model: nn.Module) -> dict[str, str]:
    """Every name of every module -> its FQN, which is the first of them."""
    fqns = {id(module): fqn for fqn, module in model.named_modules()}
    return {name: fqns[id(module)] for name, module in model.named_modules(remove_duplicate=False) if name}


def selected(names: Mapping[str, str], pattern: str, field: str) -> list[str]:
    """The FQNs of the modules that ``pattern`` matches under any of their names.

    Args:
        names: every name of every module -> its FQN (``names_of``).

    Raises:
        ConfigError: with the name of the setting, ``field``, if there are none.
    """
    if not isinstance(pattern, str):
        raise ConfigError(f"{field}: {pattern!r} is not the name of a module")
    hits = dict.fromkeys(fqn for name, fqn in names.items() if matches(name, pattern))
    if not hits:
        top = ", ".join(name for name in names if "." not in name)
        raise ConfigError(f"{field}: {pattern!r} matches no module; the top-level modules are: {top}")
    return list(hits)


def recipes_of_linears(
    names: Mapping[str, str], linears: Collection[str], recipe: LinearRecipe, by_pattern: Mapping[str, LinearRecipe]
) -> dict[str, tuple[LinearRecipe, str]]:
    """The recipe of every linear, and the setting that it comes from: the last pattern that matches, or ``recipe``.

    Args:
        names: as for ``selected``.

    Raises:
        ConfigError: for a pattern that matches no linear.
    """
    chosen = dict.fromkeys(linears, (recipe, f"recipe = {recipe.name!r}"))
    for pattern, its_recipe in by_pattern.items():
        hits = [fqn for fqn in selected(names, pattern, "recipes") if fqn in chosen]
        if not hits:
            raise ConfigError(
                f"recipes: {pattern!r} names no linear layer; a norm has the recipe of the linears that it feeds, and "
                "modules named in filter_fqns keep their precision"
            )
        chosen |= dict.fromkeys(hits, (its_recipe, f"recipes.{pattern!r} = {its_recipe.name!r}"))
    return chosen


def in_last_blocks(modules: Iterable[str], blocks: Sequence[str], share: float) -> dict[str, str]:
    """The last ``share`` of the blocks (rounded to nearest) and everything in them -> the reason to keep them."""
    count = math.floor(share * len(blocks) + 0.5)
    last = blocks[len(blocks) - count :]
    reason = f"in the last {count} of {len(blocks)} blocks (high_precision_share = {share})"
    return {fqn: reason for fqn in modules if any(fqn == block or fqn.startswith(block + ".") for block in last)}
