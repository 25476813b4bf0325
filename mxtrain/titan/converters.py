"""The model converters ``mxnorm``, ``mx_linear``, ``fused_rmsnorm`` and ``decompose_k_router`` for TorchTitan."""

import torch
import torch.nn as nn
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.models.attention import VarlenMetadata
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from mxtrain.conversion.convert import convert
from mxtrain.errors import ConfigError, require_one_of
from mxtrain.nn.fused_rms_norm import WHEN_COMPILED, runs_when_compiled
from mxtrain.ops.hardware import describe_modes, resolve_mode
from mxtrain.recipes.parse import SWITCHES, get_recipes, switches_in_effect
from mxtrain.recipes.rms_estimate import RMSEstimate
from mxtrain.titan.terminal import note_conversion

SWAPPING_CONVERTERS = ("mxnorm", "mx_linear")
# What signs and random bits follow from where debug.seed is unset.
DEFAULT_SEED = 0
# Fields of the section [mxnorm], of run.json, and arguments of ``mxtrain.convert``.
_KEYS = ("recipe", "p", "estimator", *SWITCHES, "mode", "eps")


def active_settings(job_config) -> dict[str, str | int | float | dict[str, str] | None]:
    """The numerics of a run, with ``mode`` resolved for this hardware; all None but the converter in high precision.

    Recipes by name are in it, as "recipes", only if there are any.

    Raises:
        ConfigError: for any wrong setting in the section of a converter of this run.
    """
    if "fused_rmsnorm" in job_config.model.converters:
        when_compiled = _section(job_config, "fused_rmsnorm").when_compiled
        require_one_of("fused_rmsnorm.when_compiled", when_compiled, WHEN_COMPILED)
    active = [name for name in job_config.model.converters if name in SWAPPING_CONVERTERS]
    if not active:
        return {"converter": "none", **dict.fromkeys(_KEYS)}
    if len(active) > 1:
        raise ConfigError(f"model.converters = {job_config.model.converters!r}: choose one of {active}")
    s = _section(job_config, "mxnorm")
    recipe, by_pattern = get_recipes(s.recipe, s.recipes, **_switches(s))
    RMSEstimate.for_recipe(recipe.fprop, s.p, s.estimator, 0.0 if s.eps is None else s.eps)
    recipes = [recipe, *by_pattern.values()]
    settings = {"converter": active[0], **{key: getattr(s, key) for key in _KEYS}}
    settings.update(switches_in_effect(recipes), recipe=recipe.name)
    settings["mode"] = resolve_mode(s.mode, utils.device_type)
    if by_pattern:
        settings["recipes"] = {pattern: its_recipe.name for pattern, its_recipe in by_pattern.items()}
    if active[0] == "mx_linear":
        # Only the norm has these.
        settings.update(p=None, estimator=None, eps=None)
    return settings


def _switches(section) -> dict:
    """What the section [mxnorm] sets of a recipe's switches."""
    return {key: getattr(section, key) for key in SWITCHES}


def _section(job_config, name: str):
    if not hasattr(job_config, name):
        raise ConfigError(
            f'job.custom_config_module = "mxtrain.titan.job_config" is missing: it declares the [{name}] section'
        )
    return getattr(job_config, name)


class _Converter:
    """Validates its settings when built, swaps modules in ``convert``; ``name`` says which swap."""

    name: str

    def __init__(self, job_config, parallel_dims):
        self.settings = active_settings(job_config)
        self.section = _section(job_config, "mxnorm")
        self.seed = DEFAULT_SEED if job_config.debug.seed is None else job_config.debug.seed
        reason = next(s.reason for s in describe_modes(utils.device_type) if s.mode == self.settings["mode"])
        logger.info(f"{self.name}: {self.settings}; mode {self.settings['mode']}: {reason}")

    def convert(self, model: nn.Module) -> None:
        s = self.settings
        norm_settings = {} if s["p"] is None else {"p": s["p"], "estimator": s["estimator"], "eps": s["eps"]}
        report = convert(
            model,
            self.name,
            recipe=self.section.recipe,
            recipes=self.section.recipes,
            mode=s["mode"],
            seed=self.seed,
            **_switches(self.section),
            filter_fqns=self.section.filter_fqns,
            example_inputs=_example_inputs(model),
            **norm_settings,
        )
        p = "" if s["p"] is None else f" p={s['p']}"
        note_conversion(f"{self.name} {s['recipe']}{p} ({s['mode']})", *str(report).split("\n", 1))

    def post_optimizer_hook(self, model) -> None:
        """Nothing to do: every cast is made from current values."""


class MXNormConverter(_Converter):
    """RMSNorm and the linears it feeds become MXNorm and MXNormLinear, the other linears MXLinear."""

    name = "mxnorm"


class MXLinearConverter(_Converter):
    """Every linear becomes MXLinear; norms stay."""

    name = "mx_linear"


class FusedRMSNormConverter:
    """Every RMSNorm that no other converter takes becomes a FusedRMSNorm."""

    name = "fused_rmsnorm"

    def __init__(self, job_config, parallel_dims):
        active_settings(job_config)  # for its checks
        self.settings = s = _section(job_config, self.name)
        if job_config.compile.enable and "model" in job_config.compile.components:
            logger.info(
                f"{self.name}: when_compiled = {s.when_compiled!r}: norms in compiled layers run the "
                f"{runs_when_compiled(s.when_compiled)}, those outside the kernel"
            )

    def convert(self, model: nn.Module) -> None:
        s = self.settings
        report = convert(model, self.name, filter_fqns=s.filter_fqns, when_compiled=s.when_compiled)
        note_conversion(self.name, *str(report).split("\n", 1))

    def post_optimizer_hook(self, model) -> None:
        """Nothing to do: the norm computes with its weight as it is."""


class DecomposeKRouterConverter:
    """The gate of every router becomes a DecomposeKRouter."""

    name = "decompose_k_router"

    def __init__(self, job_config, parallel_dims):
        self.filter_fqns = _section(job_config, self.name).filter_fqns

    def convert(self, model: nn.Module) -> None:
        report = convert(model, self.name, filter_fqns=self.filter_fqns)
        note_conversion(self.name, *str(report).split("\n", 1))

    def post_optimizer_hook(self, model) -> None:
        """Nothing to do: the gate computes with its weight as it is."""


def _example_inputs(model: nn.Module) -> tuple:
    """Arguments for one forward pass of a TorchTitan language model: token ids, and the mask its attention asks for."""
    tokens = torch.zeros(1, 32, dtype=torch.long)
    attn_type = getattr(getattr(model, "model_args", None), "attn_type", "sdpa")
    if attn_type == "flex":
        causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 32, 32, device="cpu")
        return tokens, causal
    if attn_type == "varlen":
        offsets = torch.tensor([0, 32], dtype=torch.int32)
        return tokens, VarlenMetadata(offsets, offsets, 32, 32)
    return (tokens,)


def register_converters() -> None:
    """Make all converters known to TorchTitan."""
    for converter in (MXNormConverter, MXLinearConverter, FusedRMSNormConverter, DecomposeKRouterConverter):
        register_model_converter(converter, converter.name)
