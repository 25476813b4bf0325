"""mxtrain's converters in TorchTitan: built from the job config, applied to TorchTitan's models."""

from dataclasses import fields

import torch
import torch.nn as nn
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.models.attention import VarlenMetadata
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from mxtrain.conversion.convert import apply
from mxtrain.conversion.converters import (
    Converter,
    DecomposeKRouterConverter,
    FusedNormConverter,
    FusedRMSNormConverter,
    MXLinearConverter,
    MXNormConverter,
)
from mxtrain.conversion.plan import Plan
from mxtrain.conversion.schedule import attach_schedule
from mxtrain.diagnostics.recording import check_patterns
from mxtrain.errors import ConfigError, setting_in
from mxtrain.nn.ready_weights import note_norms
from mxtrain.nn.row_norms import runs_when_compiled
from mxtrain.ops.gemm import sum_bf16_products_in_fp32
from mxtrain.ops.hardware import mode_reason, resolve_mode
from mxtrain.recipes.parse import SWITCHES, switches_in_effect
from mxtrain.reports.terminal import note_conversion
from mxtrain.rng.rounding import step_is_set
from mxtrain.settings.check import conflict_of_converters
from mxtrain.settings.mxnorm_section import GUARD, fallback_of, quantizing_among, schedule_of
from mxtrain.titan.graph_limit import allow_kinds

# Stands for debug.seed where that is unset.
DEFAULT_SEED = 0
# Fields of the section [mxnorm] that the converter mxnorm alone has.
MXNORM_KEYS = ("p", "estimator", "eps", "group_linears")
# Facts in run.json.
_FACTS = ("recipe", "p", "estimator", *SWITCHES, "mode", "eps")


def _mode_of(converter) -> str:
    try:
        return resolve_mode(converter.mode, utils.device_type)
    except ConfigError as error:
        raise ConfigError(f"mxnorm.{error}") from None


def active_settings(job_config) -> dict[str, str | int | float | dict[str, str] | None]:
    """The numerics of a run, with ``mode`` resolved for this hardware; all None but the converter in high precision.

    "recipes", the recipes by pattern, "schedule", its entries in words, and "guard", its change in words, are present
    only if there are any.

    Raises:
        ConfigError: for any wrong setting in the section of a converter of this run.
    """
    names = job_config.model.converters
    if problem := conflict_of_converters(names):
        raise ConfigError(f"model.converters = {names!r} {problem}")
    converters = {kind.name: kind.from_job(job_config) for kind in TITAN_CONVERTERS if kind.name in names}
    active = quantizing_among(names)
    if not active:
        return {"converter": "none", **dict.fromkeys(_FACTS)}
    converter = converters[active[0]]
    by_pattern = converter.recipe_by_pattern
    settings = {
        "converter": converter.name,
        **{key: getattr(converter, key, None) for key in _FACTS},
        **switches_in_effect([converter.default_recipe, *by_pattern.values()]),
        "recipe": converter.default_recipe.name,
        "mode": _mode_of(converter),
    }
    section = job_config.mxnorm
    if entries := schedule_of(section, job_config.training.steps):
        settings["schedule"] = [str(entry) for entry in entries]
    if fallback := fallback_of(section, section.guard):
        settings["guard"] = str(fallback)
    if by_pattern:
        settings["recipes"] = {pattern: recipe.name for pattern, recipe in by_pattern.items()}
    return settings


class _TitanConverter:
    """One of mxtrain's converters, with the interface of TorchTitan's ``ModelConverter``."""

    name: str
    kind: type[Converter]
    section: str
    """The table of the TOML with its settings, which have the names of the converter's fields"""

    def __init__(self, job_config, parallel_dims):
        self.converter = self.from_job(job_config)

    @classmethod
    def from_job(cls, job_config) -> Converter:
        """The converter with the settings of the job config.

        Raises:
            ConfigError: for a wrong setting.
        """
        if not hasattr(job_config, cls.section):
            raise ConfigError(
                f'job.custom_config_module = "mxtrain.titan.job_config" is missing: it declares the [{cls.section}] '
                "section"
            )
        section, names = getattr(job_config, cls.section), [setting.name for setting in fields(cls.kind)]
        settings = {name: getattr(section, name) for name in names if name != "seed"}
        if "seed" in names:
            settings["seed"] = DEFAULT_SEED if job_config.debug.seed is None else job_config.debug.seed
        return cls.kind(**settings)

    def convert(self, model: nn.Module) -> None:
        plan = self.apply_to(model)
        allow_kinds(model)
        note_conversion(self._description(), plan.headline, plan.details)

    def apply_to(self, model: nn.Module) -> Plan:
        """Convert one of TorchTitan's language models in place, and return the plan that was carried out."""
        try:
            return apply(self.converter, model, _example_inputs(model))
        except ConfigError as error:
            is_setting = setting_in(str(error)) in [setting.name for setting in fields(self.converter)]
            raise ConfigError(f"{self.section}.{error}") if is_setting else error from None

    def _description(self) -> str:
        """The converter in a few words, for the terminal."""
        return self.name

    def post_optimizer_hook(self, model) -> None:
        """Does nothing: weights are cast in every forward, or before the first one of a step."""


