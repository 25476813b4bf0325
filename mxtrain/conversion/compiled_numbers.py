"""Numbers of recipes in compiled graphs."""

import torch


def make_numbers_constant() -> None:
    """Let ``torch.compile`` make every number that is no tensor a constant of the graphs that it compiles from now on.

    By default, Dynamo makes a number a variable if it differs between two calls of the same code. The layers compare
    recipes, whose block sizes may differ between layers and between steps. (Autograd functions see no such number, only
    keys: ``mxtrain.recipes.keyed``.) Without this setting, PyTorch 2.13 stops with an error under tensor parallelism,
    where ``MXNormLinear.forward`` compares its recipe with the norm's, and PyTorch 2.11 compiles a graph twice.

    As for ``mxtrain.inductor.passes.install``, threads have a configuration of their own.
    """
    config = torch._dynamo.config
    config.specialize_int = config.specialize_float = True
