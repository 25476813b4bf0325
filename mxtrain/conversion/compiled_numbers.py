"""Numbers of recipes in compiled graphs."""

import torch


def make_numbers_constant() -> None:
    """Let ``torch.compile`` make every number that is no tensor a constant of the graphs that it compiles from now on.

    By default, Dynamo makes a number a variable if it differs between two calls of the same code. Autograd functions
    take keys (``mxtrain.recipes.keyed``), but the layers compare their recipes before: block sizes differ between
    layers, or between steps. Under tensor parallelism, PyTorch 2.13 stops with an error where ``MXNormLinear.forward``
    compares its recipe with the norm's. PyTorch 2.11 compiles one of the graphs twice.

    As for ``mxtrain.inductor.passes.install``, threads have a configuration of their own.
    """
    config = torch._dynamo.config
    config.specialize_int = config.specialize_float = True
