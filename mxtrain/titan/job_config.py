"""TorchTitan's job config from the settings of a job, and back.

``job.custom_config_module = "mxtrain.titan.job_config"`` names this module, whose ``JobConfig`` TorchTitan
merges into its own.
"""

from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import reduce
from importlib import import_module

from pydantic_core import to_jsonable_python
from torchtitan.config import JobConfig as TitanJobConfig

from mxtrain.settings.fields import Settings, fields_of
from mxtrain.settings.known import known_fields
from mxtrain.settings.read import read_settings
from mxtrain.settings.sections import JobConfig
from mxtrain.titan.check_job import check_model

__all__ = ["JobConfig", "job_config_of", "parse_job_config", "resolved_settings", "settings_of"]


def parse_job_config(args: list[str]):
    """Parse command-line arguments into TorchTitan's job config, and check it.

    Raises:
        ConfigError: for every mistake that shows without the machine, building the model or reading data.
    """
    settings = read_settings(args)
    check_model(settings.values)
    return job_config_of(settings)


def job_config_of(settings: Settings):
    """Return TorchTitan's job config with the values of ``settings``."""
    kind = _merged(TitanJobConfig, JobConfig)
    if module := settings["job.custom_config_module"]:
        kind = _merged(kind, import_module(module).JobConfig)
    job_config = _filled(kind, settings.tables())
    if job_config.model.tokenizer_path:  # an older name
        job_config.model.hf_assets_path = job_config.model.tokenizer_path
    return job_config


def _merged(base: type, own: type) -> type:
    """Return a dataclass with the fields of ``base`` and ``own``. Of two with one name, tables are merged, too."""
    theirs, added = {f.name: f.type for f in fields(base)}, []
    for f in fields(own):
        if is_dataclass(f.type) and is_dataclass(theirs.get(f.name)):
            kind = _merged(theirs[f.name], f.type)
            added.append((f.name, kind, field(default_factory=kind)))
        else:
            added.append((f.name, f.type, f))
    return make_dataclass(base.__name__, added, bases=(base,))


def _filled(kind: type, tables: dict):
    """Return an instance of a dataclass with the values in nested tables."""
    given = {f.name: f.type for f in fields(kind) if f.name in tables}
    return kind(**{name: _filled(t, tables[name]) if is_dataclass(t) else tables[name] for name, t in given.items()})


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
