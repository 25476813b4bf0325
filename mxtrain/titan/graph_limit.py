"""How often torch.compile may compile a model's blocks. Beyond its limit it stops training.

TorchTitan compiles every block alone, and all blocks share one count, because they run the same code. A block needs
graphs for training, for validation and for other shapes; blocks with other recipes need graphs of their own.
"""

import torch
import torch.nn as nn

GRAPHS = 8
"""Graphs of a function that torch.compile allows by default"""


def allow_kinds(model: nn.Module) -> None:
    """Allow as many graphs for every kind of block as torch.compile allows for blocks that are all alike."""
    blocks = getattr(model, "layers", None)
    kinds = {repr(block) for block in blocks.children()} if isinstance(blocks, nn.Module) else ()
    _allow(GRAPHS * len(kinds))


def allow_states(model_parts: list[nn.Module], states: int) -> None:
    """Allow a graph more of every block for every state that the schedule and the guard give its layers."""
    layers = sum(getattr(module, "timeline", None) is not None for part in model_parts for module in part.modules())
    _allow(GRAPHS + states * layers)


def _allow(graphs: int) -> None:
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, graphs)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)
