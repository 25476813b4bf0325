"""The names of TorchTitan and PyTorch that mxtrain replaces for a time: nothing takes a replacement as an argument.

The other files of this folder replace what their fault needs.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from unittest.mock import patch


@contextmanager
def in_every_module(name: str, function: Callable, replacement: Callable) -> Iterator[None]:
    """While active, every module that has imported ``function`` by its name has ``replacement`` in its place.

    These are TorchTitan's modules and those of a user's own models. mxtrain's and PyTorch's keep the function.
    """
    with ExitStack() as patches:
        for module, holder in list(sys.modules.items()):
            is_own = module.split(".")[0] in ("mxtrain", "torch")
            if not is_own and vars(holder).get(name) is function:
                patches.enter_context(patch.object(holder, name, replacement))
        yield


def meshes_on_cpu() -> AbstractContextManager:
    """A mesh of GPUs may not span other numbers of them than this machine has."""
    return patch("torchtitan.distributed.parallel_dims.device_type", "cpu")
