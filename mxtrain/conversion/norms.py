"""The norms of a model: PyTorch's and mxtrain's by type, a model's own by results and gradients."""

from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature

import torch
import torch.nn as nn

from mxtrain.conversion.forward_pass import copy_of
from mxtrain.nn.recipe_module import RecipeModule
from mxtrain.norms import FUSED_NORMS

NormKind = type[nn.RMSNorm] | type[nn.LayerNorm]

_OF_ANY_MODULE = vars(nn.Module()).keys()
# Magnitudes of rows. eps dominates the small ones, which tells it apart from its neighbours; clamps change the large
# ones. The cube of the inverse RMS, which autograd computes in fp32, is finite and not 0.
_ROWS = (1.0, 1e2, 1e-2, 1e-4, 1e5, 1e-6, 1e8, 1e-10)
# Magnitudes of the parameters and of the gradient of y. Clamps change large results and gradients.
_SCALES = (1.0, 1e4)


@dataclass(frozen=True)
class NormFacts:
    """The norm of PyTorch that a module is or computes.

    Attributes:
        kind: its class; the other attributes are its arguments.
        recognised: class of the module, and how it was recognised, in words.
    """

    kind: NormKind
    normalized_shape: tuple[int, ...]
    eps: float | None
    elementwise_affine: bool = True
    bias: bool = False
    recognised: str = ""

    @property
    def why_it_stays(self) -> str | None:
        """Why no converter takes it; None if some may."""
        return None if len(self.normalized_shape) == 1 else "normalizes more than one dimension"

    def as_norm(self, module: nn.Module) -> nn.RMSNorm | nn.LayerNorm:
        """PyTorch's norm, which shares the parameters of ``module``, the module that these facts are about."""
        bias = {"bias": self.bias} if "bias" in FUSED_NORMS[self.kind].parameters_of else {}
        norm = self.kind(self.normalized_shape, self.eps, self.elementwise_affine, **bias, device="meta")
        for name in norm._parameters:
            setattr(norm, name, getattr(module, name, None))
        return norm.train(module.training)


def find_norms(
    modules: Mapping[str, nn.Module],
) -> tuple[dict[str, NormFacts], dict[NormKind, dict[str, str]]]:
    """Every norm, and by kind the modules that are only called a norm of this kind -> what they are, in words.

    Args:
        modules: every module of a model by FQN. The model itself, called "", is left out: nothing can replace it.
    """
    norms, lookalikes, known = {}, {kind: {} for kind in FUSED_NORMS}, {}
    for fqn, module in modules.items():
        name = type(module).__name__.lower().replace("_", "")
        if not fqn or not (isinstance(module, nn.RMSNorm | nn.LayerNorm) or "norm" in name):
            continue
        key = _settings(module)
        if key not in known:
            known[key] = norm_facts(module)
        if isinstance(known[key], NormFacts):
            norms[fqn] = known[key]
            continue
        for kind, reason in known[key].items():
            is_derived = isinstance(module, kind) and not isinstance(module, RecipeModule)
            if is_derived or kind.__name__.lower() in name:
                lookalikes[kind][fqn] = reason
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


def norm_facts(module: nn.Module) -> NormFacts | dict[NormKind, str]:
    """Which norm of PyTorch the module is or computes; for any other module, why it is none of each kind.

    Many models bring norm classes of their own, with "norm" in the name, a 1-D ``weight``, and an eps under some name.
    Such a module is an RMSNorm or LayerNorm if its results have the dtype of the rows that it gets, and results and
    gradients are those of PyTorch's norm for one of the floats that it holds as attributes. (A norm that scales by
    1 + weight is not, and one that is called a LayerNorm may be an RMSNorm, as T5's.) A module whose forward takes more
    than x, such as a gate or a residual, is none: random rows alone do not show what it does with the rest.
    """
    name, has_bias, reasons = type(module).__name__, "bias" in dict(module.named_parameters()), {}
    for kind, fused in FUSED_NORMS.items():
        if type(module) in (kind, fused):
            shape = tuple(module.normalized_shape)
            return NormFacts(kind, shape, module.eps, module.elementwise_affine, has_bias, f"{name} by type")
        if reason := _why_none(module, kind):
            reasons[kind] = f"is a {name} {reason}"
        elif (eps := _eps_of(module, kind)) is None:
            norm = f"nn.{kind.__name__}"
            reasons[kind] = (
                f"is a {name} that does not compute the results and gradients of {norm} with an attribute as eps, or "
                "changes the dtype"
            )
        else:
            shape = tuple(module.weight.shape)
            return NormFacts(kind, shape, eps, True, has_bias, f"{name} by results and gradients")
    return reasons


