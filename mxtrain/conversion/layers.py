"""Find a model's linears, experts, gates of routers, blocks, output heads and norms.

``modules`` is every module of a model by FQN, with "" for the model itself. PyTorch's and mxtrain's norms are known by
type. A model's own norms run, and are known by results and gradients.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import accumulate, product
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

from mxtrain.nn.recipe_module import RecipeModule
from mxtrain.norms import FUSED_NORMS

EXPERTS = "GroupedExperts"
"""Name of the class of stacked experts that are swapped, as TorchTitan calls it"""
# Of mixtures of them, whose use of their input is known: their parts read it, and nothing else but its shape and dtype.
_MIXTURE, _PARTS = "MoE", {EXPERTS, "RoutedExperts", "TokenChoiceTopKRouter", "TokenReorderer", "FeedForward"}
# Names of the output head in TorchTitan's models and in Hugging Face's.
HEAD_NAMES = ("output", "lm_head")

NormKind = type[nn.RMSNorm] | type[nn.LayerNorm]

# What a norm may make of its rows and weight before PyTorch's norm: how it uses the weight -> f(x, weight).
_WEIGHT, _OFFSET = "weight", "1 + weight"
_USES = {
    _WEIGHT: lambda x, weight: (x, weight),
    _OFFSET: lambda x, weight: (x, 1 + weight),
    "x * weight": lambda x, weight: (x * weight, None),
    "x * (1 + weight)": lambda x, weight: (x * (1 + weight), None),
}

# Magnitudes of rows. eps dominates the small ones, which tells it apart from its neighbors.
_ROWS = (1.0, 1e-2, 1e-4, 1e-6)


@dataclass(frozen=True)
class LinearFacts:
    """An ``nn.Linear`` or a subclass of it, or stacked experts.

    Attributes:
        in_features, out_features: for experts, the last two dimensions of the first weight.
        kind: name of the class. The class's module is added if only the name is that of a swapped class.
        is_plain: whether the class is ``nn.Linear`` itself, or ``are_plain_experts`` holds.
        is_gate: whether the linear is the gate of a router, or a part of a gate.
        shares_weight: whether another module also owns the weight.
    """

    in_features: int
    out_features: int
    kind: str
    is_plain: bool
    is_gate: bool
    shares_weight: bool

    @property
    def why_it_stays(self) -> str | None:
        """Why no setting can quantize this layer; None if a setting can."""
        if self.is_gate:
            return "is the gate of a router, whose choices are sensitive to rounding"
        if not self.is_plain:
            return f"is a {self.kind}"
        return "shares its weight with another module" if self.shares_weight else None


def find_linears(modules: Mapping[str, nn.Module]) -> dict[str, LinearFacts]:
    """Every linear, and every ``Conv1D`` of transformers; the model itself is left out."""
    owners, linears = _owners(modules), {}
    for fqn, module in modules.items():
        is_conv = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
        if fqn and (is_conv or isinstance(module, nn.Linear)):
            is_plain, weight = type(module) is nn.Linear, module._parameters.get("weight")
            linears[fqn] = LinearFacts(
                in_features=module.nx if is_conv else module.in_features,
                out_features=module.nf if is_conv else module.out_features,
                kind=_kind(module, is_plain, "Linear"),
                is_plain=is_plain,
                is_gate=_is_gate(modules, fqn),
                shares_weight=owners[id(weight)] > 1,
            )
    return linears


def find_experts(modules: Mapping[str, nn.Module]) -> dict[str, LinearFacts]:
    """Every module that owns stacked weights, and is called "experts" or has "Experts" in its class's name."""
    owners, experts = _owners(modules), {}
    for fqn, module in modules.items():
        is_called_so = fqn.rpartition(".")[2] == "experts" or "Experts" in type(module).__name__
        parameters = list(module.parameters(recurse=False))
        stacked = [parameter for parameter in parameters if parameter.ndim == 3]
        if fqn and is_called_so and stacked:
            _, out_features, in_features = stacked[0].shape
            experts[fqn] = LinearFacts(
                in_features=in_features,
                out_features=out_features,
                kind=_kind(module, are_plain_experts(module), EXPERTS),
                is_plain=are_plain_experts(module),
                is_gate=False,
                shares_weight=any(owners[id(parameter)] > 1 for parameter in parameters),
            )
    return experts


@dataclass(frozen=True)
class MixtureFacts:
    """A mixture of experts whose use of its input is known.

    Attributes:
        gate, experts: FQNs of the router's gate and of the stacked experts.
        linears: FQNs of the shared experts' linears that read the mixture's input.
        scores_first: whether the mixture multiplies tokens by their scores before the experts.
    """

    gate: str
    experts: str
    linears: tuple[str, ...]
    scores_first: bool


