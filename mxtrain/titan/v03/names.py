"""The names that modules and parameters have in TorchTitan 0.2.2. Settings, random bits, reports and checkpoints have
these names under 0.3, too. States are saved as 0.2.2 saves them, so that each resumes from checkpoints of the other."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn as nn
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer

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


class OptimizerStates(Stateful):
    """Moments and settings of every parameter by its name in 0.2.2: "state.layers.0.attention.wq.weight.exp_avg"."""

    def __init__(self, optimizers: OptimizersContainer):
        self._optimizers = optimizers

    def state_dict(self) -> dict:
        return {_renamed(key): value for key, value in self._optimizers.state_dict().items()}

    def load_state_dict(self, state_dict: dict) -> None:
        keys = {key: _renamed(key) for key in self._optimizers.state_dict()}
        self._optimizers.load_state_dict({key: state_dict[saved] for key, saved in keys.items()})


def _renamed(key: str) -> str:
    kind, _, rest = key.partition(".")
    name, _, last = rest.rpartition(".")
    return f"{kind}.{name_in_022(name)}.{last}"


class SchedulerStates(Stateful):
    """What the first scheduler saves. Of that, 0.3 restores the number of steps."""

    def __init__(self, schedulers: LRSchedulersContainer):
        self._schedulers = schedulers

    def state_dict(self) -> dict:
        return self._schedulers.schedulers[0].state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        self._schedulers.load_state_dict(state_dict)
