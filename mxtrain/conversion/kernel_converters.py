"""The converters that give norms and routers faster kernels and quantize nothing."""

from dataclasses import dataclass
from typing import ClassVar

from mxtrain.conversion.base import NOT_ONE_DIMENSION, Converter, lookalikes
from mxtrain.conversion.plan import Plan, ToDecomposeKRouter, ToFusedRMSNorm
from mxtrain.conversion.survey import Survey
from mxtrain.errors import require_one_of
from mxtrain.nn.row_norms import WHEN_COMPILED


@dataclass(kw_only=True)
class FusedRMSNormConverter(Converter):
    """Every RMSNorm becomes a FusedRMSNorm, whatever uses its output.

    Attributes:
        when_compiled: see ``mxtrain.FusedRMSNorm``.
    """

    name: ClassVar[str] = "fused_rmsnorm"

    when_compiled: str = "auto"

    def __post_init__(self):
        super().__post_init__()
        require_one_of("when_compiled", self.when_compiled, WHEN_COMPILED)

    def plan(self, survey: Survey) -> Plan:
        kept = self._filtered(survey)
        swaps, skipped = {}, lookalikes(survey)
        for fqn, norm in survey.norms.items():
            if fqn in kept:
                skipped[fqn] = kept[fqn]
            elif len(norm.normalized_shape) != 1:
                skipped[fqn] = NOT_ONE_DIMENSION
            else:
                swaps[fqn] = ToFusedRMSNorm(norm, self.when_compiled)
        # A model whose norms an earlier conversion has turned into MXNorms needs nothing.
        if not swaps and "MXNorm" not in survey.converted.values():
            raise self._nothing_to_convert(survey, skipped)
        return Plan(swaps, skipped)


@dataclass(kw_only=True)
class DecomposeKRouterConverter(Converter):
    """The gate of every mixture-of-experts router becomes a DecomposeKRouter."""

    name: ClassVar[str] = "decompose_k_router"

    def plan(self, survey: Survey) -> Plan:
        kept = self._filtered(survey)
        swaps, skipped = {}, {}
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