class TitanMXLinear(_TitanConverter):
    """``mx_linear``, with the settings of the section [mxnorm] that concern linears."""

    name = "mx_linear"
    kind = MXLinearConverter
    section = "mxnorm"

    def __init__(self, job_config, parallel_dims):
        super().__init__(job_config, parallel_dims)
        section = job_config.mxnorm
        self.diagnostics = section.diagnostics
        settings = active_settings(job_config)
        self.entries = schedule_of(section, job_config.training.steps)
        self.fallback = fallback_of(section, section.guard)
        reason = mode_reason(settings["mode"], utils.device_type)
        logger.info(f"{self.name}: {settings}; mode {settings['mode']}: {reason}")

    def apply_to(self, model: nn.Module) -> Plan:
        plan = super().apply_to(model)
        note_norms(model, plan.norms)
        if self.entries or self.fallback:
            attach_schedule(model, plan.norms, self.entries, self.fallback, GUARD)
        return plan

    def convert(self, model: nn.Module) -> None:
        super().convert(model)
        self._check_diagnostics(model)
        if _mode_of(self.converter) == "emulated":
            # Products that need no guard stay plain ones, whose results selective activation checkpointing keeps.
            sum_bf16_products_in_fp32()
            logger.info(f"{self.name}: bf16 products have fp32 sums in this run, as those of MX tensor cores have")
        recipes = [self.converter.default_recipe, *self.converter.recipe_by_pattern.values()]
        if any(recipe.needs_draws for recipe in recipes) and not step_is_set():
            logger.warning(
                f"{self.name}: stochastic rounding takes its random bits from PyTorch's generator, because this "
                "trainer does not set the step: a resumed run will not repeat them; train with -m mxtrain.train instead"
            )

    def _check_diagnostics(self, model: nn.Module) -> None:
        if self.diagnostics.every:
            check_patterns(self.diagnostics.fqns, model)
            if not step_is_set():
                raise ConfigError(
                    f"mxnorm.diagnostics.every = {self.diagnostics.every} needs mxtrain's trainer: train with "
                    "-m mxtrain.train, or set 0"
                )

    def _description(self) -> str:
        return f"{self.name} {self.converter.default_recipe.name}{self._rms()} ({_mode_of(self.converter)})"

    def _rms(self) -> str:
        return ""


class TitanMXNorm(TitanMXLinear):
    """``mxnorm``, with the settings of the section [mxnorm]."""

    name = "mxnorm"
    kind = MXNormConverter

    def _rms(self) -> str:
        return " exact" if self.converter.estimator == "exact" else f" p={self.converter.p}"


class TitanFusedNorm(_TitanConverter):
    """``fused_norm``, with the settings of the section [fused_norm]."""

    name = section = "fused_norm"
    kind = FusedNormConverter

    def __init__(self, job_config, parallel_dims):
        super().__init__(job_config, parallel_dims)
        when_compiled = self.converter.when_compiled
        if job_config.compile.enable and "model" in job_config.compile.components:
            logger.info(
                f"{self.name}: when_compiled = {when_compiled!r}: norms in compiled layers run the "
                f"{runs_when_compiled(when_compiled)}, those outside the kernel"
            )

    @classmethod
    def from_job(cls, job_config) -> FusedNormConverter:
        try:
            return super().from_job(job_config)
        except ConfigError as error:
            is_setting = setting_in(str(error)) == "when_compiled"
            raise ConfigError(f"{cls.section}.{error}") if is_setting else error from None


class TitanFusedRMSNorm(TitanFusedNorm):
    """``fused_rmsnorm``, with the settings of the section [fused_rmsnorm]."""

    name = section = "fused_rmsnorm"
    kind = FusedRMSNormConverter


class TitanDecomposeKRouter(_TitanConverter):
    """``decompose_k_router``, with the settings of the section [decompose_k_router]."""

    name = section = "decompose_k_router"
    kind = DecomposeKRouterConverter


# Each of these alone reads its section.
KERNEL_CONVERTERS = (TitanFusedNorm, TitanFusedRMSNorm, TitanDecomposeKRouter)
TITAN_CONVERTERS = (TitanMXNorm, TitanMXLinear, *KERNEL_CONVERTERS)


def register_converters() -> None:
    """Make all converters known to TorchTitan."""
    for converter in TITAN_CONVERTERS:
        register_model_converter(converter, converter.name)


def _example_inputs(model: nn.Module) -> tuple:
    """Arguments for one forward pass of a TorchTitan language model: token ids, and the mask its attention takes."""
    tokens = torch.zeros(1, 32, dtype=torch.long)
    attn_type = getattr(getattr(model, "model_args", None), "attn_type", "sdpa")
    if attn_type == "flex":
        causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 32, 32, device="cpu")
        return tokens, causal
    if attn_type == "varlen":
        offsets = torch.tensor([0, 32], dtype=torch.int32)
        return tokens, VarlenMetadata(offsets, offsets, 32, 32)
    return (tokens,)
