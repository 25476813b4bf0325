"""The norms and linears of a model, as plain values. A norm of any class is recognised by its results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from mxtrain.conversion.gates import is_gate, is_in_gate
from mxtrain.conversion.structural_copy import structural_copy, without_global_hooks
from mxtrain.nn.fused_layer_norm import FusedLayerNorm
from mxtrain.nn.fused_rms_norm import FusedRMSNorm
from mxtrain.nn.recipe_module import RecipeModule

# Rows of these magnitudes tell any eps apart from its neighbours: with eps = 1e-6 it dominates the smallest rows.
_MAGNITUDES = (1e-4, 1e-2, 1.0, 100.0)


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


def looks_like_rms_norm(module: nn.Module) -> bool:
    """Whether the module's class is called an RMSNorm, or derived from PyTorch's."""
    is_derived = isinstance(module, nn.RMSNorm) and not isinstance(module, RecipeModule)
    return is_derived or "rmsnorm" in _name_of(module)


def looks_like_layer_norm(module: nn.Module) -> bool:
    """Whether the module's class is called a LayerNorm, or derived from PyTorch's."""
    return isinstance(module, nn.LayerNorm) or "layernorm" in _name_of(module)


def _may_be_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.RMSNorm | nn.LayerNorm) or "norm" in _name_of(module)


def _name_of(module: nn.Module) -> str:
    return type(module).__name__.lower().replace("_", "")


def rms_norm_facts(module: nn.Module) -> NormFacts | None:
    """Which ``nn.RMSNorm`` the module is or computes; None for any other module.

    Many models bring an RMSNorm class of their own, with "norm" in its name, a 1-D ``weight``, and an eps under some
    name. Such a module is run on random rows with a random weight, in training and in evaluation. The rows form a
    matrix and then a batch of sequences, which shows whether the module normalizes the last dimension. It is an RMSNorm
    if its results have the dtype of the rows and are those of ``F.rms_norm`` for one of the floats that it holds as
    attributes. (A norm that scales by 1 + weight is not, one that is called a LayerNorm may be, as T5's.)
    A copy of the module runs; the module's own weight may be on the meta device. A module whose forward takes more than
    x, such as a gate or a residual, is none: random rows alone do not show what it does with the rest.
    """
    if type(module) in (nn.RMSNorm, FusedRMSNorm):
        return NormFacts(tuple(module.normalized_shape), module.eps, module.elementwise_affine)
    if not _may_be_norm(module) or dict(module.named_parameters()).keys() != {"weight"}:
        return None
    eps = _eps_of(module, lambda rows, weight, eps: F.rms_norm(rows, weight.shape, weight, eps))
    return None if eps is None else NormFacts(tuple(module.weight.shape), eps, True)


def layer_norm_facts(module: nn.Module) -> LayerNormFacts | None:
    """Which ``nn.LayerNorm`` the module is or computes; None for any other module.

    A model's own class runs on random rows as in ``rms_norm_facts``, with a random weight and, if it has a bias, a
    random bias.
    """
    if type(module) in (nn.LayerNorm, FusedLayerNorm):
        has_bias = module.bias is not None
        return LayerNormFacts(tuple(module.normalized_shape), module.eps, module.elementwise_affine, has_bias)
    names = dict(module.named_parameters()).keys()
    if isinstance(module, nn.RMSNorm) or not _may_be_norm(module) or names not in ({"weight"}, {"weight", "bias"}):
        return None

    def normalize(rows, weight, eps, bias=None):
        return F.layer_norm(rows, weight.shape, weight, bias, eps)

    # Digits may cancel where the mean is subtracted and the bias added.
    eps = _eps_of(module, normalize, noise=1e-5)
    return None if eps is None else LayerNormFacts(tuple(module.weight.shape), eps, True, "bias" in names)


def _eps_of(module: nn.Module, normalize: Callable[..., torch.Tensor], noise: float = 0.0) -> float | None:
    """The eps for which ``module`` has the results of ``normalize(rows, weight=..., eps=...)``; None if there is none.

    A module that returns another dtype than it gets has none.

    Args:
        normalize: gets random rows, and a random vector for every parameter under its name.
        noise: allowed error beside a relative error of 1e-4, as a share of the largest result in the row.
    """
    parameters = dict(module.named_parameters())
    shapes = {parameter.shape for parameter in parameters.values()}
    if dict(module.named_buffers()) or len(shapes) != 1 or len(next(iter(shapes))) != 1:
        return None
    if len(signature(module.forward).parameters) != 1:
        return None
    (dim,) = shapes.pop()
    generator = torch.Generator("cpu").manual_seed(0)
    in_fp32 = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
    rows = torch.randn(len(_MAGNITUDES), dim, generator=generator, **in_fp32)
    rows *= torch.tensor(_MAGNITUDES, **in_fp32).unsqueeze(1)
    vectors = {name: torch.randn(dim, generator=generator, **in_fp32) for name in sorted(parameters, reverse=True)}
    # A norm of another dimension gives other results or fails, because that dimension has another length.
    sequences = rows.view(-1, 4 if dim == 2 else 2, dim)
    try:
        with torch.no_grad(), without_global_hooks(), torch.random.fork_rng(devices=()):
            copy = structural_copy(module)
            runs = [(x, training) for x in (rows, sequences) for training in (True, False)]
            results = [torch.func.functional_call(copy.train(training), vectors, (x,)) for x, training in runs]
            keeps_dtype = _returns_bf16(copy, vectors, rows)
    except Exception:  # the module is no function of rows and these vectors
        return None
    if any(not isinstance(y, torch.Tensor) or y.shape != x.shape for (x, _), y in zip(runs, results)):
        return None
    if not keeps_dtype:
        return None
    # The largest first: these rows cannot tell a tiny eps from 0, with which a row of zeros becomes NaN.
    for eps in sorted({value for value in vars(module).values() if isinstance(value, float)}, reverse=True):
        want = normalize(rows, eps=eps, **vectors)
        limit = 1e-4 * want.abs() + noise * want.abs().amax(1, keepdim=True)
        if all(((result.float().reshape(rows.shape) - want).abs() <= limit).all() for result in results):
            return eps
    return None


def _returns_bf16(norm: nn.Module, vectors: Mapping[str, torch.Tensor], rows: torch.Tensor) -> bool:
    """Whether a norm keeps the dtype of bf16 rows, with parameters in bf16 or, as some norms need, in fp32."""
    for dtype in (torch.bfloat16, torch.float32):
        parameters = {name: vector.to(dtype) for name, vector in vectors.items()}
        try:
            if torch.func.functional_call(norm, parameters, (rows.bfloat16(),)).dtype == torch.bfloat16:
                return True
        except RuntimeError:  # mixed dtypes
            continue
    return False


def find_gates(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear gate of a router by FQN."""
    modules = dict(model.named_modules())
    return {fqn: modules[fqn] for fqn, linear in find_linears(modules).items() if linear.is_gate}


def find_norms(modules: Mapping[str, nn.Module]) -> tuple[dict[str, NormFacts], dict[str, str]]:
    """Every module that is or computes an RMSNorm, and the modules that are only called so -> what they are.

    Args:
        modules: every module of a model by FQN. The model itself, called "", is left out: nothing can replace it.
    """
    return _find(modules, rms_norm_facts, looks_like_rms_norm, "RMSNorm")


def find_layer_norms(modules: Mapping[str, nn.Module]) -> tuple[dict[str, LayerNormFacts], dict[str, str]]:
    """Every LayerNorm, and the modules that are only called a LayerNorm -> what they are; see ``find_norms``."""
    return _find(modules, layer_norm_facts, looks_like_layer_norm, "LayerNorm")


def _find(
    modules: Mapping[str, nn.Module], facts_of: Callable, looks_like: Callable, name: str
) -> tuple[dict, dict[str, str]]:
    norms, lookalikes = {}, {}
    for fqn, module in modules.items():
        if not fqn:
            continue
        if facts := facts_of(module):
            norms[fqn] = facts
        elif looks_like(module):
            lookalikes[fqn] = _what_it_is(module, name)
    return norms, lookalikes


def _what_it_is(lookalike: nn.Module, name: str) -> str:
    kind = type(lookalike).__name__
    if not dict(lookalike.named_parameters()):
        return f"is a {kind} without a weight to tell its row length: use nn.{name}(D, elementwise_affine=False)"
    if unknown := sorted(dict(lookalike.named_parameters()).keys() - {"weight", "bias"}):
        return f"is a {kind} with the parameters {', '.join(unknown)}, which nn.{name} does not have"
    if len(signature(lookalike.forward).parameters) != 1:
        return f"is a {kind} whose forward takes more than x"
    return f"is a {kind} that does not compute what nn.{name} does with an attribute as eps, or changes the dtype"


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
