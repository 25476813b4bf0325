"""What a model consists of, as plain values. Surveying a model does not change it."""

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from mxtrain.conversion.forward_pass import Uses, first_line, hooks_of, watch
from mxtrain.conversion.layers import (
    LinearFacts,
    MixtureFacts,
    are_plain_experts,
    find_blocks,
    find_experts,
    find_heads,
    find_linears,
    find_mixtures,
)
from mxtrain.conversion.norms import NormFacts, NormKind, find_norms
from mxtrain.conversion.weights import WeightFacts, find_weights
from mxtrain.errors import ConfigError
from mxtrain.launch.pytorch import FakeTensor
from mxtrain.nn.experts import weight_names
from mxtrain.nn.mixture import MXNormRouter
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.three_gemms import QuantizedLayer
from mxtrain.norms import FUSED_NORMS

_CONVERTED = (MXNorm, QuantizedLayer, MXNormRouter)
_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)
# The parameters of the classes that are swapped.
_PARAMETERS = {kind: norm.parameters_of for norm in FUSED_NORMS.values() for kind in (norm.replaces, norm)}
_PARAMETERS[nn.Linear] = ("weight", "bias")


@dataclass(frozen=True)
class Survey:
    """Facts about one model. Modules are named by FQN, in the order of ``named_modules``; the model itself is left out.

    A module with several names (``self.backbone = self.model``) is called by the first, as ``named_modules`` does.

    Attributes:
        kind: name of the model's class.
        device_type: where the parameters are; None while they are on the meta device, or on several devices.
        names: every name of every module -> its FQN.
        blocks: the layers that the model repeats (``find_blocks``).
        norms: every module that is an RMSNorm or LayerNorm, or computes one.
        lookalikes: by kind of norm, modules that are called so but are not known to compute one -> why they stay.
        linears: every linear.
        mixtures: the mixtures of experts whose use of their input is known.
        experts: every module that holds stacked experts.
        heads: the linears that are output heads.
        unswappable: every module with something that a new module would not have -> what, and the way out.
        weights: every parameter with two or more dimensions.
        converted: every MXNorm and every quantized layer of an earlier conversion -> name of its class.
        uses: what uses the outputs of RMSNorms and the weights of linears; None if no forward pass was watched.
        unseen: a note on what was not seen because a forward pass failed, which the converter does not need.
    """

    kind: str
    device_type: str | None
    names: Mapping[str, str]
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
    unseen: tuple[str, ...] = ()

    @property
    def layers(self) -> dict[str, LinearFacts]:
        """Everything that may have a recipe: linears and experts."""
        return {**self.linears, **self.experts}

    def norms_of(self, *kinds: NormKind) -> dict[str, NormFacts]:
        """The norms of these kinds."""
        return {fqn: norm for fqn, norm in self.norms.items() if norm.kind in kinds}

    def why_unswappable(self) -> dict[str, str]:
        """Every module that no converter can swap -> the reason, from its state or from the forward pass."""
        if self.uses is None:
            return dict(self.unswappable)
        outside = "its weight is used outside of it, by {}, where nothing would be quantized"
        return {fqn: outside.format(user) for fqn, user in self.uses.outside.items()} | self.unswappable


def matches(fqn: str, pattern: str) -> bool:
    """Whether the segments of ``pattern``, each a literal or a glob, match a run of whole segments of ``fqn``.

    ``layers.1`` matches ``layers.1`` and everything in it, but not ``layers.10``; ``*.wo`` and ``wo`` match every wo.
    """
    names, globs = fqn.split("."), pattern.split(".")
    return any(
        all(fnmatch.fnmatchcase(name, glob) for name, glob in zip(names[start:], globs))
        for start in range(len(names) - len(globs) + 1)
    )


def names_of(model: nn.Module) -> dict[str, str]:
    """Every name of every module -> its FQN, which is the first of them."""
    fqns = {id(module): fqn for fqn, module in model.named_modules()}
    return {name: fqns[id(module)] for name, module in model.named_modules(remove_duplicate=False) if name}


def selected(names: Mapping[str, str], pattern: str, field: str) -> list[str]:
    """The FQNs of the modules that ``pattern`` matches under any of their names.

    Args:
        names: every name of every module -> its FQN (``names_of``).

    Raises:
        ConfigError: with the name of the setting, ``field``, if there are none.
    """
    if not isinstance(pattern, str):
        raise ConfigError(f"{field}: {pattern!r} is not the name of a module")
    hits = dict.fromkeys(fqn for name, fqn in names.items() if matches(name, pattern))
    if not hits:
        top = ", ".join(name for name in names if "." not in name)
        raise ConfigError(f"{field}: {pattern!r} matches no module; the top-level modules are: {top}")
    return list(hits)


