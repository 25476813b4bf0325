"""How many of a model's multiplications each weight does. Every report uses this definition.

A weight is a parameter with two or more dimensions. Its multiplications are counted per token, in a forward pass:

- Every element multiplies once per call: in x out for a linear. The number of calls is the one that was seen, else one.
- An embedding is looked up, and a bias (of many experts) is added: they multiply nothing. If a linear shares the weight
  of an embedding, the linear multiplies.
- A token uses only top_k of E experts, so top_k / E of the elements of stacked experts [E, in, out] count, and of the
  weights in an ``nn.ModuleList`` called "experts". Without a known top_k all elements count.

The backward pass doubles all numbers alike: dgrad and wgrad multiply as often as fprop. Products without a weight, such
as attention scores, are left out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn as nn

from mxtrain.formats.recipe import LinearRecipe

_TOP_K_NAMES = ("top_k", "num_experts_per_tok")


@dataclass(frozen=True)
class WeightFacts:
    """A weight.

    Attributes:
        shape: its dimensions, two or more.
        multipliers: FQNs of the modules that hold it and multiply it.
        share: share of its elements that one token multiplies in a call, in (0, 1].
        note: what a reader should know about ``share``; "" for nothing.
    """

    shape: tuple[int, ...]
    multipliers: tuple[str, ...]
    share: float
    note: str


@dataclass(frozen=True)
class WeightUse:
    """What a conversion makes of a weight.

    Attributes:
        multiplications: per token of a forward pass.
        quantized: share of its GEMMs (fprop, dgrad, wgrad) that a conversion quantizes, 0 to 1.
        note: as in ``WeightFacts``.
    """

    multiplications: float
    quantized: float
    note: str


def find_weights(modules: Mapping[str, nn.Module]) -> dict[str, WeightFacts]:
    """Every weight by its name. A weight with several names has the first one under which it is multiplied.

    Args:
        modules: every module of a model by FQN, the model itself ("") included.
    """
    holders: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for fqn, module in modules.items():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2:
                holders.setdefault(parameter, []).append((fqn, name))
    weights = {}
    for parameter, names in holders.items():
        multipliers = [(fqn, name) for fqn, name in names if not _why_idle(modules[fqn], name)]
        fqn, name = (multipliers or names)[0]
        idle = (1.0, _why_idle(modules[fqn], name))
        share, note = _share_of_a_token(fqn, parameter.shape, modules) if multipliers else idle
        users = tuple(fqn for fqn, _ in multipliers)
        weights[f"{fqn}.{name}".removeprefix(".")] = WeightFacts(tuple(parameter.shape), users, share, note)
    return weights


def _why_idle(module: nn.Module, name: str) -> str:
    """Why the parameter ``name`` of ``module`` multiplies nothing; "" if it does."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "only looked up"
    return "only added" if name.endswith("bias") else ""


def weight_uses(
    weights: Mapping[str, WeightFacts], calls: Mapping[str, int], recipes: Mapping[str, LinearRecipe]
) -> dict[str, WeightUse]:
    """What becomes of every weight.

    Args:
        calls: linear FQN -> how often a forward pass was seen to call it; a module without a call counts once.
        recipes: FQN of every linear that is swapped -> its recipe.
    """
    uses = {}
    for name, weight in weights.items():
        times = sum(max(1, calls.get(fqn, 1)) for fqn in weight.multipliers)
        gemms = [gemm for fqn in weight.multipliers if fqn in recipes for gemm in recipes[fqn].gemms]
        quantized = sum(gemm.format is not None for gemm in gemms) / len(gemms) if gemms else 0.0
        uses[name] = WeightUse(math.prod(weight.shape) * weight.share * times, quantized, weight.note)
    return uses


def _share_of_a_token(fqn: str, shape: tuple[int, ...], modules: Mapping[str, nn.Module]) -> tuple[float, str]:
    """The share of a weight of the module ``fqn`` that one token multiplies, and a note."""
    path = fqn.split(".")
    for end in range(len(path) - 1, 0, -1):
        holder = ".".join(path[:end])
        if path[end - 1] == "experts" and isinstance(modules.get(holder), nn.ModuleList | nn.ModuleDict):
            experts = len(modules[holder])
            break
    else:
        holder, experts = fqn, shape[0]
        # PyTorch's own modules with such weights are convolutions, all of whose elements multiply. A first dimension
        # of 1 is that of a batch, as in a table of positions [1, S, D].
        if len(shape) < 3 or experts == 1 or type(modules[fqn]).__module__.startswith("torch.nn."):
            return 1.0, ""
    # The module with the experts, its parent, or a child of either knows top_k.
    inner, outer = modules[holder], modules[holder.rpartition(".")[0]]
    for module in (inner, *inner.children(), outer, *outer.children()):
        for name in _TOP_K_NAMES:
            top_k = getattr(module, name, None)
            if type(top_k) is int and 0 < top_k <= experts:
                return top_k / experts, f"top {top_k} of {experts} experts"
    return 1.0, f"all {experts} experts count: no top_k was found"
