"""The names that modules and parameters have in TorchTitan 0.2.2. Settings, random bits, reports and checkpoints have
these names under 0.3, too."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn as nn

from mxtrain.parallel.initial_weights import plain_name

_RENAMED = (
    (re.compile(r"(^|\.)qkv_linear\.(w[qkv])\b"), r"\1\2"),
    (re.compile(r"^lm_head\b"), "output"),
    (re.compile(r"(^|\.)routed_experts\.inner_experts\b"), r"\1experts"),
    (re.compile(r"\.(w[123])_E(?:FD|DF)$"), r".\1"),
    (re.compile(r"\.(expert_bias|tokens_per_expert)_E$"), r".\1"),
)


def name_in_022(name: str) -> str:
    """The name in 0.2.2 of a module or parameter, without the names of modules that wrap others."""
    name = plain_name(name)
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


@contextmanager
def names_of_022(model: nn.Module) -> Iterator[None]:
    """While active, ``named_modules`` and ``get_submodule`` of a whole model have the names of 0.2.2."""
    kind = type(model)

    class Renamed(kind):
        def named_modules(self, *args, **kwargs):
            for name, module in super().named_modules(*args, **kwargs):
                yield name_in_022(name), module

        def get_submodule(self, target: str) -> nn.Module:
            found = dict(self.named_modules(remove_duplicate=False)).get(target)
            return super().get_submodule(target) if found is None else found

    Renamed.__name__, Renamed.__qualname__, Renamed.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    model.__class__ = Renamed
    try:
        yield
    finally:
        model.__class__ = kind
