"""The norms of a model: PyTorch's and mxtrain's by type, a model's own by results and gradients."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature

import torch
import torch.nn as nn

from mxtrain.conversion.forward_pass import copy_of
from mxtrain.nn.recipe_module import RecipeModule
from mxtrain.norms import FUSED_NORMS

NormKind = type[nn.RMSNorm] | type[nn.LayerNorm]

# Magnitudes of rows. eps dominates the small ones, which tells it apart from its neighbours.
_ROWS = (1.0, 1e-2, 1e-4, 1e-6)


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
    norms, lookalikes = {}, {kind: {} for kind in FUSED_NORMS}
    for fqn, module in modules.items():
        name = type(module).__name__.lower().replace("_", "")
        if not fqn or not (isinstance(module, tuple(FUSED_NORMS)) or "norm" in name):
            continue
        if facts := norm_facts(module):
            norms[fqn] = facts
            continue
        for kind in FUSED_NORMS:
            is_derived = isinstance(module, kind) and not isinstance(module, RecipeModule)
            if is_derived or kind.__name__.lower() in name:
                lookalikes[kind][fqn] = f"is a {type(module).__name__} {_why_none(module, kind) or _differs(kind)}"
    return norms, lookalikes


def norm_facts(module: nn.Module) -> NormFacts | None:
    """Which norm of PyTorch the module is or computes; None for any other module.

    Many models bring norm classes of their own, with "norm" in the name, a 1-D ``weight``, and an eps under some name.
    Such a module is an RMSNorm or LayerNorm if its results have the dtype of the rows that it gets, and results and
    gradients are those of PyTorch's norm for one of the floats that it holds as attributes. (A norm that scales by
    1 + weight is not, and one that is called a LayerNorm may be an RMSNorm, as T5's.) A module whose forward takes more
    than x, such as a gate or a residual, is none: random rows alone do not show what it does with the rest.
    """
    name, has_bias = type(module).__name__, "bias" in dict(module.named_parameters())
    for kind, fused in FUSED_NORMS.items():
        if type(module) in (kind, fused):
            shape = tuple(module.normalized_shape)
            return NormFacts(kind, shape, module.eps, module.elementwise_affine, has_bias, f"{name} by type")
        if not _why_none(module, kind) and (eps := _eps_of(module, kind)) is not None:
            shape = tuple(module.weight.shape)
            return NormFacts(kind, shape, eps, True, has_bias, f"{name} by results and gradients")
    return None


def _differs(kind: NormKind) -> str:
    norm = f"nn.{kind.__name__}"
    return f"that does not compute the results and gradients of {norm} with an attribute as eps, or changes the dtype"


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


@torch.enable_grad()
def _eps_of(module: nn.Module, kind: NormKind) -> float | None:
    """The float among the attributes of ``module`` with which it computes PyTorch's norm; None if there is none.

    A copy runs in training, where a dropout shows; the module's own parameters may be on the meta device. Its rows are
    a batch of sequences, because a norm over another dimension of a matrix may compute the same.
    """
    generator, dim = torch.Generator("cpu").manual_seed(0), module.weight.numel()

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")  # whatever the defaults are

    x, dy = draw(2, len(_ROWS), dim) * draw(1).new_tensor(_ROWS).unsqueeze(1), draw(2, len(_ROWS), dim)
    try:
        norm = copy_of(module, lambda tensor: draw(*tensor.shape)).requires_grad_().train()
        with torch.random.fork_rng(devices=()):
            if not _keeps_bf16(norm, x):
                return None
            got = _results(norm.float(), x, dy, *norm.parameters())
    except Exception:  # the module is no function of rows
        return None
    vectors = {name: vector.detach().double().requires_grad_() for name, vector in norm.named_parameters()}
    # The largest first: these rows cannot tell a tiny eps from 0, with which a row of zeros becomes NaN.
    for eps in sorted({value for value in vars(module).values() if isinstance(value, float)}, reverse=True):
        norm_of_pytorch = partial(FUSED_NORMS[kind].formula, normalized_shape=(dim,), eps=eps, **vectors)
        wanted = _results(norm_of_pytorch, x.double(), dy.double(), *vectors.values())
        limits = [1e-4 * want.abs().amax(-1, keepdim=True) for want in wanted]
        if all(((g - w).abs() <= limit).all() for g, w, limit in zip(got, wanted, limits, strict=True)):
            return eps
    return None


def _keeps_bf16(norm: nn.Module, x: torch.Tensor) -> bool:
    """Whether rows in bf16 give results in bf16, with parameters in bf16 or in fp32, which some norms need."""
    for dtype in (torch.bfloat16, torch.float32):
        try:
            if norm.to(dtype)(x.bfloat16()).dtype == torch.bfloat16:
                return True
        except RuntimeError:  # mixed dtypes
            continue
    return False


def _results(norm, x: torch.Tensor, dy: torch.Tensor, *vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """y, and the gradients of x and of all vectors. A module that does not give them all raises an error."""
    x = x.detach().requires_grad_()
    y = norm(x)
    return y.detach(), *torch.autograd.grad(y, [x, *vectors], dy)
