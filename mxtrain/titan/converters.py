"""mxtrain's converters in TorchTitan: built from the job config, applied to TorchTitan's models."""

from contextlib import contextmanager
from dataclasses import fields

import torch.nn as nn
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from mxtrain.checkpoints.terminal import note_conversion
from mxtrain.conversion.convert import apply
from mxtrain.conversion.converters import CONVERTERS
from mxtrain.conversion.plan import Plan
from mxtrain.conversion.schedule import GRAPHS, allow_graphs, attach_schedule
from mxtrain.diagnostics.recording import check_patterns
from mxtrain.errors import ConfigError, errors_begin_with, setting_in
from mxtrain.formats.gemm import sum_bf16_products_in_fp32
from mxtrain.formats.hardware import MERGED, mode_reason, resolve_mode
from mxtrain.formats.parse import SWITCHES, switches_in_effect
from mxtrain.rng.rounding import step_is_set
from mxtrain.settings.check import conflict_of_converters
from mxtrain.settings.mxnorm_section import FSDP_GATHER, diagnostics_every, quantizing_among, schedule_in
from mxtrain.titan.releases import engine

# Facts in run.json.
_FACTS = ("recipe", "p", "estimator", *SWITCHES, "mode", "eps")


def _mode_of(converter) -> str:
    with errors_begin_with("mxnorm."):
        return resolve_mode(converter.mode, utils.device_type)


def active_settings(job_config) -> dict[str, str | int | float | dict[str, str] | None]:
    """The numerics of a run, with ``mode`` resolved for this hardware. In high precision, all but "converter" are None.

    "recipes" (by pattern) and "schedule" (entries in words) are present only if the run has any.
    """
    names = job_config.model.converters
    if problem := conflict_of_converters(names):
        raise ConfigError(f"model.converters = {names!r} {problem}")
    converters = {name: TitanConverter(name, job_config).converter for name in names if name in CONVERTERS}
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
    if entries := schedule_in(job_config):
        settings["schedule"] = [str(entry) for entry in entries]
    if by_pattern:
        settings["recipes"] = {pattern: recipe.name for pattern, recipe in by_pattern.items()}
    return settings


class TitanConverter:
    """One of mxtrain's converters, with the interface of TorchTitan's ``ModelConverter``.

    The settings are the TOML table [mxnorm] for converters of linears, and the table with the converter's name for
    others. They have the names of the converter's fields.
    """

    def __init__(self, name: str, job_config, parallel_dims=None):
        self.name, kind = name, CONVERTERS[name]
        self._section = "mxnorm" if quantizing_among([name]) else name
        self._settings = [setting.name for setting in fields(kind)]
        if not hasattr(job_config, self._section):
            raise ConfigError(f"[{self._section}] needs job.custom_config_module = 'mxtrain.titan.job_config'")
        section = getattr(job_config, self._section)
        settings = {name: getattr(section, name) for name in self._settings if name != "seed"}
        if "seed" in self._settings:
            settings["seed"] = job_config.debug.seed or 0
        with self._full_names():
            self.converter = kind(**settings)

    @contextmanager
    def _full_names(self):
        """Put the section before the name of one of its settings that a ConfigError begins with."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(
                f"{self._section}.{error}" if setting_in(str(error)) in self._settings else str(error)
            ) from None

    def convert(self, model: nn.Module) -> None:
        plan = self.apply_to(model)
        blocks = getattr(model, "layers", None)
        kinds = {repr(block) for block in blocks.children()} if isinstance(blocks, nn.Module) else ()
        allow_graphs(GRAPHS * len(kinds))  # as many for every kind of block as for blocks that are all alike
        note_conversion(str(plan))

    def apply_to(self, model: nn.Module) -> Plan:
        """Convert one of TorchTitan's language models in place, and return the plan that was carried out."""
        with self._full_names():
            return apply(self.converter, model, engine().example_inputs(model))

    def post_optimizer_hook(self, model) -> None:
        """Does nothing: weights are cast in every forward, or before the first one of a step."""


class QuantizingConverter(TitanConverter):
    """``mxnorm`` or ``mx_linear``, with schedule and diagnostics."""

    def __init__(self, name: str, job_config, parallel_dims=None):
        super().__init__(name, job_config)
        self.converter.refuses_odd_sizes = True
        self._diagnostics, self._every = job_config.mxnorm.diagnostics, diagnostics_every(job_config.mxnorm)
        self._gathers_codes = job_config.mxnorm.fsdp_gather == "quantized"
        self._entries = schedule_in(job_config)
        self._job_config = job_config

    def apply_to(self, model: nn.Module) -> Plan:
        plan = super().apply_to(model)
        if self._entries:
            attach_schedule(model, plan.feeds, self._entries)
        if self._every:
            check_patterns(self._diagnostics.fqns, model)
        return plan

    def convert(self, model: nn.Module) -> None:
        settings = active_settings(self._job_config)  # not in __init__: doctor converts on machines that lack the mode
        reason = mode_reason(settings["mode"], utils.device_type)
        logger.info(f"{self.name}: {settings}; mode {settings['mode']}: {reason}")
        super().convert(model)
        if self._every and not step_is_set():
            raise ConfigError(
                f"mxnorm.diagnostics.every = {self._every} needs mxtrain's trainer; "
                "train with -m mxtrain.train, or set 0"
            )
        if self._gathers_codes and not step_is_set():
            raise ConfigError(f"{FSDP_GATHER} = 'quantized' needs mxtrain's trainer; train with -m mxtrain.train")
        if _mode_of(self.converter) in ("emulated", MERGED):
            # Products that need no guard stay plain ones, whose results selective activation checkpointing keeps.
            sum_bf16_products_in_fp32()
            logger.info(f"{self.name}: bf16 products have fp32 sums in this run, as those of MX tensor cores have")
        recipes = [self.converter.default_recipe, *self.converter.recipe_by_pattern.values()]
        if any(recipe.needs_draws for recipe in recipes) and not step_is_set():
            logger.warning(
                f"{self.name}: stochastic rounding takes its random bits from PyTorch's generator, because this "
                "trainer does not set the step, so a resumed run does not repeat them; train with -m mxtrain.train"
            )


def titan_converter(name: str, job_config, parallel_dims=None) -> TitanConverter:
    """One of mxtrain's converters by name, with the settings of a job."""
    kind = QuantizingConverter if quantizing_among([name]) else TitanConverter
    return kind(name, job_config)


def convert_on_meta(job_config, model: nn.Module) -> dict[str, Plan | None]:
    """Apply a job's converters to its model in order. Return their plans by name; None for TorchTitan's own."""
    with engine().convertible(model):
        return {
            name: titan_converter(name, job_config).apply_to(model) if name in CONVERTERS else None
            for name in job_config.model.converters
        }
