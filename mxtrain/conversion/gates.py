"""The gates of routers in mixtures of experts, recognised by names."""

from collections.abc import Mapping

import torch.nn as nn

_NAMES = ("gate", "gating")


def is_gate(modules: Mapping[str, nn.Module], fqn: str) -> bool:
    """Whether a linear is a router's gate: it is called so, or it is the only linear in a module that is.

    A gate is called "router"; or "gate" or "gating", beside "experts" or in a class with "Router" in its name. All
    models of TorchTitan have ``TokenChoiceTopKRouter``, and models of transformers have ``gate`` and ``experts`` in one
    block. (The gate of a gated feed-forward stands beside no experts.)

    Args:
        modules: every module of a model by FQN.
    """
    return _is_called_gate(modules, fqn) or any(
        sum(isinstance(part, nn.Linear) for part in modules[outer].modules()) == 1
        for outer in _outer_gates(modules, fqn)
    )


def is_in_gate(modules: Mapping[str, nn.Module], fqn: str) -> bool:
    """Whether a module lies in one that is called as a gate is; arguments as for ``is_gate``."""
    return bool(_outer_gates(modules, fqn))


def _outer_gates(modules: Mapping[str, nn.Module], fqn: str) -> list[str]:
    parts = fqn.split(".")
    outer = [".".join(parts[:end]) for end in range(1, len(parts))]
    # A whole mixture of experts may be called "router".
    return [each for each in outer if _is_called_gate(modules, each) and "experts" not in modules[each]._modules]


def _is_called_gate(modules: Mapping[str, nn.Module], fqn: str) -> bool:
    parent, _, name = fqn.rpartition(".")
    is_router = "router" in type(modules[parent]).__name__.lower()
    return name == "router" or (name in _NAMES and (is_router or "experts" in modules[parent]._modules))


def find_other_gates(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The class of every gate that is or holds no linear gate, as in transformers 5; ``modules`` as for ``is_gate``."""
    linear_gates = [fqn for fqn, module in modules.items() if isinstance(module, nn.Linear) and is_gate(modules, fqn)]
    return {
        fqn: type(module).__name__
        for fqn, module in modules.items()
        if fqn and _is_called_gate(modules, fqn) and not any(f"{gate}.".startswith(f"{fqn}.") for gate in linear_gates)
    }
