"""Parse command-line arguments and TOML files into TorchTitan's job config, and check it."""

from dataclasses import fields, is_dataclass

from torchtitan.config import ConfigManager
from torchtitan.models import _supported_models
from torchtitan.protocols import model_converter, train_spec

from mxtrain.config import load_config
from mxtrain.errors import ConfigError, require_one_of
from mxtrain.titan.converters import active_settings
from mxtrain.titan.job_config import JobConfig


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
