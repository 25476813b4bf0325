"""The converters: each checks its settings when it is built, and turns a survey into a plan."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import ClassVar, get_args

import torch.nn as nn

from mxtrain.analysis.runs import variant_of
from mxtrain.conversion.layers import MixtureFacts
from mxtrain.conversion.merged_layers import image_layers
from mxtrain.conversion.plan import Plan, Swap, ToFusedNorm, ToMXNorm, ToQuantized, ToRouter, folded, weight_uses
from mxtrain.conversion.survey import Survey, selected
from mxtrain.errors import ConfigError, require_one_of
from mxtrain.formats.estimate import Estimator, P, RMSEstimate
from mxtrain.formats.hardware import MERGED, Mode, check_mode, default_device_type, resolve_mode
from mxtrain.formats.parse import SWITCHES, get_recipes
from mxtrain.formats.recipe import (
    DEFAULT_RECIPE,
    HIGH_PRECISION_RECIPE,
    Backward,
    FourOverSix,
    FourOverSixError,
    LinearRecipe,
    ScaleRounding,
    TensorScale,
    recipe_of_norm,
)
from mxtrain.nn.decompose_k.router import DecomposeKRouter
from mxtrain.nn.experts import QuantizedExperts, check_tiles
from mxtrain.nn.mixture import MXNormRouter
from mxtrain.nn.mx_linear import MXLinear
from mxtrain.nn.mxnorm import MXNormLinear
from mxtrain.nn.three_gemms import check_features
from mxtrain.norms import FUSED_NORMS
from mxtrain.norms.row_norm import WHEN_COMPILED, WhenCompiled


@dataclass(kw_only=True)
class Converter(ABC):
    """Checks its settings when it is built, and makes a plan from a ``Survey``. It holds no model.

    Attributes:
        filter_fqns: patterns of modules to keep (``survey.matches``); each must match a module. None keeps none.
    """

    name: ClassVar[str]
    watches_norms: ClassVar[bool] = False
    """Whether ``plan`` needs to know what uses the outputs of norms"""
    way_out: ClassVar[str] = ""
    """What to try with a model in which this converter finds nothing, as a line of the error"""
    # Whether mxtrain's passes over compiled graphs run from now on; None changes nothing. Only converters whose layers
    # have casts make this a setting, so it has no annotation here.
    graph_passes = None

    filter_fqns: Iterable[str] | None = None

    def __post_init__(self):
        names = self.filter_fqns
        if not isinstance(names, Iterable | None) or isinstance(names, str):
            raise ConfigError(f"filter_fqns = {names!r} is not a list of module names such as ['output']")
        self.filter_fqns = None if names is None else list(names)

    @abstractmethod
    def plan(self, survey: Survey) -> Plan:
        """Return what every module that this converter looks at becomes, or why it stays."""

    def _kept(self, survey: Survey) -> dict[str, str]:
        """The modules that the user named, and those that no converter can swap -> the reason to keep them."""
        patterns = self.filter_fqns or ()
        named = [fqn for pattern in patterns for fqn in selected(survey.fqns, pattern, "filter_fqns")]
        return {**survey.unswappable, **dict.fromkeys(named, "is named in filter_fqns")}

    def _nothing_to_convert(self, survey: Survey, skipped: Mapping[str, str]) -> ConfigError:
        left = "".join(f"\n  {line}" for line in folded({fqn: f"it {reason}" for fqn, reason in skipped.items()}))
        way_out = f"\n{self.way_out}" if self.way_out else ""
        return ConfigError(f"converter = {self.name!r} finds nothing to convert in this {survey.kind}{left}{way_out}")


@dataclass(kw_only=True)
class MXLinearConverter(Converter):
    """Every linear becomes an MXLinear, and TorchTitan's stacked experts become QuantizedExperts.

    These modules stay: norms, gates of routers, layers that share their weights, layers whose features are not
    divisible by the block size and, in mode native, experts with tensor scales in any GEMM.

    Attributes:
        filter_fqns: patterns of modules to keep. None keeps the model's output head.
        recipe: the recipe of linears and experts: a name for all three GEMMs, or a name for each, such as
            "fprop=nvfp4, dgrad=mxfp8, wgrad=bf16". Layers whose three GEMMs are "bf16" stay.
        recipes: pattern of linears, experts or modules that hold them -> their recipe instead of ``recipe``. The last
            matching pattern wins. ``filter_fqns`` and the last blocks in high precision take precedence.
        scale_rounding, tensor_scale, weight_tiles, hadamard, stochastic_rounding, four_over_six, four_over_six_error,
            high_precision_share, high_precision_last: settings of ``mxtrain.Recipe``; None keeps the recipe's own. Of n
            blocks (``conversion.layers``) the last share * n, rounded to nearest, or the last so many stay.
        backward: "dequantized" gives dgrad and wgrad the recipe "dequantized"; None keeps the recipe's own.
        mode: "native", "emulated", "reference", or "auto": the best mode of the device that a layer's input is on. With
            "fp8_merged", layers that it cannot run have mode "emulated", which the plan says.
        graph_passes: whether ``torch.compile``, in this thread and from now on, fuses casts with the operations before
            them and computes complex products as real ones (``mxtrain.compile``).
        seed: with the FQN of a layer, determines the signs of its Hadamard transform and its random bits. Training
            loops call ``mxtrain.set_rounding_step`` before every forward.
    """

    name: ClassVar[str] = "mx_linear"
    # True where sizes are settings: a linear whose features no block divides is then an error. A linear with a single
    # feature, such as a shared expert's gate, always stays. Without an annotation, this is not a setting.
    refuses_odd_sizes = False

    recipe: str | LinearRecipe = DEFAULT_RECIPE
    recipes: Mapping[str, str | LinearRecipe] = field(default_factory=dict)
    scale_rounding: ScaleRounding | None = None
    tensor_scale: TensorScale | None = None
    weight_tiles: bool | None = None
    hadamard: bool | None = None
    stochastic_rounding: bool | None = None
    four_over_six: FourOverSix | None = None
    four_over_six_error: FourOverSixError | None = None
    backward: Backward | None = None
    high_precision_share: float | None = None
    high_precision_last: int | None = None
    mode: Mode = "auto"
    seed: int = 0
    graph_passes: bool = True

    def __post_init__(self):
        super().__post_init__()
        self.default_recipe, self.recipe_by_pattern = get_recipes(
            self.recipe, self.recipes, **{switch: getattr(self, switch) for switch in SWITCHES}
        )
        require_one_of("mode", self.mode, get_args(Mode))
        if self.mode == MERGED:
            check_mode(self.mode, self.default_recipe, *self.recipe_by_pattern.values())
        require_one_of("graph_passes", self.graph_passes, (True, False))
        if not isinstance(self.seed, Integral) or isinstance(self.seed, bool):
            raise ConfigError(f"seed = {self.seed!r} is not an integer")

    def plan(self, survey: Survey) -> Plan:
        for fqn, kind in survey.converted.items():
            raise ConfigError(
                f"converter = {self.name!r}: this {survey.kind} was converted before ({fqn or 'it'} is an {kind}); "
                "convert a new model once, with settings for all its layers"
            )
        recipe_of, kept = self._recipes(survey)
        swaps, skipped = self._plan_norms(survey, recipe_of, kept)
        others = {}
        for fqn, layer in survey.layers.items():
            if fqn in swaps:  # MXNorms feed it
                continue
            if reason := kept.get(fqn) or layer.why_it_stays:
                skipped[fqn] = reason
            else:
                kind = MXLinear if fqn in survey.linears else QuantizedExperts
                others[fqn] = ToQuantized(kind, recipe_of[fqn], self.mode, self.seed)
        if not (swaps if self.watches_norms else others):
            raise self._nothing_to_convert(survey, skipped)
        swaps |= others
        images, lines = image_layers(swaps, survey.layers) if self.mode == MERGED else ({}, [])
        swaps |= {fqn: replace(swaps[fqn], mode="emulated") for fqn in images}
        recipes = {fqn: swap.recipe for fqn, swap in swaps.items() if isinstance(swap, ToQuantized)}
        for fqn, experts in survey.experts.items():
            if fqn in recipes:
                with self._advice(survey, fqn):
                    mode = "emulated" if fqn in images else self._mode_on(survey)
                    check_tiles(experts.in_features, experts.out_features, recipes[fqn], mode)
        weights = weight_uses(survey.weights, recipes)
        _, share = self._last_blocks(survey)
        check_mode(self.mode)
        variant = variant_of({**vars(self), "converter": self.name, "recipe": self.default_recipe.name})
        converter = f"{variant}, mode {self._mode_on(survey)}"
        return Plan(swaps, skipped, weights, tuple(filter(None, [share, *lines])), converter)

    def _plan_norms(
        self, survey: Survey, recipe_of: Mapping[str, LinearRecipe], kept: Mapping[str, str]
    ) -> tuple[dict[str, Swap], dict[str, str]]:
        """Swaps of norms and the linears that they feed, and norms that stay -> the reason."""
        return {}, {}

    def _recipes(self, survey: Survey) -> tuple[dict[str, LinearRecipe], dict[str, str]]:
        """The recipe of all linears and experts, and every module that stays in high precision -> the reason."""
        heads = () if self.filter_fqns is not None else survey.heads
        layers = survey.layers
        recipe_of = dict.fromkeys(layers, self.default_recipe)
        setting_of = dict.fromkeys(layers, f"recipe = {getattr(self.recipe, 'name', self.recipe)!r}")
        for pattern, recipe in self.recipe_by_pattern.items():
            hits = [fqn for fqn in selected(survey.fqns, pattern, "recipes") if fqn in layers]
            if not hits:
                raise ConfigError(
                    f"recipes: {pattern!r} names no linear and no experts; name the linears that a norm "
                    "feeds to change the norm"
                )
            recipe_of |= dict.fromkeys(hits, recipe)
            written = self.recipes[pattern]
            setting_of |= dict.fromkeys(hits, f"recipes.{pattern!r} = {getattr(written, 'name', written)!r}")
        no_codes = ", whose fprop has no codes to decode"
        high_precision = {
            fqn: f"is left in high precision by {setting_of[fqn]}{no_codes * ('dequantized' in setting_of[fqn])}"
            for fqn, recipe in recipe_of.items()
            if recipe.name == HIGH_PRECISION_RECIPE
        }
        if self._mode_on(survey) == "native":
            high_precision |= {
                fqn: f"has recipe {recipe_of[fqn].name!r}, and experts have no native {fmt} products"
                for fqn in survey.experts
                if (fmt := recipe_of[fqn].tensor_scaled)
            }
        last, _ = self._last_blocks(survey)
        kept = high_precision | last | dict.fromkeys(heads, "is the output head") | self._kept(survey)
        for fqn, layer in layers.items():
            if fqn in kept or layer.why_it_stays:
                continue
            try:
                check_features(layer.in_features, layer.out_features, recipe_of[fqn])
            except ConfigError as error:
                if self.refuses_odd_sizes and 1 not in (layer.in_features, layer.out_features):
                    with self._advice(survey, fqn):
                        raise
                kept[fqn] = f"does not fit: {error}"
        return recipe_of, kept

    def _last_blocks(self, survey: Survey) -> tuple[dict[str, str], str]:
        """All modules of the last blocks that stay in high precision -> the reason; the setting in words."""
        recipe, blocks = self.default_recipe, survey.blocks
        name = "high_precision_last" if recipe.high_precision_last else "high_precision_share"
        value = getattr(recipe, name)
        setting = f"{name} = {value}"
        if value and not blocks:
            names = f"name the modules to keep in filter_fqns{self._and_heads(survey)}"
            line = f"{setting} finds no blocks in this {survey.kind}: {names}"
            if getattr(self, name):
                raise ConfigError(line)
            return {}, line
        count = math.floor(value * len(blocks) + 0.5) if name == "high_precision_share" else value
        if count > len(blocks):
            raise ConfigError(f"{setting} is too many for this {survey.kind}; allowed are 0 to {len(blocks)} blocks")
        words = f"{count} of {len(blocks)} blocks"
        last = tuple(f"{block}." for block in blocks[len(blocks) - count :])
        kept = [fqn for fqn in survey.fqns if f"{fqn}.".startswith(last)]
        return dict.fromkeys(kept, f"is in the last {words} ({setting})"), f"{setting} keeps {words}" if value else ""

    @contextmanager
    def _advice(self, survey: Survey, fqn: str):
        """Put the name of the layer before a ConfigError, and the way out behind it."""
        try:
            yield
        except ConfigError as error:
            way_out = f"name it in filter_fqns to leave it in high precision{self._and_heads(survey)}"
            raise ConfigError(f"{fqn}: {error}; {way_out}") from None

    def _and_heads(self, survey: Survey) -> str:
        """What else to name in ``filter_fqns``: set for the first time, it no longer keeps the output head."""
        if self.filter_fqns is not None or not survey.heads:
            return ""
        return f", together with the output head: {', '.join(survey.heads)}"

    def _mode_on(self, survey: Survey) -> str:
        """The mode that the layers compute in, on the device of the parameters or, without one, of this machine."""
        return resolve_mode("auto", survey.device_type or default_device_type()) if self.mode == "auto" else self.mode


@dataclass(kw_only=True)
class MXNormConverter(MXLinearConverter):
    """Every RMSNorm that feeds only linears becomes an MXNorm, and those linears MXNormLinear.

    The other linears and the experts are converted as by ``MXLinearConverter``. A forward pass shows which linears a
    norm feeds; names do not matter. A norm and its linears are swapped only if each use of the norm's output is an
    ``nn.Linear`` that is called once, so that a quantized operand can replace the tensor. A norm has the recipe of the
    linears that it feeds. The norm stays if their recipes for fprop differ.

    Attributes:
        p, estimator: see ``mxtrain.mxnorm_cast``.
        eps: added to the squared RMS estimate; None keeps the eps of each norm.
        gated_estimate_ratio: the mean ratio of the estimate to the RMS that was measured behind gates, with this ``p``
            and recipe. Estimates of gated norms are divided by it. None: their estimator is "exact".
        group_linears: whether the linears of a norm that is called once are one GEMM each way (``mxtrain.nn.group``).
            Their outputs are then columns of one matrix, not contiguous: set False for a model that calls ``.view`` to
            merge features with tokens, or hands an output to a kernel that expects contiguous memory.
    """

    name: ClassVar[str] = "mxnorm"
    watches_norms: ClassVar[bool] = True
    way_out: ClassVar[str] = "It needs an RMSNorm that feeds only linears. 'mx_linear' converts linears without norms."

    p: P = 2
    estimator: Estimator = "pre_round"
    eps: float | None = None
    gated_estimate_ratio: float | None = None
    group_linears: bool = True

    def __post_init__(self):
        super().__post_init__()
        require_one_of("group_linears", self.group_linears, (True, False))
        RMSEstimate.for_recipe(self.default_recipe.fprop, self.p, self.estimator, 0.0 if self.eps is None else self.eps)
        if (ratio := self.gated_estimate_ratio) is not None:
            if not isinstance(ratio, Real) or isinstance(ratio, bool) or not 0 < ratio < math.inf:
                raise ConfigError(f"gated_estimate_ratio = {ratio!r} is not a finite number above 0")
            if self.estimator == "exact":
                raise ConfigError(f"gated_estimate_ratio = {ratio!r} needs estimator = 'pre_round' or 'post_round'")

    def _plan_norms(
        self, survey: Survey, recipe_of: Mapping[str, LinearRecipe], kept: Mapping[str, str]
    ) -> tuple[dict[str, Swap], dict[str, str]]:
        swaps, skipped = {}, dict(survey.lookalikes[nn.RMSNorm])
        for fqn, facts in survey.norms_of(nn.RMSNorm).items():
            mixtures = survey.uses.mixtures.get(fqn, ())
            is_its_only_use = len(mixtures) == 1 and not survey.uses.linears[fqn]
            mixture = survey.mixtures[mixtures[0]] if is_its_only_use else None
            if reason := _why_norm_stays(fqn, survey, recipe_of, kept, mixture):
                skipped[fqn] = reason
                continue
            linears = tuple(survey.uses.linears[fqn]) if mixture is None else mixture.linears
            fed = linears if mixture is None else (*linears, mixture.experts)
            for layer in fed:
                with self._advice(survey, layer):
                    RMSEstimate.for_recipe(recipe_of[layer].fprop, self.p, self.estimator)
            recipe = recipe_of_norm([recipe_of[layer] for layer in fed])
            # A norm that is called for each of its linears gives each of them other rows.
            grouped = self.group_linears and len(linears) > 1 and survey.uses.calls[fqn] == 1
            own = self.gated_estimate_ratio if facts.group_size else 1.0
            estimator, ratio = ("exact", 1.0) if own is None else (self.estimator, float(own))
            swaps[fqn] = ToMXNorm(
                facts, linears, self.p, estimator, self.eps, recipe, self.mode, self.seed, grouped, mixture, ratio
            )
            if mixture is not None:
                swaps[mixture.gate] = ToRouter(MXNormRouter)
                swaps[mixture.experts] = ToQuantized(QuantizedExperts, recipe_of[mixture.experts], self.mode, self.seed)
            for linear in linears:
                swaps[linear] = ToQuantized(MXNormLinear, recipe_of[linear], self.mode, self.seed)
        if self.gated_estimate_ratio and not any(survey.norms[fqn].group_size for fqn in swaps if fqn in survey.norms):
            raise ConfigError(f"gated_estimate_ratio = {self.gated_estimate_ratio!r} needs a gated norm to swap")
        return swaps, skipped


def _why_norm_stays(
    fqn: str,
    survey: Survey,
    recipe_of: Mapping[str, LinearRecipe],
    kept: Mapping[str, str],
    mixture: MixtureFacts | None,
) -> str | None:
    """Why a norm cannot become an MXNorm; None if it can. It feeds linears, or the mixture."""
    uses, linears = survey.uses, survey.uses.linears[fqn]
    if mixture is not None:
        linears = [*mixture.linears, mixture.experts]
    if reason := kept.get(fqn) or survey.norms[fqn].why_it_stays:
        return reason
    for linear in linears:
        if reason := kept.get(linear) or survey.layers[linear].why_it_stays:
            return f"feeds {linear}, which {reason}"
    if uses.others[fqn]:
        return f"feeds something other than a linear: {', '.join(sorted(uses.others[fqn]))}"
    if fqn in uses.overwritten:
        return "reads an input that is written to in place after it"
    if (mixtures := uses.mixtures.get(fqn)) and mixture is None:
        return f"feeds {', '.join(mixtures)}, a mixture of experts"
    if mixture is not None:
        gate = survey.linears[mixture.gate]
        if mixture.gate in kept or gate.kind not in ("Linear", DecomposeKRouter.__name__):
            return f"feeds {mixture.gate}, which {kept.get(mixture.gate, f'is a {gate.kind}')}"
        if fmt := recipe_of[mixture.experts].fprop.tensor_scaled:
            return f"feeds {mixture.experts}, whose fprop in {fmt} would round the norm's rows a second time"
    if not linears:
        unfollowed = f"; not followed: {uses.unfollowed[0]}" if uses.unfollowed else ""
        return f"feeds no linear{unfollowed}"
    if mixture is None and (again := [linear for linear in dict.fromkeys(linears) if uses.calls[linear] != 1]):
        return f"feeds {', '.join(again)}, which is called more than once"
    group, block = survey.norms[fqn].group_size, max(recipe_of[linear].fprop.block_size for linear in linears)
    if group and group % block:
        return f"normalizes groups of {group} features, which are not whole blocks of {block}"
    if len({recipe_of[linear].fprop for linear in linears}) > 1:
        fprops = ", ".join(f"{linear}: {recipe_of[linear].fprop.name}" for linear in linears)
        return f"feeds linears with different recipes of fprop ({fprops})"
    return None


@dataclass(kw_only=True)
class FusedNormConverter(Converter):
    """Every RMSNorm becomes a FusedRMSNorm, every LayerNorm a FusedLayerNorm, whatever uses its output.

    Attributes:
        when_compiled: see ``mxtrain.FusedRMSNorm``.
    """

    name: ClassVar[str] = "fused_norm"

    when_compiled: WhenCompiled = "auto"

    def __post_init__(self):
        super().__post_init__()
        require_one_of("when_compiled", self.when_compiled, WHEN_COMPILED)

    def plan(self, survey: Survey) -> Plan:
        kept, swaps = self._kept(survey), {}
        skipped = {fqn: reason for kind in FUSED_NORMS for fqn, reason in survey.lookalikes[kind].items()}
        for fqn, norm in survey.norms.items():
            if reason := kept.get(fqn) or norm.why_it_stays or ("takes a gate" if norm.group_size else None):
                skipped[fqn] = reason
            else:
                swaps[fqn] = ToFusedNorm(norm, self.when_compiled)
        # A model whose norms an earlier conversion has turned into MXNorms needs nothing.
        if not swaps and "MXNorm" not in survey.converted.values():
            raise self._nothing_to_convert(survey, skipped)
        return Plan(swaps, skipped, converter=self.name)


@dataclass(kw_only=True)
class DecomposeKRouterConverter(Converter):
    """Every linear that is the gate of a mixture-of-experts router becomes a DecomposeKRouter."""

    name: ClassVar[str] = "decompose_k_router"
    way_out: ClassVar[str] = "It needs gates that are an nn.Linear, called 'gate' beside 'experts' or 'router'."

    def plan(self, survey: Survey) -> Plan:
        kept, swaps, skipped = self._kept(survey), {}, {}
        for fqn, linear in survey.linears.items():
            if not linear.is_gate:
                continue
            if fqn in kept or not linear.is_plain:
                skipped[fqn] = kept.get(fqn, f"is of class {linear.kind}")
            else:
                swaps[fqn] = ToRouter(DecomposeKRouter)
        # An earlier conversion may have turned them into MXNormRouters.
        if not swaps and "MXNormRouter" not in survey.converted.values():
            raise self._nothing_to_convert(survey, skipped)
        return Plan(swaps, skipped, converter=self.name)


CONVERTERS = {
    kind.name: kind for kind in (MXNormConverter, MXLinearConverter, FusedNormConverter, DecomposeKRouterConverter)
}


def get_converter(name: str, settings: Mapping) -> Converter:
    """The converter of this name with these settings; None stands for a setting's default."""
    require_one_of("converter", name, CONVERTERS)
    known = [setting.name for setting in fields(CONVERTERS[name])]
    for setting, value in settings.items():
        if setting not in known:
            allowed = ", ".join(map(repr, known))
            raise ConfigError(f"{setting} = {value!r} is not a setting of converter {name!r}; allowed are: {allowed}")
    return CONVERTERS[name](**{setting: value for setting, value in settings.items() if value is not None})
