"""Which modules of a model a pattern selects."""

import fnmatch
from collections.abc import Mapping

import torch.nn as nn

from mxtrain.errors import ConfigError


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
