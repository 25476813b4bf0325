"""Find the gates of mixture-of-experts routers."""

import torch.nn as nn


def router_gates(model: nn.Module) -> dict[str, nn.Linear]:
    """FQN -> module of every gate: the linear ``gate`` of a module whose class is called a router.

    TorchTitan's models all have the class ``TokenChoiceTopKRouter``.
    """
    return {
        f"{fqn}.gate".removeprefix("."): module.gate
        for fqn, module in model.named_modules()
        if "router" in type(module).__name__.lower() and isinstance(getattr(module, "gate", None), nn.Linear)
    }
