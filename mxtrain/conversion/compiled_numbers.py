"""Numbers of recipes in compiled graphs."""

import torch


def make_numbers_constant() -> None:
    """Let ``torch.compile`` make every number that is no tensor a constant of the graphs that it compiles from now on.

    By default, a number that differs between two calls of the same code becomes an input of the graph. Recipes that
    differ between layers, or between steps, have such numbers: block sizes and c(p, B). Kernels need them as constants,
    and PyTorch 2.13 and 2.15 stop with an error where they are not. Each recipe is then compiled once.

    As for ``mxtrain.inductor.passes.install``, threads have a configuration of their own.
    """
    config = torch._dynamo.config
    config.specialize_int = config.specialize_float = True
