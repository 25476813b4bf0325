"""Train with TorchTitan's Trainer: configs may extend one another, and mistakes are told before anything is built."""

import os
import signal
import sys
import time
from dataclasses import fields, is_dataclass
from pathlib import Path

import torch
from torchtitan.config import ConfigManager
from torchtitan.models import _supported_models
from torchtitan.protocols import model_converter, train_spec
from torchtitan.tools.logging import init_logger, logger
from torchtitan.train import Trainer

from mxtrain.config import dump_config, load_config
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError, require_one_of
from mxtrain.rng.rounding_position import set_rounding_step
from mxtrain.titan.converters import active_settings
from mxtrain.titan.job_config import JobConfig

FIRST_WORD_SECONDS = 3.0


class _Trainer(Trainer):
    """TorchTitan's trainer, which tells stochastic rounding the step and the microbatch.

    Both follow from the trainer's own step, so a resumed run draws the random bits that it would have drawn.
    """

    def train_step(self, data_iterator):
        self._microbatch = 0
        super().train_step(data_iterator)

    def forward_backward_step(self, **kwargs):
        set_rounding_step(self.step, self._microbatch)
        self._microbatch += 1
        return super().forward_backward_step(**kwargs)


class _ConfigManager(ConfigManager):
    """TorchTitan's manager, with ``extends`` in TOML files and mxtrain's sections always there."""

    def _maybe_load_toml(self, args):
        path = _config_file(args)
        return None if path is None else load_config(path)

    def _maybe_add_custom_config(self, args, toml_values):
        config_cls = super()._maybe_add_custom_config(args, toml_values)
        has_mxtrain = any(f.name == "mxnorm" for f in fields(config_cls))
        return config_cls if has_mxtrain else self._merge_configs(config_cls, JobConfig)

    def _dict_to_dataclass(self, cls, data):
        if is_dataclass(cls):
            known = [f.name for f in fields(cls)]
            for name in data:
                if name not in known:
                    section = "top level" if issubclass(cls, JobConfig) or "job" in known else cls.__name__
                    raise ConfigError(f"config: {name!r} is not a field of {section}; allowed are: {', '.join(known)}")
        return super()._dict_to_dataclass(cls, data)

    def _validate_config(self):
        # TorchTitan warns of an hf_assets_path that does not exist; an empty one is no mistake here.
        model = self.config.model
        if model.hf_assets_path or model.tokenizer_path or self.config.experimental.custom_args_module:
            super()._validate_config()


def _config_file(args: list[str]) -> str | None:
    for i, arg in enumerate(args):
        key, equals, value = arg.partition("=")
        if key in ("--job.config_file", "--job.config-file"):
            if equals:
                return value
            if i + 1 < len(args):
                return args[i + 1]
    return None


def parse_job_config(args: list[str]):
    """TorchTitan's job config from command-line arguments, checked.

    Raises:
        ConfigError: for anything wrong that can be seen without building the model or reading data.
    """
    job_config = _ConfigManager().parse_args(args)
    if isinstance(job_config.model.converters, str):  # TorchTitan does not check the types in a TOML file
        raise ConfigError(f"model.converters = {job_config.model.converters!r} is not a list")
    # "--model.converters=" parses as one empty name; it means none.
    job_config.model.converters = [name for name in job_config.model.converters if name]
    models = sorted(_supported_models | train_spec._extra_train_specs.keys())
    require_one_of("model.name", job_config.model.name, models)
    flavors = train_spec.get_train_spec(job_config.model.name).model_args
    require_one_of("model.flavor", job_config.model.flavor, flavors)
    for name in job_config.model.converters:
        require_one_of("model.converters", name, model_converter._registry_model_converter_cls)
    active_settings(job_config)
    validation, training = job_config.validation, job_config.training
    if validation.enable and validation.seq_len > training.seq_len:
        raise ConfigError(
            f"validation.seq_len = {validation.seq_len} is more than training.seq_len = {training.seq_len}, which the "
            "model's positions are made for; allowed is that or less"
        )
    return job_config


def non_default_values(config, default=None) -> dict:
    """The fields of a config dataclass that differ from its defaults, as nested tables that a TOML file can hold."""
    default = type(config)() if default is None else default
    values = {}
    for f in fields(config):
        value, usual = getattr(config, f.name), getattr(default, f.name)
        if is_dataclass(value):
            value = non_default_values(value, usual)
            if value:
                values[f.name] = value
        elif value != usual and value is not None:
            values[f.name] = list(value) if isinstance(value, tuple) else value
    return values


def _write_resolved_config(job_config) -> None:
    """Write ``config.toml`` into the run's folder: every setting that is not a default, flags included."""
    values = non_default_values(job_config)
    values.get("job", {}).pop("config_file", None)
    folder = Path(job_config.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    dump_config(values, folder / "config.toml")


def train(args: list[str]) -> None:
    """Train as the command-line arguments ``args`` say (TorchTitan's flags, ``--job.config_file`` among them).

    Raises:
        ConfigError: for a mistake in the settings.
    """
    init_logger()
    job_config = parse_job_config(args)
    trainer = None
    try:
        trainer = _Trainer(job_config)
        if torch.distributed.get_rank() == 0:
            _write_resolved_config(job_config)
        if job_config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
            logger.info("Created seed checkpoint")
        else:
            trainer.train()
    finally:
        if trainer is not None:
            trainer.close()


def main() -> None:
    """Entry point of every worker process. A ConfigError becomes one line on stderr, without a traceback."""
    status = 0
    try:
        train(sys.argv[1:])
    except ConfigError as error:
        status = CONFIG_ERROR_STATUS
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # A mistake is most often found by all workers. The first one tells it, and torchrun ends the others
            # before they repeat it.
            time.sleep(FIRST_WORD_SECONDS)
        print(f"mxtrain: error: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    # Not after an interrupt or any other exception: this rank may be the only one, and the others would be waited for.
    if status in (0, CONFIG_ERROR_STATUS) and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(status)