def survey(model: nn.Module, example_inputs: tuple | Mapping | None = None, *, watch_norms: bool = False) -> Survey:
    """Look at every module of ``model`` and, with ``watch_norms``, at one forward pass without data.

    Nothing of the model runs: norms and the forward pass run on copies without data.

    Args:
        example_inputs: as for ``mxtrain.convert``; None stands for one row of 32 token ids. If they are given,
            the forward pass runs without ``watch_norms``, too, and shows where else the weights of linears are used;
            but it may fail.

    Raises:
        ConfigError: if the model is wrapped, sharded or compiled, cannot be copied, or the forward pass fails;
            for ``example_inputs`` that are neither a tuple nor a mapping.
    """
    _refuse_unfit_model(model)
    # A tensor would be taken apart into its rows, and a model may run on one row.
    if not isinstance(example_inputs, tuple | list | Mapping | None):
        kind = type(example_inputs).__name__
        raise ConfigError(
            f"example_inputs is a {kind}, no tuple or dict: write (inputs,) for a model with one argument"
        )
    modules = dict(model.named_modules())
    device_types = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    norms, lookalikes = find_norms(modules)
    linears, experts, blocks = find_linears(modules), find_experts(modules), find_blocks(modules)
    unlike = {fqn for fqns in lookalikes.values() for fqn in fqns}
    unswappable = _unswappable(modules, {*norms, *linears, *experts, *unlike})
    facts = Survey(
        kind=type(model).__name__,
        device_type=device_types.pop() if len(device_types) == 1 else None,
        names=names_of(model),
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
    watched = facts.norms_of(nn.RMSNorm) if watch_norms else {}
    followed = [fqn for fqn, linear in linears.items() if linear.is_plain and not linear.shares_weight]
    if not watched and example_inputs is None:
        return facts
    try:
        return replace(facts, uses=watch(model, watched, followed, facts.mixtures, example_inputs))
    except ConfigError as error:
        if watched:
            raise
        cause = error.__cause__ or error
        note = (
            "not seen: uses of weights outside of their layers, because the forward pass without data failed "
            f"({type(cause).__name__}: {first_line(cause)})"
        )
        return replace(facts, unseen=(note,))


def _refuse_unfit_model(model: nn.Module) -> None:
    """Raise ConfigError unless ``model`` is a module tree that was not yet wrapped, sharded or compiled."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    for fqn, module in model.named_modules():
        name, kind = fqn or "the model", type(module).__name__
        if isinstance(module, _WRAPPERS):
            raise ConfigError(f"{name} is a {kind}: convert the model first, then wrap it")
        if isinstance(module, FSDPModule):
            raise ConfigError(f"{name} is sharded (class {kind}): convert the model first, then call fully_shard")
        # torch.compile(module) makes a module with this child, module.compile() sets this attribute.
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise ConfigError(f"{name} is compiled: convert the model first, then compile it")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigError(f"{name} is a DTensor: convert the model first, then distribute it")


def _unswappable(modules: Mapping[str, nn.Module], fqns: set[str]) -> dict[str, str]:
    """Of the modules ``fqns``, those with something that a new module would not have -> what, and the way out."""
    holders = {
        held: f"{fqn}.{name}".removeprefix(".")
        for fqn, module in modules.items()
        for name, value in vars(module).items()
        if name != "_modules"
        for held in _parts(value)
        if isinstance(held, nn.Module) and held is not module
    }
    reasons = {}
    for fqn in fqns:
        if reason := _why_it_must_stay(modules[fqn]):
            reasons[fqn] = reason
        elif holder := holders.get(modules[fqn]):
            reasons[fqn] = f"is also held by {holder}, which a swap would not reach: hold it as a child module only"
    return reasons


def _parts(value) -> Collection:
    """The elements of a plain container; of any other value, the value itself."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple | set) else (value,)


def _why_it_must_stay(module: nn.Module) -> str | None:
    """What a module has that a new one in its place would lose, and the way out; None for nothing."""
    if is_parametrized(module):
        names = ", ".join(module.parametrizations)
        return f"has a parametrization of {names}, which a swap would lose: register it after conversion"
    if hooks := hooks_of(module):
        # Hooks there find a NormedInput among inputs or outputs.
        sees_values = any("dict" not in hook for hook in hooks)
        unless = ", unless it needs the result of an MXNorm as a tensor or its gradient" if sees_values else ""
        return f"has {' and '.join(hooks)}, which a swap would lose: register it after conversion{unless}"
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) not in (nn.Parameter, FakeTensor):
            return f"has a {name} of class {type(parameter).__name__}, not a torch.nn.Parameter"
    if methods := [name for name in vars(module) if callable(getattr(type(module), name, None))]:
        return f"has its own {methods[0]}, which a swap would lose: set it after conversion"
    usual = weight_names(module) if are_plain_experts(module) else _PARAMETERS.get(type(module))
    if usual is not None:
        if absent := [name for name in usual if name not in module._parameters]:
            return f"has no parameter called {absent[0]}"
        if added := [name for name in (*module._parameters, *module._buffers, *module._modules) if name not in usual]:
            return f"holds {', '.join(added)}, which a swap would lose: add it after conversion"
    return None
