"""A copy of a module tree without the data of its parameters and buffers."""

import copy

import torch.nn as nn

from mxtrain.errors import ConfigError


def structural_copy(module: nn.Module) -> nn.Module:
    """Copy a module with everything in it; parameters and buffers become meta tensors.

    Modules and parameters with several names have the same names in the copy. Nothing that the copy does reaches the
    original, which a forward pass on the original with other weights (``torch.func.functional_call``) would: where a
    module has two names it puts meta tensors back as the weights.

    Raises:
        ConfigError: for a module with attributes that Python cannot copy.
    """
    copies = {}
    for tensor in (*module.parameters(), *module.buffers()):
        meta = tensor.detach().to("meta")
        copies[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    try:
        return copy.deepcopy(module, copies)
    except Exception as error:  # any attribute may raise anything
        raise ConfigError(
            f"this {type(module).__name__} cannot be copied, and conversion looks at a copy: "
            f"{type(error).__name__}: {error}"
        ) from error
