"""Train with TorchTitan's Trainer. Configs may extend one another, and mistakes are found before anything is built."""

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
from torchtitan.train import Trainer

from mxtrain.analysis import closing_summary
from mxtrain.config import dump_config, load_config
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError, require_one_of
from mxtrain.rng.rounding_position import set_rounding_step
from mxtrain.titan import terminal
from mxtrain.titan.converters import active_settings
from mxtrain.titan.job_config import JobConfig

FIRST_WORD_SECONDS = 3.0


class _Trainer(Trainer):
    """TorchTitan's trainer that sets the step and the microbatch for stochastic rounding.

    Both follow from the trainer's own step, so a resumed run draws the same random bits as an uninterrupted run.
    """

    def train_step(self, data_iterator):
        self._microbatch = 0
        super().train_step(data_iterator)

    def forward_backward_step(self, **kwargs):
        set_rounding_step(self.step, self._microbatch)
        self._microbatch += 1
        return super().forward_backward_step(**kwargs)


class _ConfigManager(ConfigManager):
    """TorchTitan's manager that also reads ``extends`` in TOML files and always has mxtrain's sections."""

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
        # TorchTitan warns about an hf_assets_path that does not exist, and mxtrain allows an empty one.
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
    """Parse command-line arguments into TorchTitan's job config, and check it.

    Raises:
        ConfigError: for every mistake that shows without building the model or reading data.
    """
    job_config = _ConfigManager().parse_args(args)
    check_job_config(job_config)
    return job_config


def check_job_config(job_config) -> None:
    """Raise ConfigError for a mistake in ``job_config``, and remove empty names from its converters."""
    if isinstance(job_config.model.converters, str):  # TorchTitan does not check types in TOML files
        raise ConfigError(f"model.converters = {job_config.model.converters!r} is not a list")
    # "--model.converters=" means no converter, but parses as one empty name.
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
            f"validation.seq_len = {validation.seq_len} is more than training.seq_len = {training.seq_len}, the "
            "number of positions in the model; allowed is that or less"
        )


def non_default_values(config, default=None) -> dict:
    """Return the fields of a config dataclass that differ from its defaults, as nested tables for a TOML file."""
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
    """Write every setting that differs from its default, flags included, to ``config.toml`` in the run's folder."""
    values = non_default_values(job_config)
    values.get("job", {}).pop("config_file", None)
    dump_config(values, Path(job_config.job.dump_folder) / "config.toml")


def train(args: list[str], verbose: bool) -> None:
    """Train a model, and end with a summary of the run.

    Args:
        args: TorchTitan's command-line flags, with ``--job.config_file`` among them.
        verbose: show all lines of TorchTitan's log on the terminal.

    Raises:
        ConfigError: for a mistake in the settings.
    """
    job_config = parse_job_config(args)
    folder = Path(job_config.job.dump_folder)
    terminal.start(folder, verbose)
    trainer = None
    try:
        trainer = _Trainer(job_config)
        is_first = torch.distributed.get_rank() == 0
        if is_first:
            _write_resolved_config(job_config)
        if job_config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
            terminal.note("Created seed checkpoint")
            return
        trainer.train()
    finally:
        if trainer is not None:
            trainer.close()
        terminal.finish()
    if is_first:
        print(closing_summary(folder), flush=True)


def main(args: list[str], verbose: bool) -> None:
    """Run ``train`` in a worker process and exit. A ConfigError becomes one line on stderr, without a traceback."""
    status = 0
    try:
        train(args, verbose)
    except ConfigError as error:
        status = CONFIG_ERROR_STATUS
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # Most mistakes are found by all workers. The first one reports, and torchrun stops the others meanwhile.
            time.sleep(FIRST_WORD_SECONDS)
        print(f"mxtrain: error: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    # Not after an interrupt or another exception: this rank may be alone, and would wait for the others.
    if status in (0, CONFIG_ERROR_STATUS) and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(status)
