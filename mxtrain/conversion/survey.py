"""What a model consists of, as plain values. Surveying a model does not change it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn as nn

from mxtrain.conversion.blocks import find_blocks, find_heads
from mxtrain.conversion.gates import find_other_gates
from mxtrain.conversion.holders import attributes_that_hold_modules
from mxtrain.conversion.instance_state import has_function_as_forward, hooks_on_values, why_it_must_stay
from mxtrain.conversion.norm_uses import NormUses, first_line, watch
from mxtrain.conversion.recognition import (
    LayerNormFacts,
    LinearFacts,
    NormFacts,
    find_layer_norms,
    find_linears,
    find_norms,
    how_recognised,
)
from mxtrain.conversion.refusals import refuse_unfit_model
from mxtrain.conversion.selection import names_of
from mxtrain.conversion.structural_copy import structural_copy
from mxtrain.conversion.weights import WeightFacts, find_weights
from mxtrain.errors import ConfigError
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.three_gemms import QuantizedLinear


@dataclass(frozen=True)
class Survey:
    """Facts about one model. Modules are named by FQN, in the order of ``named_modules``; the model itself is left out.

    A module with several names (``self.backbone = self.model``) is called by the first, as ``named_modules`` does.

    Attributes:
        kind: name of the model's class.
        device_type: where the parameters are; None while they are on the meta device, or on several devices.
        modules: every module.
        names: every name of every module -> its FQN.
        blocks: the layers that the model repeats (``find_blocks``).
        norms: every module that is an RMSNorm or computes one.
        lookalikes: modules that are called an RMSNorm but are not known to compute one -> what they are.
        linears: every linear.
        heads: the linears that are output heads.
        unswappable: every norm and linear with something that a new module would not have -> what, and the way out.
        weights: every parameter with two or more dimensions.
        dtypes: every parameter, under all its names -> its dtype.
        converted: every MXNorm, MXNormLinear and MXLinear of an earlier conversion -> name of its class.
        uses: what uses the outputs of ``norms`` and the weights of linears; None if no forward pass was watched.
        layer_norms: every module that is a LayerNorm or computes one.
        layer_norm_lookalikes: the same for LayerNorm, without those in ``norms``.
        other_gates: the gates of routers that are no linears -> name of their class.
        recognised: every norm -> name of its class, and how it was recognised, in words.
        failed_pass: what was not seen because a forward pass failed, which the converter does not need, in words.
    """

    kind: str
    device_type: str | None
    modules: tuple[str, ...]
    names: Mapping[str, str]
    blocks: tuple[str, ...]
    norms: Mapping[str, NormFacts]
    lookalikes: Mapping[str, str]
    linears: Mapping[str, LinearFacts]
    heads: tuple[str, ...]
    unswappable: Mapping[str, str]
    weights: Mapping[str, WeightFacts]
    dtypes: Mapping[str, torch.dtype]
    converted: Mapping[str, str]
    uses: NormUses | None
    layer_norms: Mapping[str, LayerNormFacts] = field(default_factory=dict)
    layer_norm_lookalikes: Mapping[str, str] = field(default_factory=dict)
    other_gates: Mapping[str, str] = field(default_factory=dict)
    recognised: Mapping[str, str] = field(default_factory=dict)
    failed_pass: str = ""


def survey(model: nn.Module, example_inputs: tuple | Mapping | None = None, *, watch_norms: bool = False) -> Survey:
    """Look at every module of ``model`` and, with ``watch_norms``, at one forward pass on the meta device.

    Nothing of the model runs: norms and the forward pass run on copies without data.

    Args:
        example_inputs: as for ``mxtrain.convert``; None stands for one row of 32 token ids. If they are given,
            the forward pass runs without ``watch_norms``, too, and shows how linears are called and where else their
            weights are used; but it may fail.

    Raises:
        ConfigError: if the model is wrapped, sharded, compiled or lazy, cannot be copied, or the forward pass fails;
            for ``example_inputs`` that are neither a tuple nor a mapping.
    """
    refuse_unfit_model(model)
    # A tensor would be taken apart into its rows, and a model may run on one row.
    if not isinstance(example_inputs, tuple | list | Mapping | None):
        kind = type(example_inputs).__name__
        raise ConfigError(
            f"example_inputs is a {kind}, no tuple or dict: write (inputs,) for a model with one argument"
        )
    modules = dict(model.named_modules())
    device_types = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    norms, lookalikes = find_norms(modules)
    layer_norms, layer_norm_lookalikes = find_layer_norms(modules)
    layer_norm_lookalikes = {fqn: what for fqn, what in layer_norm_lookalikes.items() if fqn not in norms}
    norm_like = (*norms, *lookalikes, *layer_norms, *layer_norm_lookalikes)
    linears, blocks = find_linears(modules), find_blocks(modules)
    converted = {
        fqn: type(module).__name__ for fqn, module in modules.items() if isinstance(module, (MXNorm, QuantizedLinear))
    }
    uses, failed_pass = None, ""
    if watch_norms and norms:
        uses = _watch(model, modules, norms, linears, example_inputs)
    elif example_inputs is not None:
        try:
            uses = _watch(model, modules, {}, linears, example_inputs)
        except ConfigError as error:
            cause = error.__cause__ or error
            failed_pass = (
                "not seen: calls with keywords, and uses of weights outside of their layers, because the forward pass "
                f"on the meta device failed ({type(cause).__name__}: {first_line(cause)})"
            )
    return Survey(
        kind=type(model).__name__,
        device_type=device_types.pop() if len(device_types) == 1 else None,
        modules=tuple(fqn for fqn in modules if fqn),
        names=names_of(model),
        blocks=blocks,
        norms=norms,
        lookalikes=lookalikes,
        linears=linears,
        heads=find_heads(modules, linears, blocks),
        unswappable=_unswappable(modules, (*norm_like, *linears), uses),
        weights=find_weights(modules),
        dtypes={name: parameter.dtype for name, parameter in model.named_parameters(remove_duplicate=False)},
        converted=converted,
        uses=uses,
        layer_norms=layer_norms,
        layer_norm_lookalikes=layer_norm_lookalikes,
        other_gates=find_other_gates(modules),
        recognised={fqn: how_recognised(modules[fqn]) for fqn in (*norms, *layer_norms)},
        failed_pass=failed_pass,
    )


def _unswappable(modules: Mapping[str, nn.Module], fqns: Iterable[str], uses: NormUses | None) -> dict[str, str]:
    holders = attributes_that_hold_modules(modules)
    keywords, outside = ({}, {}) if uses is None else (uses.keywords, uses.outside)
    around_mxnorms = set() if uses is None else _around_mxnorms(uses)
    reasons = {}
    for fqn in fqns:
        if reason := why_it_must_stay(modules[fqn], fqn in around_mxnorms):
            reasons[fqn] = reason
        elif holder := holders.get(id(modules[fqn])):
            reasons[fqn] = f"is also held by {holder}, which a swap would not reach: hold it as a child module only"
        elif fqn in keywords:
            reasons[fqn] = f"is called with the keyword {keywords[fqn]!r}: pass the value without it"
        elif fqn in outside:
            reasons[fqn] = f"its weight is used outside of it, by {outside[fqn]}, where nothing would be quantized"
    return reasons


def _around_mxnorms(uses: NormUses) -> set[str]:
    """The norms whose output only linears use, and these linears."""
    feeds = {norm: linears for norm, linears in uses.linears.items() if linears and not uses.others[norm]}
    return set(feeds).union(*feeds.values())


def _watch(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    norms: Mapping[str, NormFacts],
    linears: Mapping[str, LinearFacts],
    example_inputs: tuple | Mapping | None,
) -> NormUses:
    followed = [fqn for fqn, linear in linears.items() if linear.is_plain and not linear.shares_weight]
    # Norms and linears with hooks stay for their own reasons.
    others = {fqn: module for fqn, module in modules.items() if fqn not in norms and fqn not in linears}
    hooks = {fqn: " and ".join(hooks_on_values(module)) for fqn, module in others.items()}
    replaced_forwards = [fqn for fqn, module in modules.items() if has_function_as_forward(module)]
    copy = structural_copy(model)
    for module in copy.modules():
        # Quantized linears of an earlier conversion do not run on the meta device, plain ones do. Where a norm does not
        # run, the pass goes on with a tensor of its input's shape, which is that of its result.
        if isinstance(module, QuantizedLinear):
            module.__class__ = nn.Linear
    return watch(copy, norms, followed, example_inputs, hooks, replaced_forwards)
