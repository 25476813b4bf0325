"""A copy of a module tree without the data of its tensors, and without hooks."""

import copy
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch.nn.modules import module as module_globals
from torch.utils._pytree import tree_leaves

from mxtrain.conversion.instance_state import has_function_as_forward, hook_tables
from mxtrain.errors import ConfigError

_GLOBAL_HOOKS = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


@contextmanager
def without_global_hooks():
    """Keep the hooks that the user registered for all modules away while a copy runs."""
    tables = [getattr(module_globals, name) for name in _GLOBAL_HOOKS]
    saved = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, saved):
            table.update(hooks)


def structural_copy(module: nn.Module) -> nn.Module:
    """Copy a module with everything in it; parameters, buffers and tensors in attributes become meta tensors.

    Modules and parameters with several names have the same names in the copy. Nothing that the copy does reaches the
    original, which a forward pass on the original with other weights (``torch.func.functional_call``) would: where a
    module has two names it puts meta tensors back as the weights. Hooks, and functions in the place of a forward, are
    left out for the same reason: they belong to the user, and may keep what they see.

    Raises:
        ConfigError: for a module with attributes that Python cannot copy.
    """
    attributes = [
        value
        for part in module.modules()
        for value in tree_leaves(list(vars(part).values()))
        if isinstance(value, torch.Tensor)
    ]
    copies = {id(table): type(table)() for part in module.modules() for table in hook_tables(part)}
    try:
        for tensor in (*module.parameters(), *module.buffers(), *attributes):
            meta = tensor.detach().to("meta")
            copies[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
        copied = copy.deepcopy(module, copies)
    except Exception as error:  # any attribute may raise anything
        raise ConfigError(
            f"this {type(module).__name__} cannot be copied, and conversion looks at a copy: "
            f"{type(error).__name__}: {error}"
        ) from error
    for part in copied.modules():
        if has_function_as_forward(part):
            del vars(part)["forward"]
    return copied
