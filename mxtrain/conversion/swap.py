"""Carry out a plan."""

from functools import partial
from itertools import accumulate

import torch
import torch.nn as nn

from mxtrain.conversion.plan import Plan, Swap
from mxtrain.conversion.survey import STANDARD
from mxtrain.errors import ConfigError
from mxtrain.nn.backward_hooks import refuse_backward_hook
from mxtrain.nn.experts import QuantizedExperts
from mxtrain.nn.group import LinearGroup
from mxtrain.nn.three_gemms import QuantizedLayer


def swap(model: nn.Module, plan: Plan, prefix: str = "") -> None:
    """Put the new modules of ``plan`` in their places, under all names that the old ones have.

    Attributes that were set on an old module move to the new one. All new modules are built before the first one is put
    in its place, and that step runs no code of the model, so that an error leaves the model unchanged.

    Args:
        prefix: FQN of ``model`` within a whole model. Keys of random bits are made from the names there.

    Raises:
        ConfigError: for a module with an attribute whose name the new module uses itself.
    """
    old = {fqn: model.get_submodule(fqn) for fqn in plan.swaps}
    with torch.inference_mode(False):  # tensors that a new module makes would be useless for training
        built = {fqn: _build(fqn, old[fqn], step, prefix) for fqn, step in plan.swaps.items()}
    new = {id(old[fqn]): module for fqn, module in built.items()}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in new:
                parent._modules[name] = new[id(child)]
    _switch_off_fast_path(model)
    for norm, mixture in plan.mixtures.items():
        built[mixture.experts].fed_by = (built[norm],)  # a tuple, because a module would become a child
    for norm, linears in plan.groups.items():
        built[norm].group = LinearGroup([built[fqn] for fqn in linears])
    for norm, layers in plan.feeds.items():
        gates = [plan.mixtures[norm].gate] if norm in plan.mixtures else []
        for layer in (*layers, *gates):
            _refuse_backward_hooks(model, norm, layer, prefix)


def _refuse_backward_hooks(model: nn.Module, norm: str, layer: str, prefix: str) -> None:
    """Refuse full backward hooks on modules around only one of a norm and a layer: the norm's result passes them."""
    around_norm, around_layer = ({*accumulate(fqn.split("."), "{}.{}".format)} for fqn in (norm, layer))
    for fqn in around_norm ^ around_layer:
        module = model.get_submodule(fqn)
        for name in ("register_full_backward_hook", "register_full_backward_pre_hook"):
            # Where the result is a tensor, its gradient is that of the plain model.
            if name not in vars(type(module)) and (fqn in around_norm or "pre" not in name):
                vars(module)[name] = partial(refuse_backward_hook, f"{prefix}.{fqn}" if prefix else fqn)


def _switch_off_fast_path(model: nn.Module) -> None:
    """Let PyTorch's encoder layers call their quantized linears in evaluation, as they do in training.

    Without gradients, one kernel computes a whole ``nn.TransformerEncoderLayer`` with ReLU or GELU. It reads the
    weights and quantizes nothing. ``nn.TransformerEncoder`` packs padded rows for it, and returns zeros in the padding.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and _is_quantized(module):
            module.activation_relu_or_gelu = 0  # neither of the two
        elif isinstance(module, nn.TransformerEncoder) and _is_quantized(module):
            module.use_nested_tensor = False


def _is_quantized(module: nn.Module) -> bool:
    return any(isinstance(part, QuantizedLayer) for part in module.modules())


def _build(fqn: str, old: nn.Module, step: Swap, prefix: str) -> nn.Module:
    new = step.build(f"{prefix}.{fqn}" if prefix else fqn, old)
    _move_attributes(fqn, old, new)
    # An optimizer numbers its states by the order of the parameters.
    for name in [name for name in old._parameters if name in new._parameters]:
        new._parameters[name] = new._parameters.pop(name)
    return new


def _move_attributes(fqn: str, old: nn.Module, new: nn.Module) -> None:
    """Set the attributes on ``new`` that were set on ``old`` by its user, such as tags for its initialization.

    Of a norm of the model's own class, all attributes move whose names are free.
    """
    usual = vars(STANDARD.get(type(old), nn.Module()))
    for name, value in vars(old).items():
        if name in usual:
            continue
        if not hasattr(new, name):
            setattr(new, name, value)
        elif type(old) in STANDARD or (isinstance(new, QuantizedExperts) and vars(new)[name] is not value):
            raise ConfigError(
                f"{fqn} has an attribute {name!r}, a name that {type(new).__name__} uses itself: rename the attribute, "
                "or name the module in filter_fqns"
            )