def find_mixtures(modules: Mapping[str, nn.Module]) -> dict[str, MixtureFacts]:
    """Every mixture with the class name, parts and names of TorchTitan's ``MoE``."""
    return {
        fqn: MixtureFacts(
            gate=f"{fqn}.router.gate",
            experts=f"{fqn}.experts",
            linears=tuple(f"{fqn}.shared_experts.{name}" for name in ("w1", "w3")) if module.shared_experts else (),
            scores_first=getattr(module, "score_before_experts", False),
        )
        for fqn, module in modules.items()
        if type(module).__name__ == _MIXTURE
        and {f"{fqn}.router.gate", f"{fqn}.experts"} <= modules.keys()
        and all(type(part).__name__ in _PARTS for part in module.children())
    }


def are_plain_experts(module: nn.Module) -> bool:
    """Whether a module has the class name and the arguments of TorchTitan's stacked experts.

    They are SwiGLU networks, W2 (silu(W1 x) * W3 x). A subclass may compute something else.
    """
    kind = type(module)
    if [base for base in kind.__mro__ if base.__name__ == EXPERTS] != [kind]:
        return False
    _, *arguments = signature(kind.forward).parameters
    return len(arguments) == 2 and arguments[1].startswith("num_tokens_per_expert")


def _owners(modules: Mapping[str, nn.Module]) -> Counter[int]:
    """The number of modules that hold a parameter, by its id."""
    return Counter(id(p) for module in modules.values() for p in module.parameters(recurse=False))


def _kind(module: nn.Module, is_plain: bool, plain_name: str) -> str:
    kind = type(module)
    is_alike = kind.__name__ == plain_name and not is_plain
    return f"{kind.__module__}.{kind.__qualname__}" if is_alike else kind.__name__


def _is_gate(modules: Mapping[str, nn.Module], fqn: str) -> bool:
    """Whether a linear is called as a gate is, or lies in a module that is. A mixture may be called "router"."""
    names = accumulate(fqn.split("."), "{}.{}".format)
    return any(_is_called_gate(modules, name) for name in names if "experts" not in modules[name]._modules)


def _is_called_gate(modules: Mapping[str, nn.Module], fqn: str) -> bool:
    """Whether a module is called "router"; or "gate" or "gating", beside "experts" or in a class called a router.

    All models of TorchTitan have ``TokenChoiceTopKRouter``, and models of transformers have ``gate`` and ``experts`` in
    one block. (The gate of a gated feed-forward stands beside no experts.)
    """
    parent, _, name = fqn.rpartition(".")
    is_router = "router" in type(modules[parent]).__name__.lower()
    return name == "router" or (name in ("gate", "gating") and (is_router or "experts" in modules[parent]._modules))


