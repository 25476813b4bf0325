"""The norms and linears of a model, as plain values. A norm of any class is recognised by results and gradients."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import NamedTuple

import torch.nn as nn

from mxtrain.conversion.gates import is_gate, is_in_gate
from mxtrain.conversion.norm_probe import SAME_RESULTS, eps_of
from mxtrain.nn.recipe_module import RecipeModule
from mxtrain.nn.row_norms import FusedLayerNorm, FusedRMSNorm

_TYPES = (nn.RMSNorm, FusedRMSNorm, nn.LayerNorm, FusedLayerNorm)
_OF_ANY_MODULE = vars(nn.Module()).keys()


class NormFacts(NamedTuple):
    """The arguments of the ``nn.RMSNorm`` that a module is or computes."""

    normalized_shape: tuple[int, ...]
    eps: float | None
    elementwise_affine: bool

    def as_rms_norm(self, module: nn.Module) -> nn.RMSNorm:
        """An ``nn.RMSNorm`` that shares the weight of ``module``, the module that these facts are about."""
        norm = nn.RMSNorm(self.normalized_shape, self.eps, self.elementwise_affine, device="meta")
        norm.weight = module.weight
        return norm.train(module.training)


class LayerNormFacts(NamedTuple):
    """The arguments of the ``nn.LayerNorm`` that a module is or computes."""

    normalized_shape: tuple[int, ...]
    eps: float
    elementwise_affine: bool
    bias: bool

    def as_layer_norm(self, module: nn.Module) -> nn.LayerNorm:
        """An ``nn.LayerNorm`` that shares the parameters of ``module``, the module that these facts are about."""
        norm = nn.LayerNorm(*self, device="meta")
        norm.weight, norm.bias = module.weight, module.bias if self.bias else None
        return norm.train(module.training)


@dataclass(frozen=True)
class LinearFacts:
    """An ``nn.Linear`` or a subclass of it.

    Attributes:
        kind: name of its class; with its module if the class is called "Linear", as PyTorch's own.
        is_plain: whether its class is ``nn.Linear`` itself.
        is_gate: whether it is the gate of a router.
        shares_weight: whether another module owns its weight, too.
        is_in_gate: whether it lies in a module that is called as a gate is.
    """

    in_features: int
    out_features: int
    kind: str
    is_plain: bool
    is_gate: bool
    shares_weight: bool
    is_in_gate: bool = False


def rms_norm_facts(module: nn.Module) -> NormFacts | str:
    """Which ``nn.RMSNorm`` the module is or computes; for any other module, what it is.

    Many models bring an RMSNorm class of their own, with "norm" in its name, a 1-D ``weight``, and an eps under some
    name. Such a module is an RMSNorm if its results have the dtype of the rows that it gets, and results and gradients
    are RMSNorm's for one of the floats that it holds as attributes (``norm_probe``). (A norm that scales by 1 + weight
    is not, one that is called a LayerNorm may be, as T5's.) A module whose forward takes more than x, such as a gate or
    a residual, is none: random rows alone do not show what it does with the rest.
    """
    if type(module) in (nn.RMSNorm, FusedRMSNorm):
        return NormFacts(tuple(module.normalized_shape), module.eps, module.elementwise_affine)
    eps = _computed_eps(module, "RMSNorm", {"weight"})
    return eps if isinstance(eps, str) else NormFacts(tuple(module.weight.shape), eps, True)


def layer_norm_facts(module: nn.Module) -> LayerNormFacts | str:
    """Which ``nn.LayerNorm`` the module is or computes, as ``rms_norm_facts``; the module may have a bias."""
    has_bias = "bias" in dict(module.named_parameters())
    if type(module) in (nn.LayerNorm, FusedLayerNorm):
        return LayerNormFacts(tuple(module.normalized_shape), module.eps, module.elementwise_affine, has_bias)
    if isinstance(module, nn.RMSNorm):
        return "is derived from nn.RMSNorm"
    eps = _computed_eps(module, "LayerNorm", {"weight", "bias"})
    return eps if isinstance(eps, str) else LayerNormFacts(tuple(module.weight.shape), eps, True, has_bias)


def _computed_eps(module: nn.Module, name: str, names: set[str]) -> float | str:
    """The eps with which a module computes PyTorch's norm ``name`` with parameters called ``names``; or what it is."""
    kind, parameters = type(module).__name__, dict(module.named_parameters())
    if not parameters:
        return f"is a {kind} without a weight to tell its row length: use nn.{name}(D, elementwise_affine=False)"
    if unknown := sorted(parameters.keys() - {"weight", "bias"}):
        return f"is a {kind} with the parameters {', '.join(unknown)}, which nn.{name} does not have"
    if len(signature(module.forward).parameters) != 1:
        return f"is a {kind} whose forward takes more than x"
    shapes = {tuple(parameter.shape) for parameter in parameters.values()}
    if not {"weight"} <= parameters.keys() <= names or dict(module.named_buffers()) or [*map(len, shapes)] != [1]:
        return f"is a {kind} with other parameters or buffers than an nn.{name} of one dimension"
    eps = eps_of(module, name)
    return f"is a {kind} that {eps}" if isinstance(eps, str) else eps


