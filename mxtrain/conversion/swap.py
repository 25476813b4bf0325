"""Carry out a plan."""

import torch.nn as nn

from mxtrain.conversion.plan import Plan


def swap(model: nn.Module, plan: Plan) -> None:
    """Put the new modules of ``plan`` in their places.

    All of them are built before the first one is put in its place, so that an error leaves the model unchanged.
    """
    new = {fqn: step.build(fqn, model.get_submodule(fqn)) for fqn, step in plan.swaps.items()}
    for fqn, module in new.items():
        model.set_submodule(fqn, module, strict=True)
