"""Full backward hooks on modules that take or return the result of an MXNorm: they are refused.

On the plain model they see and edit dL/dy, the gradient of the norm's result y. An MXNorm's result has the gradients
dL/dxhat and dL/dgain instead, and is a tuple, in whose place PyTorch shows a hook None and drops what the hook returns.

Hooks on modules that hold a norm with all its linears are served. So are ``register_full_backward_pre_hook`` and hooks
of tensors, wherever the module's result is a tensor.
"""

import torch
from torch.nn.modules import module as of_all_modules

from mxtrain.errors import ConfigError


def refuse_backward_hook(name: str, *_, **__) -> None:
    """Raise ConfigError. Takes the place of the methods of the module called ``name`` that register a hook."""
    raise ConfigError(
        f"a full backward hook on {name} cannot see the gradient of an MXNorm's result, which is no tensor: hook the "
        "block that holds the norm and its linears, use register_full_backward_pre_hook on a linear for the gradient "
        "of its result, name the norm in filter_fqns, or convert the model with 'mx_linear'"
    )


def refuse_global_backward_hooks(norm) -> None:
    """Raise ConfigError if PyTorch would call full backward hooks of all modules on this MXNorm.

    A compiled graph may not look at the norm's name before that: it would be compiled for one name.
    ``register_module_full_backward_pre_hook`` is left alone: PyTorch's ``CommDebugMode`` uses it and edits nothing.
    """
    if of_all_modules._global_backward_hooks and torch.is_grad_enabled():
        refuse_backward_hook(f"all modules, {norm.fqn or 'an MXNorm'} among them,")
