"""The converters that give norms and routers faster kernels and quantize nothing."""

from dataclasses import dataclass
from typing import ClassVar

from mxtrain.conversion.base import NOT_ONE_DIMENSION, Converter, why_lookalikes_stay
from mxtrain.conversion.plan import Plan, ToDecomposeKRouter, ToFusedLayerNorm, ToFusedRMSNorm
from mxtrain.conversion.survey import Survey
from mxtrain.errors import require_one_of
from mxtrain.nn.row_norms import WHEN_COMPILED


@dataclass(kw_only=True)
class FusedNormConverter(Converter):
    """Every RMSNorm becomes a FusedRMSNorm, every LayerNorm a FusedLayerNorm, whatever uses its output.

    Attributes:
        when_compiled: see ``mxtrain.FusedRMSNorm``.
    """

    name: ClassVar[str] = "fused_norm"
    takes_layer_norms: ClassVar[bool] = True

    when_compiled: str = "auto"

    def __post_init__(self):
        super().__post_init__()
        require_one_of("when_compiled", self.when_compiled, WHEN_COMPILED)

    def plan(self, survey: Survey) -> Plan:
        kept = self._filtered(survey)
        fused = {fqn: ToFusedRMSNorm(norm, self.when_compiled) for fqn, norm in survey.norms.items()}
        swaps, skipped = {}, why_lookalikes_stay(survey, survey.lookalikes)
        if self.takes_layer_norms:
            fused |= {fqn: ToFusedLayerNorm(norm, self.when_compiled) for fqn, norm in survey.layer_norms.items()}
            skipped |= why_lookalikes_stay(survey, survey.layer_norm_lookalikes)
        for fqn, swap in fused.items():
            if fqn in kept:
                skipped[fqn] = kept[fqn]
            elif len(swap.norm.normalized_shape) != 1:
                skipped[fqn] = NOT_ONE_DIMENSION
            else:
                swaps[fqn] = swap
        # A model whose norms an earlier conversion has turned into MXNorms needs nothing.
        if not swaps and "MXNorm" not in survey.converted.values():
            raise self._nothing_to_convert(survey, skipped)
        return Plan(swaps, skipped)


@dataclass(kw_only=True)
class FusedRMSNormConverter(FusedNormConverter):
    """Every RMSNorm becomes a FusedRMSNorm; a LayerNorm stays."""

    name: ClassVar[str] = "fused_rmsnorm"
    takes_layer_norms: ClassVar[bool] = False


@dataclass(kw_only=True)
class DecomposeKRouterConverter(Converter):
    """Every linear that is the gate of a mixture-of-experts router becomes a DecomposeKRouter."""

    name: ClassVar[str] = "decompose_k_router"

    def plan(self, survey: Survey) -> Plan:
        kept = self._filtered(survey)
        swaps, skipped = {}, {fqn: f"is a {kind}, not an nn.Linear" for fqn, kind in survey.other_gates.items()}
        for fqn, linear in survey.linears.items():
            if not linear.is_gate:
                continue
            if fqn in kept:
                skipped[fqn] = kept[fqn]
            elif not linear.is_plain:
                skipped[fqn] = f"is a {linear.kind}"
            else:
                swaps[fqn] = ToDecomposeKRouter()
        if not swaps:
            raise self._nothing_to_convert(survey, skipped)
        return Plan(swaps, skipped)