def find_blocks(modules: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """The layers that a model repeats, in its order.

    They are the members of a ModuleList, and of a ModuleDict with numbers as keys. Linears, members without linears,
    and members of blocks do not count.
    """
    blocks: list[str] = []
    for fqn, module in modules.items():
        around = modules[fqn.rpartition(".")[0]]
        is_numbered = isinstance(around, nn.ModuleDict) and fqn.rpartition(".")[2].isdigit()
        is_member = isinstance(around, nn.ModuleList) or is_numbered
        if fqn and is_member and not isinstance(module, nn.Linear) and not any(_is_in(fqn, block) for block in blocks):
            if any(isinstance(part, nn.Linear) for part in module.modules()):
                blocks.append(fqn)
    return tuple(blocks)


def _is_in(fqn: str, outer: str) -> bool:
    """Whether ``fqn`` is ``outer`` or lies in it."""
    return f"{fqn}.".startswith(f"{outer}.")


def find_heads(modules: Mapping[str, nn.Module], linears: Iterable[str], blocks: Sequence[str]) -> tuple[str, ...]:
    """The linears from the last hidden state to logits; usually one, or none.

    Heads lie outside the blocks. They are called "output" or "lm_head". In a model without these names, the head is the
    last linear whose weight has the shape of an embedding's. A square one may have it by chance, and does not count.
    """
    outside = [fqn for fqn in linears if not any(_is_in(fqn, block) for block in blocks)]
    if named := [fqn for fqn in outside if fqn.rpartition(".")[2] in HEAD_NAMES]:
        return tuple(named)
    embeddings = {(m.num_embeddings, m.embedding_dim) for m in modules.values() if isinstance(m, nn.Embedding)}
    shapes = {fqn: (modules[fqn].out_features, modules[fqn].in_features) for fqn in outside}
    return tuple([fqn for fqn, (out, in_) in shapes.items() if out != in_ and (out, in_) in embeddings][-1:])


@dataclass(frozen=True)
class NormFacts:
    """The norm of PyTorch that a module is or computes.

    Attributes:
        kind: PyTorch's class; the other attributes are its arguments.
        add_unit_offset: whether the gain is 1 + weight.
        differs: how the module differs from PyTorch's norm, in words; "" for no difference.
        group_size: size of the groups of features in a norm of x silu(gate); None for other norms.
    """

    kind: NormKind
    normalized_shape: tuple[int, ...]
    eps: float | None
    elementwise_affine: bool = True
    bias: bool = False
    add_unit_offset: bool = False
    differs: str = ""
    group_size: int | None = None

    @property
    def why_it_stays(self) -> str | None:
        """Why no converter takes this norm; None if a converter may."""
        return self.differs or (None if len(self.normalized_shape) == 1 else "normalizes more than one dimension")

    def as_norm(self, module: nn.Module) -> nn.RMSNorm | nn.LayerNorm:
        """PyTorch's norm with the parameters of ``module``, the module that these facts are about."""
        bias = {"bias": self.bias} if "bias" in FUSED_NORMS[self.kind].parameters_of else {}
        norm = self.kind(self.normalized_shape, self.eps, self.elementwise_affine, **bias, device="meta")
        norm.add_unit_offset = self.add_unit_offset  # for mxtrain's norms
        for name in norm._parameters:
            setattr(norm, name, getattr(module, name, None))
        return norm.train(module.training)


def find_norms(modules: Mapping[str, nn.Module]) -> tuple[dict[str, NormFacts], dict[NormKind, dict[str, str]]]:
    """Every norm; and for each kind, modules that are only named like this kind -> what they are, in words.

    The model itself is left out: nothing can replace it.
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
                lookalikes[kind][fqn] = (
                    f"is a {type(module).__name__} that does not compute the results and gradients of "
                    f"nn.{kind.__name__} with an attribute as eps, or changes the dtype"
                )
    return norms, lookalikes


def norm_facts(module: nn.Module) -> NormFacts | None:
    """Which norm of PyTorch the module is or computes; None for any other module.

    Many models bring norm classes of their own, with "norm" in the name, a 1-D ``weight``, and an eps under some name.
    Such a module is an RMSNorm or LayerNorm if its results have the dtype of its rows, and results and gradients equal
    those of PyTorch's norm, with one of the module's float attributes as eps. (A module called LayerNorm may be an
    RMSNorm, as in T5.) An RMSNorm may have a gain of 1 + weight, as in Gemma, or take a gate, as in Mamba-2
    (``_gated_norm``). Any other module whose forward takes more than x is no norm.
    """
    parameters = dict(module.named_parameters())
    has_bias, is_bare = "bias" in parameters, not dict(module.named_buffers()) and not state_of(module)
    for kind, fused in FUSED_NORMS.items():
        if type(module) in (kind, fused):
            shape, offset = tuple(module.normalized_shape), getattr(module, "add_unit_offset", False)
            return NormFacts(kind, shape, module.eps, module.elementwise_affine, has_bias, offset)
        uses = _USES if kind is nn.RMSNorm else (_WEIGHT,)
        forms = {use: partial(_norm_of_pytorch, kind, use) for use in uses}
        if (
            {"weight"} <= parameters.keys() <= {*fused.parameters_of}
            and all(parameter.shape == (parameters["weight"].numel(),) for parameter in parameters.values())
            and is_bare
            and len(signature(module.forward).parameters) == 1
            and (found := _computed_by(module, forms)) is not None
        ):
            shape, (eps, use) = tuple(module.weight.shape), found
            differs = "" if use in (_WEIGHT, _OFFSET) else "multiplies by its weight before it normalizes"
            if use == _OFFSET and not _adds_in_fp32(module, eps):
                differs = "rounds 1 + weight to the dtype of its weight"
            return NormFacts(kind, shape, eps, True, has_bias, use == _OFFSET, differs)
    if parameters.keys() == {"weight"} and is_bare and len(signature(module.forward).parameters) == 2:
        return _gated_norm_facts(module)
    return None


def _gated_norm_facts(module: nn.Module) -> NormFacts | None:
    """The facts of a module that computes RMSNorm of x silu(gate), or silu(gate) RMSNorm(x), in groups of features.

    An attribute of the module is the size or the number of the groups.
    """
    dim = module.weight.numel()
    divisors = {value for value in vars(module).values() if type(value) is int and value > 0 and dim % value == 0}
    sizes = {dim, *divisors, *(dim // value for value in divisors)}
    forms = {(size, first): partial(_gated_norm, size, first) for size in sizes for first in (True, False)}
    if (found := _computed_by(module, forms)) is None:
        return None
    eps, (size, gates_first) = found
    differs = "" if gates_first else "multiplies by a gate after it normalizes"
    return NormFacts(nn.RMSNorm, (dim,), eps, True, differs=differs, group_size=size)


def _gated_norm(size: int, gates_first: bool, x, gate, weight, eps: float) -> torch.Tensor:
    u = x * F.silu(gate) if gates_first else x
    y = F.rms_norm(u.unflatten(-1, (-1, size)), (size,), None, eps).flatten(-2) * weight
    return y if gates_first else y * F.silu(gate)


def _norm_of_pytorch(kind: NormKind, use: str, x: torch.Tensor, weight: torch.Tensor, eps: float, **bias):
    x, weight = _USES[use](x, weight)
    return FUSED_NORMS[kind].formula(x, x.shape[-1:], weight=weight, eps=eps, **bias)


def _draw(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")  # whatever the defaults are


@torch.enable_grad()
def _computed_by(module: nn.Module, forms: Mapping) -> tuple[float, Any] | None:
    """The eps, a float among the attributes of ``module``, and the key of the form that it computes; None if none fits.

    The module runs with random parameters; its own may be on the meta device. Its rows are a batch of sequences,
    because a norm over another dimension of a matrix may compute the same. A form is f(*rows, eps=..., **parameters),
    with rows for every argument of the module's forward.
    """
    shape = 2, len(_ROWS), module.weight.numel()
    x, dy, *gates = (_draw(*shape, seed=seed) for seed in range(1 + len(signature(module.forward).parameters)))
    rows = [x * x.new_tensor(_ROWS).unsqueeze(1), *gates]
    vectors = {name: _draw(shape[-1], seed=9 + i) for i, (name, _) in enumerate(module.named_parameters())}
    try:
        if not _keeps_bf16(module, rows, vectors):
            return None
        got = _results(lambda *rows, **vectors: functional_call(module, vectors, rows), rows, vectors, dy)
    except Exception:  # the module is no function of rows
        return None
    rows, vectors = [row.double() for row in rows], {name: vector.double() for name, vector in vectors.items()}
    # The largest first: these rows cannot tell a tiny eps from 0, with which a row of zeros becomes NaN.
    epsilons = sorted({value for value in vars(module).values() if isinstance(value, float)}, reverse=True)
    for (key, form), eps in product(forms.items(), epsilons):
        if _are_near(got, _results(partial(form, eps=eps), rows, vectors, dy.double())):
            return eps, key
    return None


def _keeps_bf16(module: nn.Module, rows: Sequence[torch.Tensor], vectors: Mapping[str, torch.Tensor]) -> bool:
    """Whether rows in bf16 give results in bf16, with parameters in bf16 or in fp32, which some norms need."""
    rows = tuple(row.bfloat16() for row in rows)
    for dtype in (torch.bfloat16, torch.float32):
        with suppress(RuntimeError):  # mixed dtypes
            y = functional_call(module, {name: vector.to(dtype) for name, vector in vectors.items()}, rows)
            if y.dtype == torch.bfloat16:
                return True
    return False


def _results(
    norm, rows: Sequence[torch.Tensor], vectors: Mapping[str, torch.Tensor], dy: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """y, and the gradients of all rows and vectors. A module that does not give them all raises an error."""
    rows = [row.detach().requires_grad_() for row in rows]
    vectors = {name: vector.detach().requires_grad_() for name, vector in vectors.items()}
    y = norm(*rows, **vectors)
    return y.detach(), *torch.autograd.grad(y, [*rows, *vectors.values()], dy)


def _are_near(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    limits = [1e-4 * want.abs().amax(-1, keepdim=True) for want in wanted]
    return all(((g - w).abs() <= limit).all() for g, w, limit in zip(got, wanted, limits, strict=True))


def _adds_in_fp32(module: nn.Module, eps: float) -> bool:
    """Whether an RMSNorm with a gain of 1 + weight does not round the sum to the dtype of a weight in bf16."""
    x, weight = _draw(4, module.weight.numel(), seed=0), _draw(module.weight.numel(), seed=1).bfloat16()
    with suppress(RuntimeError):  # mixed dtypes
        got = functional_call(module, {"weight": weight}, (x,))
        return _are_near([got], [_norm_of_pytorch(nn.RMSNorm, _OFFSET, x.double(), weight.double(), eps)])
    return False


def state_of(module: nn.Module) -> str:
    """Hooks and methods that were put on an instance, in words; "" for none."""
    hooks = [name for name, value in vars(module).items() if name.endswith("_hooks") and value]
    methods = [name for name in vars(module) if callable(getattr(type(module), name, None))]
    return " and ".join(
        [f"a {name[1:-1].replace('_', ' ')}" for name in hooks] + [f"its own {name}" for name in methods]
    )
