"""A model's linears, experts, gates of routers, blocks and output heads: found in its modules; nothing runs.

``modules`` stands for every module of a model by FQN, the model itself as "".
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature

import torch.nn as nn
from torch.nn.utils.parametrize import is_parametrized

EXPERTS = "GroupedExperts"
"""Name of the class of stacked experts that are swapped, as TorchTitan calls it"""
# Of mixtures of them, whose use of their input is known: their parts read it, and nothing else but its shape and dtype.
_MIXTURE, _PARTS = "MoE", {EXPERTS, "RoutedExperts", "TokenChoiceTopKRouter", "TokenReorderer", "FeedForward"}
# Names of the output head in TorchTitan's models and in Hugging Face's.
HEAD_NAMES = ("output", "lm_head")


@dataclass(frozen=True)
class LinearFacts:
    """An ``nn.Linear`` or a subclass of it, or stacked experts.

    Attributes:
        in_features, out_features: of experts, the last two dimensions of their first weight.
        kind: name of its class; with its module if the class has the name of a class that is swapped.
        is_plain: whether its class is ``nn.Linear`` itself, or the module is one of ``are_plain_experts``.
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

    @property
    def why_it_stays(self) -> str | None:
        """Why it is not quantized whatever the settings are; None if it may be."""
        if self.is_gate or self.is_in_gate:
            part = "the gate" if self.is_gate else "a part"
            return f"is {part} of a router, whose choices are sensitive to rounding"
        if not self.is_plain:
            return f"is a {self.kind}"
        return "shares its weight with another module" if self.shares_weight else None


def find_linears(modules: Mapping[str, nn.Module]) -> dict[str, LinearFacts]:
    """Every linear, also as transformers' ``Conv1D``; the model itself is left out."""
    owners, linears = _owners(modules), {}
    for fqn, module in modules.items():
        is_conv = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
        if fqn and (is_conv or isinstance(module, nn.Linear)):
            kind, weight = type(module), module._parameters.get("weight")  # .weight would compute a parametrized one
            linears[fqn] = LinearFacts(
                in_features=module.nx if is_conv else module.in_features,
                out_features=module.nf if is_conv else module.out_features,
                kind=_kind(module, kind is nn.Linear, "Linear"),
                is_plain=kind is nn.Linear,
                is_gate=_is_gate(modules, fqn),
                shares_weight=owners[id(weight)] > 1,
                is_in_gate=bool(_outer_gates(modules, fqn)),
            )
    return linears


def find_experts(modules: Mapping[str, nn.Module]) -> dict[str, LinearFacts]:
    """Every module with stacked weights of its own that is called "experts", or has a class called so."""
    owners, experts = _owners(modules), {}
    for fqn, module in modules.items():
        is_called_so = fqn.rpartition(".")[2] == "experts" or "Experts" in type(module).__name__
        parameters = list(module.parameters(recurse=False))
        if is_parametrized(module):
            parameters += module.parametrizations.parameters()
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
        gate, experts: FQNs of the gate of its router and of its stacked experts.
        linears: FQNs of the linears of its shared experts that read its input.
        scores_first: whether it multiplies tokens by their scores before the experts.
    """

    gate: str
    experts: str
    linears: tuple[str, ...]
    scores_first: bool


def find_mixtures(modules: Mapping[str, nn.Module]) -> dict[str, MixtureFacts]:
    """Every mixture that has class, parts and names of TorchTitan's ``MoE``."""
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
    return _full_name(kind) if kind.__name__ == plain_name and not is_plain else kind.__name__


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def find_gates(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear gate of a router by FQN."""
    modules = dict(model.named_modules())
    return {fqn: module for fqn, module in modules.items() if isinstance(module, nn.Linear) and _is_gate(modules, fqn)}


def _is_gate(modules: Mapping[str, nn.Module], fqn: str) -> bool:
    """Whether a linear is a router's gate: it is called so, or it is the only linear in a module that is."""
    if not fqn:
        return False
    counts = (len(_linears_in(modules[outer])) for outer in _outer_gates(modules, fqn))
    return _is_called_gate(modules, fqn) or 1 in counts


def _outer_gates(modules: Mapping[str, nn.Module], fqn: str) -> list[str]:
    """The modules around ``fqn`` that are called as a gate is. A whole mixture of experts may be called "router"."""
    parts = fqn.split(".")
    outer = [".".join(parts[:end]) for end in range(1, len(parts))]
    return [each for each in outer if _is_called_gate(modules, each) and "experts" not in modules[each]._modules]


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

    They are the members of a ModuleList, and of a ModuleDict with numbers as keys. A list of one class holds blocks
    instead of being one. Linears, members without linears, and members of blocks do not count.
    """
    blocks: list[str] = []
    for fqn, module in modules.items():
        is_member = fqn != "" and _is_list(modules[fqn.rpartition(".")[0]]) and not isinstance(module, nn.Linear)
        holds_blocks = isinstance(module, nn.ModuleList) and len({type(part) for part in module}) == 1
        is_inside = any(_is_in(fqn, block) for block in blocks)
        if is_member and not holds_blocks and not is_inside and _linears_in(module):
            blocks.append(fqn)
    return tuple(blocks)


def _is_list(module: nn.Module) -> bool:
    is_numbered = isinstance(module, nn.ModuleDict) and all(name.isdigit() for name in module)
    return isinstance(module, nn.ModuleList) or is_numbered


def _linears_in(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


def _is_in(fqn: str, outer: str) -> bool:
    """Whether ``fqn`` is ``outer`` or lies in it."""
    return f"{fqn}.".startswith(f"{outer}.")


def find_heads(modules: Mapping[str, nn.Module], linears: Collection[str], blocks: Sequence[str]) -> tuple[str, ...]:
    """The linears from the last hidden state to logits; usually one, or none.

    Heads lie outside the blocks. They are called "output" or "lm_head". In a model without these names, the head is the
    last linear whose weight has the shape of an embedding's. A square one may have it by chance, and does not count.
    """
    outside = [fqn for fqn in linears if not any(_is_in(fqn, block) for block in blocks)]
    if named := [fqn for fqn in outside if fqn.rpartition(".")[2] in HEAD_NAMES]:
        return tuple(named)
    embeddings = {(m.num_embeddings, m.embedding_dim) for m in modules.values() if isinstance(m, nn.Embedding)}
    shapes = {fqn: (modules[fqn].out_features, modules[fqn].in_features) for fqn in outside}
    return tuple(
        [fqn for fqn, (rows, columns) in shapes.items() if rows != columns and (rows, columns) in embeddings][-1:]
    )
