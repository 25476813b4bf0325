"""What an instance of a norm or linear has beyond its class. A new module in its place would not have it."""

from types import FunctionType

import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.parametrize import is_parametrized

from mxtrain.errors import ConfigError
from mxtrain.nn.row_norms import FusedLayerNorm, FusedRMSNorm

# The tables of hooks of an nn.Module whose hooks see inputs, outputs or their gradients.
_HOOKS_ON_VALUES = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}
_HOOKS = {
    **_HOOKS_ON_VALUES,
    "_state_dict_pre_hooks": "a state-dict pre-hook",
    "_state_dict_hooks": "a state-dict hook",
    "_load_state_dict_pre_hooks": "a load-state-dict pre-hook",
    "_load_state_dict_post_hooks": "a load-state-dict post-hook",
}

# Instances of these classes, as PyTorch or mxtrain makes them.
_STANDARD = {
    nn.Linear: nn.Linear(1, 1, device="meta"),
    nn.RMSNorm: nn.RMSNorm(1, device="meta"),
    FusedRMSNorm: FusedRMSNorm(1, device="meta"),
    nn.LayerNorm: nn.LayerNorm(1, device="meta"),
    FusedLayerNorm: FusedLayerNorm(1, device="meta"),
}

_MODULE = nn.Module()

# Dtypes of weights that some converter takes.
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def hook_tables(module: nn.Module) -> list[dict]:
    """Every table of hooks of ``module``."""
    return [getattr(module, table) for table in _HOOKS]


def hooks_on_values(module: nn.Module) -> list[str]:
    """The kinds of hooks of ``module`` that see inputs, outputs or their gradients: "a forward hook", ..."""
    return [kind for table, kind in _HOOKS_ON_VALUES.items() if getattr(module, table)]


def has_function_as_forward(module: nn.Module) -> bool:
    """Whether ``module.forward = f`` put a plain function in the place of the method.

    It may refer to any other object, the original model among them, and a copy of the module has the same function. A
    bound method (``types.MethodType``) is bound to the copy.
    """
    return isinstance(vars(module).get("forward"), FunctionType)


def move_attributes(fqn: str, old: nn.Module, new: nn.Module) -> None:
    """Set the attributes on ``new`` that were set on ``old`` by its user, such as tags for its initialization.

    Of a norm of the model's own class, all attributes move whose names are free.

    Raises:
        ConfigError: for an attribute whose name ``new`` uses itself.
    """
    standard = vars(_STANDARD.get(type(old), _MODULE))
    for name, value in vars(old).items():
        if name in standard:
            continue
        if not hasattr(new, name):
            setattr(new, name, value)
        elif type(old) in _STANDARD:
            raise ConfigError(
                f"{fqn} has an attribute {name!r}, a name that {type(new).__name__} uses itself: rename the attribute, "
                "or name the module in filter_fqns"
            )


def why_it_must_stay(module: nn.Module, is_around_mxnorm: bool = False) -> str | None:
    """What a norm or linear has that a new module in its place would lose, and the way out; None for nothing.

    Args:
        is_around_mxnorm: whether a swap would make it an MXNorm or a linear behind one.
    """
    if is_parametrized(module):
        names = ", ".join(module.parametrizations)
        return f"has a parametrization of {names}, which a swap would lose: register it after conversion"
    if hooks := [kind for table, kind in _HOOKS.items() if getattr(module, table)]:
        # Hooks there find a NormedInput among inputs or outputs, and None among gradients.
        unless = ", unless it needs the norm's result or its gradient as a tensor"
        way_out = f"register it after conversion{unless if is_around_mxnorm and hooks_on_values(module) else ''}"
        return f"has {' and '.join(hooks)}, which a swap would lose: {way_out}"
    for name in ("weight",) if isinstance(module, nn.Linear) else ("weight", "bias"):
        if reason := _why_parameter_must_stay(module, name):
            return reason
    if methods := [name for name in vars(module) if callable(getattr(type(module), name, None))]:
        return f"has its own {methods[0]}, which a swap would lose: set it after conversion"
    if type(module) in _STANDARD:
        standard = _STANDARD[type(module)]
        for tensors, usual in (
            (module._parameters, standard._parameters),
            (module._buffers, ()),
            (module._modules, ()),
        ):
            if added := [name for name in tensors if name not in usual]:
                return f"holds {', '.join(added)}, which a swap would lose: add it after conversion"
    return None


def _why_parameter_must_stay(module: nn.Module, name: str) -> str | None:
    standard = _STANDARD.get(type(module))
    if standard is not None and name in standard._parameters and name not in module._parameters:
        return f"has no parameter called {name}"
    parameter = module._parameters.get(name)
    if parameter is None:
        return None
    if type(parameter) not in (nn.Parameter, FakeTensor):
        return f"has a {name} of class {type(parameter).__name__}, not a torch.nn.Parameter"
    if parameter.layout is not torch.strided:
        return f"has a {name} of layout {parameter.layout}"
    if parameter.dtype not in _FLOATS:
        return f"has a {name} of {parameter.dtype}"
    if isinstance(module, nn.Linear) and parameter.shape != (module.out_features, module.in_features):
        return f"has a weight of shape {tuple(parameter.shape)}, not (out_features, in_features)"
    return None
