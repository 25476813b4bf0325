"""Find the linears that a norm feeds, and swap norms and linears in place.

Which linears belong to which norm is not guessed from names but seen in a forward pass (``conversion.norm_uses``). A
norm becomes an MXNorm only if every use of its output is an ``nn.Linear`` module, called once, so that the quantized
result of the norm can take the place of its tensor. A norm that stays one can run on fused kernels, whatever uses its
output. The gate of a router is never quantized; it can become one with full-precision logits.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch.nn as nn

from mxtrain.conversion.norm_uses import shared_parameters, watch_norms
from mxtrain.conversion.norms import as_rms_norm, looks_like_rms_norm
from mxtrain.conversion.routers import router_gates
from mxtrain.conversion.selection import last_blocks, named, recipes_of_linears
from mxtrain.errors import ConfigError, require_one_of
from mxtrain.nn.decompose_k_router import DecomposeKRouter
from mxtrain.nn.fused_rms_norm import WHEN_COMPILED, FusedRMSNorm
from mxtrain.nn.mx_linear import MXLinear
from mxtrain.nn.mxnorm import MXNorm, MXNormLinear
from mxtrain.nn.three_gemms import QuantizedLinear, check_features
from mxtrain.ops.hardware import resolve_mode
from mxtrain.recipes.parse import get_recipes
from mxtrain.recipes.recipe import HIGH_PRECISION, LinearRecipe
from mxtrain.recipes.rms_estimate import RMSEstimate

CONVERTERS = ("mxnorm", "mx_linear", "fused_rmsnorm", "decompose_k_router")


@dataclass
class ConversionReport:
    """What a conversion did.

    Attributes:
        norms: FQN of every swapped norm -> FQNs of the linears it feeds (now MXNormLinear).
        linears: FQNs of the linears that became MXLinear.
        fused_norms: FQNs of the norms that became FusedRMSNorm.
        gates: FQNs of the gates of routers that became DecomposeKRouter.
        skipped: FQN of every norm, linear or gate left as it was -> the reason.
        recipes: FQN of every swapped linear whose recipe is not that of the model -> the name of its recipe.
    """

    norms: dict[str, list[str]] = field(default_factory=dict)
    linears: list[str] = field(default_factory=list)
    fused_norms: list[str] = field(default_factory=list)
    gates: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    recipes: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        fed = sum(map(len, self.norms.values()))
        swapped = f"{len(self.norms)} norms with the {fed} linears they feed, and {len(self.linears)} other linears"
        if self.fused_norms:
            swapped = f"{len(self.fused_norms)} norms for fused ones"
        if self.gates:
            swapped = f"{len(self.gates)} gates of routers"
        lines = [f"swapped {swapped}; left {len(self.skipped)} as they were"]
        lines += [f"  {norm} -> {', '.join(map(self._named, linears))}" for norm, linears in self.norms.items()]
        lines += [f"  {self._named(fqn)}" for fqn in (*self.linears, *self.fused_norms, *self.gates)]
        lines += [f"  left: {fqn}: {reason}" for fqn, reason in self.skipped.items()]
        return "\n".join(lines)

    def _named(self, fqn: str) -> str:
        return f"{fqn} ({self.recipes[fqn]})" if fqn in self.recipes else fqn


def convert(
    model: nn.Module,
    converter: str = "mxnorm",
    *,
    p: int = 2,
    recipe="mxfp8",
    recipes: Mapping | None = None,
    estimator: str = "pre_round",
    scale_rounding: str | None = None,
    tensor_scale: str | None = None,
    weight_tiles: bool | None = None,
    hadamard: bool | None = None,
    stochastic_rounding: bool | None = None,
    high_precision_share: float | None = None,
    mode: str = "auto",
    eps: float | None = None,
    filter_fqns: Iterable[str] | None = None,
    example_inputs: tuple | None = None,
    when_compiled: str = "auto",
    seed: int = 0,
) -> ConversionReport:
    """Swap norms, linears or gates of ``model`` in place. Parameters and FQNs stay, so checkpoints load either way.

    ``"mxnorm"`` turns every RMSNorm that feeds only linears into an MXNorm, those linears into MXNormLinear, and the
    other linears into MXLinear. ``"mx_linear"`` keeps the norms and turns every linear into MXLinear.
    ``"fused_rmsnorm"`` turns every RMSNorm that is left into a FusedRMSNorm, ``"decompose_k_router"`` the gate of every
    mixture-of-experts router into a DecomposeKRouter; before or after the others they give the same model.

    Args:
        model: any module tree, on any device, meta included.
        converter: "mxnorm", "mx_linear", "fused_rmsnorm" or "decompose_k_router".
        p, estimator, scale_rounding, mode: see ``mxtrain.mxnorm_cast``; only for "mxnorm" and "mx_linear".
        recipe: what linears are cast to, for "mxnorm" and "mx_linear": a name for all three GEMMs or one for each, as
            in "fprop=nvfp4, dgrad=mxfp8, wgrad=bf16". Layers whose three GEMMs are "bf16" are left as they are.
        recipes: name of linears, or of modules that hold some (``conversion.selection.matches``) -> their recipe in
            the place of ``recipe``; of several names for a linear the last holds. A norm has the recipe of the linears
            it feeds, and stays if they have several for fprop. filter_fqns and high_precision_share come first.
        tensor_scale, weight_tiles, hadamard, stochastic_rounding, high_precision_share: settings of ``mxtrain.Recipe``,
            for "mxnorm" and "mx_linear"; None keeps the recipe's own. Blocks are the members of the outermost
            ModuleLists and ModuleDicts; of n blocks, share * n, rounded to nearest, are left as they are, by order.
        eps: for the squared RMS estimate of "mxnorm"; None keeps the eps of each norm.
        filter_fqns: names of modules to leave alone (``conversion.selection.matches``). None stands for ("output",),
            and for nothing with "fused_rmsnorm" and "decompose_k_router".
        example_inputs: arguments for one forward pass of ``model``, of any device; only shapes and dtypes matter.
            None stands for one row of 32 token ids. Used by "mxnorm".
        when_compiled: for "fused_rmsnorm", see ``mxtrain.FusedRMSNorm``.
        seed: with the FQN of a layer, gives the signs of its Hadamard transform and its random bits. Training loops
            say by ``mxtrain.set_rounding_step`` which step they are in.

    Returns:
        ConversionReport: what was swapped, and what was left and why.

    Raises:
        ConfigError: for an unknown setting, a filter that matches no module, a name in ``recipes`` that matches no
            linear, features that no block divides, a forward pass that fails on the meta device, or a model with
            nothing to convert. The model is then unchanged.
    """
    require_one_of("converter", converter, CONVERTERS)
    require_one_of("when_compiled", when_compiled, WHEN_COMPILED)
    recipe, by_pattern = get_recipes(
        recipe,
        {} if recipes is None else recipes,
        scale_rounding=scale_rounding,
        tensor_scale=tensor_scale,
        weight_tiles=weight_tiles,
        hadamard=hadamard,
        stochastic_rounding=stochastic_rounding,
        high_precision_share=high_precision_share,
    )
    RMSEstimate.for_recipe(recipe.fprop, p, estimator, 0.0 if eps is None else eps)
    mode = resolve_mode(mode, _device_type(model))
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError(f"seed = {seed!r} is not an integer")
    if isinstance(filter_fqns, str):
        raise ConfigError(f"filter_fqns = {filter_fqns!r} is not a list: write [{filter_fqns!r}]")
    if filter_fqns is None:
        filter_fqns = ("output",) if converter in ("mxnorm", "mx_linear") else ()
    filtered = {fqn: "named in filter_fqns" for name in filter_fqns for fqn in named(model, name, "filter_fqns")}
    if converter == "fused_rmsnorm":
        return _fuse_norms(model, filtered, when_compiled)
    if converter == "decompose_k_router":
        return _swap_gates(model, filtered)
    chosen = recipes_of_linears(model, recipe, by_pattern)
    recipe_of = {fqn: its_recipe for fqn, (its_recipe, _) in chosen.items()}
    high_precision = {
        fqn: f"left in high precision by {setting}"
        for fqn, (its_recipe, setting) in chosen.items()
        if its_recipe.name == HIGH_PRECISION
    }
    filtered = high_precision | last_blocks(model, recipe.high_precision_share) | filtered

    report = ConversionReport()
    norms = _plan_norms(model, filtered, recipe_of, example_inputs, report) if converter == "mxnorm" else {}
    fed = [linear for linears in report.norms.values() for linear in linears]
    _plan_linears(model, filtered, set(fed), report)
    if not (report.norms if converter == "mxnorm" else report.linears):
        raise _nothing_to_convert(converter, model, report)

    for fqn in (*fed, *report.linears):
        linear = model.get_submodule(fqn)
        try:
            check_features(linear.in_features, linear.out_features, recipe_of[fqn])
            if fqn in fed:
                RMSEstimate.for_recipe(recipe_of[fqn].fprop, p, estimator)
        except ConfigError as error:
            raise ConfigError(f"{fqn}: {error}; name it in filter_fqns to leave it in high precision") from None
        if recipe_of[fqn] != recipe:
            report.recipes[fqn] = recipe_of[fqn].name

    for fqn, linears in report.norms.items():
        # One that needs the norm's signs, if any of them does.
        its_recipe = max((recipe_of[linear] for linear in linears), key=lambda r: r.needs_signs)
        new = MXNorm.from_rms_norm(norms[fqn], p=p, estimator=estimator, eps=eps, recipe=its_recipe, mode=mode)
        new.set_seed(seed, fqn)
        _replace(model, fqn, new)
        for linear in linears:
            _swap_linear(model, linear, MXNormLinear, recipe_of[linear], mode, seed)
    for linear in report.linears:
        _swap_linear(model, linear, MXLinear, recipe_of[linear], mode, seed)
    return report


def _swap_linear(
    model: nn.Module, fqn: str, kind: type[QuantizedLinear], recipe: LinearRecipe, mode: str, seed: int
) -> None:
    new = kind.from_linear(model.get_submodule(fqn), recipe=recipe, mode=mode)
    new.set_seed(seed, fqn)
    _replace(model, fqn, new)


def _device_type(model: nn.Module) -> str | None:
    """Where the model's parameters are; None, for this machine's default, while they are on the meta device."""
    types = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    return types.pop() if len(types) == 1 else None


def _nothing_to_convert(converter: str, model: nn.Module, report: ConversionReport) -> ConfigError:
    left = "".join(f"\n  {fqn}: {reason}" for fqn, reason in report.skipped.items())
    return ConfigError(f"converter = {converter!r} finds nothing to convert in this {type(model).__name__}{left}")


def _fuse_norms(model: nn.Module, filtered: dict[str, str], when_compiled: str) -> ConversionReport:
    report = ConversionReport()
    norms = _find_norms(model, report)
    for fqn, norm in norms.items():
        if reason := _kept(fqn, norm, filtered):
            report.skipped[fqn] = reason
        else:
            report.fused_norms.append(fqn)
            _replace(model, fqn, FusedRMSNorm.from_rms_norm(norm, when_compiled=when_compiled))
    if not report.fused_norms and not any(isinstance(module, MXNorm) for module in model.modules()):
        raise _nothing_to_convert("fused_rmsnorm", model, report)
    return report


def _swap_gates(model: nn.Module, filtered: dict[str, str]) -> ConversionReport:
    report = ConversionReport()
    for fqn, gate in router_gates(model).items():
        if fqn in filtered:
            report.skipped[fqn] = filtered[fqn]
        elif type(gate) is not nn.Linear:
            report.skipped[fqn] = f"is a {type(gate).__name__}"
        else:
            report.gates.append(fqn)
            _replace(model, fqn, DecomposeKRouter.from_linear(gate))
    if not report.gates:
        raise _nothing_to_convert("decompose_k_router", model, report)
    return report


def _find_norms(model: nn.Module, report: ConversionReport) -> dict[str, nn.RMSNorm]:
    """Every module that is or computes an RMSNorm, as one; those that only look like it go to ``report.skipped``."""
    norms = {}
    for fqn, module in model.named_modules():
        if not fqn:  # the model itself, which nothing can take the place of
            continue
        if norm := as_rms_norm(module):
            norms[fqn] = norm
        elif looks_like_rms_norm(module):
            report.skipped[fqn] = f"is a {type(module).__name__} that does not compute what nn.RMSNorm does"
    return norms


def _kept(fqn: str, norm: nn.RMSNorm, filtered: dict[str, str]) -> str | None:
    """Why a norm stays as it is, whatever it feeds; None if nothing speaks for that."""
    if fqn in filtered:
        return filtered[fqn]
    if len(norm.normalized_shape) != 1:
        return "normalizes more than one dimension"
    return None


def _plan_norms(
    model: nn.Module,
    filtered: dict[str, str],
    recipe_of: dict[str, LinearRecipe],
    example_inputs: tuple | None,
    report: ConversionReport,
) -> dict[str, nn.RMSNorm]:
    """Sort every RMSNorm into ``report.norms`` or ``report.skipped``; return what each is, as an nn.RMSNorm."""
    norms = _find_norms(model, report)
    if not norms:
        return norms
    uses, gates = watch_norms(model, norms, example_inputs), router_gates(model)
    for fqn in norms:
        linears, others = uses.linears[fqn], uses.others[fqn]
        if reason := _kept(fqn, norms[fqn], filtered):
            report.skipped[fqn] = reason
        elif others:
            report.skipped[fqn] = f"its output is used by {', '.join(sorted(others))}"
        elif not linears:
            unfollowed = f"; not followed: {uses.unfollowed[0]}" if uses.unfollowed else ""
            report.skipped[fqn] = f"no linear was seen to use its output{unfollowed}"
        elif kept := [linear for linear in linears if linear in filtered]:
            report.skipped[fqn] = f"feeds {', '.join(kept)}, {filtered[kept[0]]}"
        elif fed_gates := [linear for linear in linears if linear in gates]:
            report.skipped[fqn] = f"feeds {', '.join(fed_gates)}, the gate of a router"
        elif again := [linear for linear in linears if uses.calls[linear] != 1]:
            report.skipped[fqn] = f"feeds {', '.join(again)}, which is called more than once"
        elif len({recipe_of[linear].fprop for linear in linears}) > 1:
            fprops = ", ".join(f"{linear}: {recipe_of[linear].fprop.name}" for linear in linears)
            report.skipped[fqn] = f"feeds linears with different recipes of fprop ({fprops})"
        else:
            report.norms[fqn] = linears
    return norms


def _plan_linears(model: nn.Module, filtered: dict[str, str], fed: set[str], report: ConversionReport) -> None:
    """Sort every linear that no swapped norm feeds into ``report.linears`` or ``report.skipped``."""
    shared, gates = shared_parameters(model), router_gates(model)
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.Linear) or fqn in fed:
            continue
        if fqn in filtered:
            report.skipped[fqn] = filtered[fqn]
        elif fqn in gates:
            report.skipped[fqn] = "is the gate of a router, whose choices are sensitive to rounding"
        elif type(module) is not nn.Linear:
            report.skipped[fqn] = f"is a {type(module).__name__}"
        elif id(module.weight) in shared:
            report.skipped[fqn] = "shares its weight with another module"
        else:
            report.linears.append(fqn)


def _replace(model: nn.Module, fqn: str, module: nn.Module) -> None:
    parent, _, name = fqn.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
