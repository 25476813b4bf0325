"""``optimizer.name = "Muon"``: Muon for the matrices of blocks, AdamW for embedding, head, gains and biases."""

from collections.abc import Callable
from itertools import compress

import torch
from torch.optim import Optimizer

from mxtrain.parallel.muon import Muon

NAME = "Muon"


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon trains a parameter: a matrix of a block, also of a router or of experts."""
    return name.startswith("layers.") and parameter.ndim > 1 and not name.endswith("bias")


def give_matrices_to_muon(optimizers, build: Callable[..., Optimizer] = Muon) -> None:
    """Let Muon train the matrices, with AdamW's learning rate and decay: up to two optimizers for a part of the model.

    Args:
        optimizers: TorchTitan's container before its first step, with one AdamW of one group for each part.
        build: makes an optimizer from a parameter group, ``lr`` and ``weight_decay``.
    """
    found = []
    for part, adamw in zip(optimizers.model_parts, optimizers.optimizers, strict=True):
        names = {parameter: name for name, parameter in part.named_parameters()}
        (group,) = adamw.param_groups
        by_muon = [is_matrix(names[parameter], parameter) for parameter in group["params"]]
        lists = {key: group[key] for key in ("params", "param_names") if key in group}  # names in 0.3 only
        matrices = {key: [*compress(values, by_muon)] for key, values in lists.items()}
        group |= {key: [*compress(values, (not own for own in by_muon))] for key, values in lists.items()}
        if group["params"]:
            found.append((part, adamw))
        if matrices["params"]:
            found.append((part, build(matrices, lr=group["lr"], weight_decay=group["weight_decay"])))
    optimizers.model_parts, optimizers.optimizers = map(list, zip(*found))
