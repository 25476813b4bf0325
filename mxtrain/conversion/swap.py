"""Carry out a plan."""

import torch.nn as nn

from mxtrain.conversion.plan import Plan


def swap(model: nn.Module, plan: Plan) -> None:
    """Put the new modules of ``plan`` in their places, under all names that the old ones have.

    All of them are built before the first one is put in its place, so that an error leaves the model unchanged.
    """
    old = {fqn: model.get_submodule(fqn) for fqn in plan.swaps}
    new = {id(old[fqn]): step.build(fqn, old[fqn]) for fqn, step in plan.swaps.items()}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in new:
                setattr(parent, name, new[id(child)])
