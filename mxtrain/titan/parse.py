"""TorchTitan's job config from the settings of a job, and back."""

from dataclasses import fields
from functools import reduce

from pydantic_core import to_jsonable_python
from torchtitan.config import ConfigManager

from mxtrain.settings.fields import Settings, fields_of
from mxtrain.settings.help import settings_help
from mxtrain.settings.known import known_fields
from mxtrain.settings.read import asks_for_help, read_settings
from mxtrain.settings.sections import JobConfig
from mxtrain.titan.check_job import check_model


class _ConfigManager(ConfigManager):
    """TorchTitan's manager with settings that mxtrain has read."""

    def job_config_of(self, tables: dict):
        self.config = self._dict_to_dataclass(self._maybe_add_custom_config([], tables), tables)
        self._validate_config()
        return self.config

    def _maybe_add_custom_config(self, args, toml_values):
        config_cls = super()._maybe_add_custom_config(args, toml_values)
        has_mxtrain = any(f.name == "mxnorm" for f in fields(config_cls))
        return config_cls if has_mxtrain else self._merge_configs(config_cls, JobConfig)

    def _validate_config(self):
        # TorchTitan warns about an hf_assets_path that does not exist, and mxtrain allows an empty one.
        model = self.config.model
        if model.hf_assets_path or model.tokenizer_path or self.config.experimental.custom_args_module:
            super()._validate_config()


def parse_job_config(args: list[str]):
    """Parse command-line arguments into TorchTitan's job config, and check it. Prints mxtrain's help for ``--help``.

    Raises:
        ConfigError: for every mistake that shows without the machine, building the model or reading data.
    """
    if asks_for_help(args):
        print(settings_help(args))
        raise SystemExit(0)
    settings = read_settings(args)
    check_model(settings.values)
    return job_config_of(settings)


def job_config_of(settings: Settings):
    """Return TorchTitan's job config with the values of ``settings``."""
    return _ConfigManager().job_config_of(settings.tables())


def settings_of(job_config) -> Settings:
    """The values of a job config by the full names of its settings."""
    kind = type(job_config)
    known = {name: field for name, field in known_fields(kind).items() if name in fields_of(kind)}
    return Settings(known, {name: reduce(getattr, name.split("."), job_config) for name in known})


def resolved_settings(job_config) -> dict:
    """Return every setting that differs from its default, flags included, as nested tables for a TOML file.

    Without the names of the config file and of the run's folder: a run of these settings must not write into it. With
    ``mxnorm.diagnostics.every = 0`` beside other settings of diagnostics, which are refused without it.
    """
    settings = settings_of(job_config)
    left_out = ("job.config_file", "job.dump_folder")
    values = {
        name: to_jsonable_python(settings[name])  # paths, tuples and sets of a user's own section
        for name in settings.known
        if settings.changed(name) and settings[name] is not None and name not in left_out
    }
    if any(name.startswith("mxnorm.diagnostics.") for name in values):
        values.setdefault("mxnorm.diagnostics.every", 0)
    return Settings(settings.known, values).tables()