def _why_none(module: nn.Module, kind: NormKind) -> str | None:
    """What tells without a run that a module does not compute a norm of this kind."""
    parameters, norm = dict(module.named_parameters()), f"nn.{kind.__name__}"
    if not parameters:
        return f"without a weight to tell its row length: use {norm}(D, elementwise_affine=False)"
    if unknown := sorted(parameters.keys() - {"weight", "bias"}):
        return f"with the parameters {', '.join(unknown)}, which {norm} does not have"
    if "forward" in vars(module):
        return "with a forward of its own"
    if len(signature(module.forward).parameters) != 1:
        return "whose forward takes more than x"
    shapes, allowed = {parameter.shape for parameter in parameters.values()}, {*FUSED_NORMS[kind].parameters_of}
    if not {"weight"} <= parameters.keys() <= allowed or dict(module.named_buffers()) or [*map(len, shapes)] != [1]:
        return f"with other parameters or buffers than an {norm} of one dimension"
    return None


@torch.inference_mode(False)
@torch.enable_grad()
def _eps_of(module: nn.Module, kind: NormKind) -> float | None:
    """The float among the attributes of ``module`` with which it computes PyTorch's norm; None if there is none.

    A copy of the module runs; the module's own parameters may be on the meta device.
    """
    try:
        with torch.random.fork_rng(devices=()):
            runs = _runs(module)
    except Exception:  # the module is no function of rows
        return None
    # The largest first: these rows cannot tell a tiny eps from 0, with which a row of zeros becomes NaN.
    candidates = sorted({value for value in vars(module).values() if isinstance(value, float)}, reverse=True)
    return next((eps for eps in candidates if all(_agrees(*run, kind, eps) for run in runs)), None)


def _runs(module: nn.Module) -> list[tuple]:
    """Run a copy of the module, in training and in evaluation -> (x, vectors, dy, results) of every run.

    The rows form a matrix and then a batch of sequences: a norm of another dimension gives other results or fails,
    because that dimension has another length.
    """
    generator, dim = torch.Generator("cpu").manual_seed(0), module.weight.numel()

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")  # whatever the defaults are

    norm = copy_of(module, lambda tensor: draw(*tensor.shape)).requires_grad_()
    x, dy, runs, dtypes = draw(2, len(_ROWS), dim), draw(2, len(_ROWS), dim), [], set()
    x *= x.new_tensor(_ROWS).unsqueeze(1)
    for dtype in (torch.bfloat16, torch.float32):  # of the parameters: some norms need fp32
        with suppress(RuntimeError):  # mixed dtypes
            dtypes.add(norm.to(dtype)(x.bfloat16()).dtype)
    if torch.bfloat16 not in dtypes:
        raise TypeError("a norm keeps the dtype")
    for scale, shape in zip(_SCALES, (x.shape, (-1, 4 if dim == 2 else 2, dim))):
        for vector in norm.parameters():
            vector.data.mul_(scale)
        vectors = {name: vector.detach().double() for name, vector in norm.named_parameters()}
        for training in (True, False):
            rows, gradient = x.view(shape).requires_grad_(), scale * dy.view(shape)
            results = _results(norm.train(training)(rows), (rows, *norm.parameters()), gradient)
            runs.append((rows.detach().double(), vectors, gradient.double(), results))
    return runs


def _results(y: torch.Tensor, leaves: tuple[torch.Tensor, ...], dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """y, and the gradients of all leaves. A module fails that does not give them all."""
    return y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))


def _agrees(x, vectors, dy, results, kind: NormKind, eps: float) -> bool:
    """Whether the results of a run are those of a norm with this eps."""
    leaves = (x.requires_grad_(), *(vector.requires_grad_() for vector in vectors.values()))
    wanted = _results(FUSED_NORMS[kind].formula(x, x.shape[-1:], eps=eps, **vectors), leaves, dy)
    # Digits cancel where means are subtracted and a bias is added. dx is a difference of terms of this magnitude.
    terms = dy * vectors["weight"] * (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    for got, want, magnitude in zip(results, wanted, (wanted[0], terms, *wanted[2:])):
        limit = 1e-4 * want.abs() + 1e-5 * magnitude.abs().amax(-1, keepdim=True)
        if not ((got.double() - want).abs() <= limit).all():
            return False
    return True
