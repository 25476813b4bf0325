"""``mxtrain.convert``: survey a model, plan its conversion, swap its modules."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict, Unpack

import torch.nn as nn

from mxtrain.compile.passes import install, remove
from mxtrain.conversion.converters import Converter, get_converter
from mxtrain.conversion.plan import Plan
from mxtrain.conversion.survey import survey
from mxtrain.errors import ConfigError
from mxtrain.formats.estimate import Estimator, P
from mxtrain.formats.hardware import Mode
from mxtrain.formats.recipe import Backward, FourOverSix, FourOverSixError, LinearRecipe, ScaleRounding, TensorScale
from mxtrain.nn.group import LinearGroup
from mxtrain.norms.row_norm import WhenCompiled

ExampleInputs = tuple[Any, ...] | list[Any] | Mapping[str, Any] | None


class Settings(TypedDict, total=False):
    """The settings of all converters, for editors and type checkers. A converter refuses settings that it lacks."""

    filter_fqns: Iterable[str] | None
    recipe: str | LinearRecipe | None
    recipes: Mapping[str, str | LinearRecipe] | None
    scale_rounding: ScaleRounding | None
    tensor_scale: TensorScale | None
    weight_tiles: bool | None
    hadamard: bool | None
    stochastic_rounding: bool | None
    four_over_six: FourOverSix | None
    four_over_six_error: FourOverSixError | None
    backward: Backward | None
    high_precision_share: float | None
    high_precision_last: int | None
    mode: Mode | None
    seed: int | None
    graph_passes: bool | None
    p: P | None
    estimator: Estimator | None
    eps: float | None
    gated_estimate_ratio: float | None
    group_linears: bool | None
    when_compiled: WhenCompiled | None


def convert(
    model: nn.Module,
    converter: Literal["mxnorm", "mx_linear", "fused_norm", "decompose_k_router"] = "mxnorm",
    *,
    example_inputs: ExampleInputs = None,
    prefix: str = "",
    **settings: Unpack[Settings],
) -> Plan:
    """Swap modules of ``model`` in place. Parameters and FQNs stay, so checkpoints load either way.

    Convert a model before it is wrapped, sharded or compiled. A module with hooks, parametrizations or a forward of its
    own stays, and the plan says why. Attributes that were set on a module move to the new module, unless it already has
    an attribute of that name. PyTorch's fast path for ``nn.TransformerEncoder`` in evaluation calls no linear: switch
    it off with ``torch.backends.mha.set_fastpath_enabled(False)``.

    - ``"mxnorm"`` turns every RMSNorm that feeds only linears into an MXNorm, those linears into MXNormLinear, and the
      other linears into MXLinear.
    - ``"mx_linear"`` turns every linear into MXLinear and keeps the norms.
    - ``"fused_norm"`` turns every RMSNorm into a FusedRMSNorm and every LayerNorm into a FusedLayerNorm.
    - ``"decompose_k_router"`` turns every linear that is the gate of a router of experts into a DecomposeKRouter.

    The first two converters also turn TorchTitan's ``GroupedExperts`` into ``QuantizedExperts``. The last two may run
    before or after the first two, with the same result.

    Args:
        model: any module tree, on any device, meta included.
        converter: one of the names above.
        example_inputs: arguments for one forward pass of ``model``: a tuple, or a mapping for arguments by name. Only
            shapes and dtypes matter, so any device will do. Leave out masks whose values the model looks at. None
            stands for one row of 32 token ids. Only "mxnorm" makes this pass, to see which modules use each norm.
        prefix: FQN of ``model`` within a whole model that is converted in parts, such as "layers.0". Layers then have
            the random bits that a conversion of the whole model would give them. Without a prefix, layers with the same
            name in two parts have the same random bits: signs of the Hadamard transform, and rounding noise. Settings
            and plan use names within the part, and ``high_precision_share`` counts the part's blocks.
        **settings: the fields of the converter's class (``mxtrain.conversion.converters``), such as ``p=1`` or
            ``filter_fqns=["lm_head", "layers.0"]``. None stands for a field's default.

    Returns:
        The plan that was carried out. Print it to see what was swapped, what was kept, and why.

    Raises:
        ConfigError: for an unknown converter or setting, a filter that matches no module, a name in ``recipes`` that
            matches no linear and no experts, ``example_inputs`` that are neither a tuple nor a mapping, a prefix that
            is no FQN, a forward pass that fails without data, a model that is wrapped, sharded, compiled or was
            converted before, or one with nothing to convert. The model is then unchanged.
    """
    # Another spelling of a name, such as "layers.0.", would give other bits.
    if not isinstance(prefix, str) or (prefix and not all(prefix.split("."))):
        raise ConfigError(f"prefix = {prefix!r} is not the FQN of a module, such as 'layers.0'")
    return apply(get_converter(converter, settings), model, example_inputs, prefix)


def apply(converter: Converter, model: nn.Module, example_inputs: ExampleInputs = None, prefix: str = "") -> Plan:
    """``convert`` with a converter that has its settings already."""
    facts = survey(model, example_inputs, watch_norms=converter.watches_norms)
    plan = converter.plan(facts)
    _swap(dict(model.named_modules()), plan, prefix)
    if converter.graph_passes is True:
        install()
    elif converter.graph_passes is False:
        remove()
    return plan


def _swap(modules: Mapping[str, nn.Module], plan: Plan, prefix: str) -> None:
    """Put the new modules of ``plan`` in their places, under all names that the old ones have.

    Attributes of an old module whose names the new one does not use move to it. All new modules are built before the
    first one is put in its place, and that step runs no code of the model, so that an error leaves the model unchanged.
    """
    built = {}
    for fqn, step in plan.swaps.items():
        old = modules[fqn]
        built[fqn] = step.build(f"{prefix}.{fqn}" if prefix else fqn, old)
        for name, value in vars(old).items():
            if not hasattr(built[fqn], name):
                setattr(built[fqn], name, value)
    new = {modules[fqn]: module for fqn, module in built.items()}
    for parent in modules.values():
        for name, child in parent._modules.items():
            if child in new:
                parent._modules[name] = new[child]
    for norm, layers in plan.feeds.items():
        for fqn in layers:
            built[fqn].fed_by = (built[norm],)  # a tuple, because a module would become a child
    for norm, linears in plan.groups.items():
        built[norm].group = LinearGroup([built[fqn] for fqn in linears])
