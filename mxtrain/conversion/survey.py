"""What a model consists of, as plain values. Surveying a model does not change it."""

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mxtrain.conversion.forward_pass import Uses, watch
from mxtrain.conversion.layers import (
    LinearFacts,
    MixtureFacts,
    NormFacts,
    NormKind,
    find_blocks,
    find_experts,
    find_heads,
    find_linears,
    find_mixtures,
    find_norms,
    state_of,
)
from mxtrain.errors import ConfigError
from mxtrain.launch.pytorch import FakeTensor
from mxtrain.nn.mixture import MXNormRouter
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.three_gemms import QuantizedLayer

_TOP_K_NAMES = ("top_k", "num_experts_per_tok")
_CONVERTED = (MXNorm, QuantizedLayer, MXNormRouter)
_WRAPPERS = (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)


@dataclass(frozen=True)
class WeightFacts:
    """A weight: a parameter with two or more dimensions.

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
class Survey:
    """Facts about one model. Modules are named by FQN, in the order of ``named_modules``; the model itself is left out.

    A module with several names (``self.backbone = self.model``) has the first name here, as in ``named_modules``.

    Attributes:
        kind: name of the model's class.
        device_type: where the parameters are; None while they are on the meta device, or on several devices.
        fqns: every module.
        blocks: the layers that the model repeats (``find_blocks``).
        norms: every module that is an RMSNorm or LayerNorm, or computes one.
        lookalikes: kind of norm -> modules that are named like this kind but do not compute it -> why they stay.
        linears: every linear.
        mixtures: the mixtures of experts whose use of their input is known.
        experts: every module that holds stacked experts.
        heads: the linears that are output heads.
        unswappable: every module with a part that a swap would lose -> this part and the way out, in words.
        weights: every parameter with two or more dimensions.
        converted: every MXNorm and every quantized layer of an earlier conversion -> name of its class.
        uses: what uses the outputs of RMSNorms; None if no forward pass was watched.
    """

    kind: str
    device_type: str | None
    fqns: tuple[str, ...]
    blocks: tuple[str, ...]
    norms: Mapping[str, NormFacts]
    lookalikes: Mapping[NormKind, Mapping[str, str]]
    linears: Mapping[str, LinearFacts]
    experts: Mapping[str, LinearFacts]
    mixtures: Mapping[str, MixtureFacts]
    heads: tuple[str, ...]
    unswappable: Mapping[str, str]
    weights: Mapping[str, WeightFacts]
    converted: Mapping[str, str]
    uses: Uses | None

    @property
    def layers(self) -> dict[str, LinearFacts]:
        """Everything that may have a recipe: linears and experts."""
        return {**self.linears, **self.experts}

    def norms_of(self, *kinds: NormKind) -> dict[str, NormFacts]:
        return {fqn: norm for fqn, norm in self.norms.items() if norm.kind in kinds}


def matches(fqn: str, pattern: str) -> bool:
    """Whether the segments of ``pattern``, each a literal or a glob, match a run of whole segments of ``fqn``.

    ``layers.1`` matches ``layers.1`` and everything in it, but not ``layers.10``; ``*.wo`` and ``wo`` match every wo.
    """
    names, globs = fqn.split("."), pattern.split(".")
    return any(
        all(fnmatch.fnmatchcase(name, glob) for name, glob in zip(names[start:], globs))
        for start in range(len(names) - len(globs) + 1)
    )


def selected(fqns: Collection[str], pattern: str, field: str) -> list[str]:
    """The modules among ``fqns`` that ``pattern`` matches."""
    if not isinstance(pattern, str):
        raise ConfigError(f"{field}: {pattern!r} is not the name of a module: write a string such as 'layers.0'")
    hits = [fqn for fqn in fqns if matches(fqn, pattern)]
    if not hits:
        raise ConfigError(f"{field}: {pattern!r} matches no module; name {_choices(pattern, fqns)}")
    return hits


def _choices(pattern: str, fqns: Collection[str]) -> str:
    """The modules in the innermost module of ``pattern`` that exists; numbered modules as a range."""
    segments, holders = pattern.split("."), dict.fromkeys(fqn.rpartition(".")[0] for fqn in fqns)
    outer = (".".join(segments[:count]) for count in range(len(segments) - 1, 0, -1))
    holder = next((fqn for name in outer for fqn in holders if matches(fqn, name)), "")
    children = [fqn for fqn in fqns if fqn.rpartition(".")[0] == holder]
    if children and all(fqn.rpartition(".")[2].isdecimal() for fqn in children):
        return f"one of {children[0]} ... {children[-1]}"
    return f"one of {', '.join(children)}, or a module inside of one"


def survey(model: nn.Module, example_inputs: tuple | Mapping | None = None, *, watch_norms: bool = False) -> Survey:
    """Look at every module of ``model`` and, with ``watch_norms``, at one forward pass of a copy without data."""
    _refuse_unfit_model(model)
    # A tensor would be taken apart into its rows, and a model may run on one row.
    if not isinstance(example_inputs, tuple | list | Mapping | None):
        kind = type(example_inputs).__name__
        raise ConfigError(f"example_inputs is a {kind}, not a tuple or a dict; write (inputs,) for one argument")
    modules = dict(model.named_modules())
    device_types = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    norms, lookalikes = find_norms(modules)
    linears, experts, blocks = find_linears(modules), find_experts(modules), find_blocks(modules)
    looked_at = {*norms, *linears, *experts, *(fqn for fqns in lookalikes.values() for fqn in fqns)}
    unswappable = {fqn: reason for fqn in looked_at if (reason := _why_it_must_stay(modules[fqn]))}
    facts = Survey(
        kind=type(model).__name__,
        device_type=device_types.pop() if len(device_types) == 1 else None,
        fqns=tuple(fqn for fqn in modules if fqn),
        blocks=blocks,
        norms=norms,
        lookalikes={kind: {f: unswappable.get(f, why) for f, why in of.items()} for kind, of in lookalikes.items()},
        linears=linears,
        experts=experts,
        mixtures=find_mixtures(modules),
        heads=find_heads(modules, linears, blocks),
        unswappable=unswappable,
        weights=find_weights(modules),
        converted={fqn: type(m).__name__ for fqn, m in modules.items() if isinstance(m, _CONVERTED)},
        uses=None,
    )
    if not watch_norms or facts.converted or not (norms := facts.norms_of(nn.RMSNorm)):
        return facts
    followed = [fqn for fqn, linear in linears.items() if linear.is_plain and not linear.shares_weight]
    return replace(facts, uses=watch(modules, norms, followed, facts.mixtures, example_inputs))


def _refuse_unfit_model(model: nn.Module) -> None:
    """Raise ConfigError unless ``model`` is a module tree that was not yet wrapped, sharded or compiled."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    way_out = "convert the model first, then wrap, shard or compile it"
    for fqn, module in model.named_modules():
        # torch.compile(module) makes a module with this child, module.compile() sets this attribute.
        is_compiled = "_orig_mod" in module._modules or module._compiled_call_impl is not None
        if is_compiled or isinstance(module, _WRAPPERS):
            what = "compiled" if is_compiled else f"a {type(module).__name__}"
            raise ConfigError(f"{fqn or 'the model'} is {what}: {way_out}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigError(f"{name} is a DTensor: {way_out}")


def _why_it_must_stay(module: nn.Module) -> str | None:
    """The part of a module that a swap would lose, and the way out, in words; None for no such part."""
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) not in (nn.Parameter, FakeTensor):
            return f"has a {name} of class {type(parameter).__name__}, not a torch.nn.Parameter"
    state = state_of(module)
    return f"has {state}, which a swap would lose: put it there after conversion" if state else None


def find_weights(modules: Mapping[str, nn.Module]) -> dict[str, WeightFacts]:
    """Every weight by its name. A weight with several names has the first one under which it is multiplied.

    Multiplications are counted per token, in a forward pass. The backward pass doubles all of them alike.

    - Every element multiplies once for every module that multiplies the weight: in x out for a linear.
    - An embedding is looked up, and a bias (of many experts) is added: they multiply nothing.
    - A token uses only top_k of E experts, so top_k / E of the elements of stacked experts [E, in, out] count, and of
      the weights in an ``nn.ModuleList`` called "experts". Without a known top_k all elements count.
    - Products without a weight, such as attention scores, are left out.
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