def how_recognised(module: nn.Module) -> str:
    """The class of a norm, and how it is known to be one."""
    return f"{type(module).__name__} by {'type' if type(module) in _TYPES else 'results and gradients'}"


def find_gates(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear gate of a router by FQN."""
    modules = dict(model.named_modules())
    return {fqn: modules[fqn] for fqn, linear in find_linears(modules).items() if linear.is_gate}


def find_norms(modules: Mapping[str, nn.Module]) -> tuple[dict[str, NormFacts], dict[str, str]]:
    """Every module that is or computes an RMSNorm, and the modules that are only called so -> what they are.

    Args:
        modules: every module of a model by FQN. The model itself, called "", is left out: nothing can replace it.
    """
    return _find(modules, rms_norm_facts, nn.RMSNorm)


def find_layer_norms(modules: Mapping[str, nn.Module]) -> tuple[dict[str, LayerNormFacts], dict[str, str]]:
    """Every LayerNorm, and the modules that are only called a LayerNorm -> what they are; see ``find_norms``."""
    return _find(modules, layer_norm_facts, nn.LayerNorm)


def _find(modules: Mapping[str, nn.Module], facts_of: Callable, kind: type) -> tuple[dict, dict[str, str]]:
    norms, lookalikes, known = {}, {}, {}
    for fqn, module in modules.items():
        name = type(module).__name__.lower().replace("_", "")
        if not fqn or not (isinstance(module, nn.RMSNorm | nn.LayerNorm) or "norm" in name):
            continue
        key = _settings(module)
        if key not in known:
            known[key] = facts_of(module)
        is_derived = isinstance(module, kind) and not isinstance(module, RecipeModule)
        if not isinstance(known[key], str):
            norms[fqn] = known[key]
        elif is_derived or kind.__name__.lower() in name or SAME_RESULTS in known[key]:
            lookalikes[fqn] = known[key]
    return norms, lookalikes


def _settings(module: nn.Module) -> Hashable:
    """Equal for modules that compute the same with equal parameters, such as the norms of all layers."""
    attributes = [(name, type(value), value) for name, value in vars(module).items() if name not in _OF_ANY_MODULE]
    shapes = [(name, parameter.shape) for name, parameter in module.named_parameters()]
    key = type(module), *attributes, *shapes, *module.children(), *module.buffers()
    try:
        hash(key)
    except TypeError:  # a list or a dict
        return id(module)
    return key


def find_linears(modules: Mapping[str, nn.Module]) -> dict[str, LinearFacts]:
    """Every linear; ``modules`` as for ``find_norms``."""
    owners: dict[int, int] = {}
    for module in modules.values():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    linears = {}
    for fqn, module in modules.items():
        if fqn and isinstance(module, nn.Linear):
            weight = module._parameters.get("weight")  # module.weight would compute a parametrized weight
            linears[fqn] = LinearFacts(
                in_features=module.in_features,
                out_features=module.out_features,
                kind=_kind(module),
                is_plain=type(module) is nn.Linear,
                is_gate=is_gate(modules, fqn),
                shares_weight=owners.get(id(weight), 1) > 1,
                is_in_gate=is_in_gate(modules, fqn),
            )
    return linears


def _kind(linear: nn.Linear) -> str:
    kind = type(linear)
    is_namesake = kind is not nn.Linear and kind.__name__ == nn.Linear.__name__
    return f"{kind.__module__}.{kind.__qualname__}" if is_namesake else kind.__name__
