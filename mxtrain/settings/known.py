"""Every setting: mxtrain's and TorchTitan's, and that of a user's module."""

from dataclasses import replace
from functools import cache, reduce

from pydantic_core import to_jsonable_python

from mxtrain.settings.fields import Field, Settings, fields_of
from mxtrain.settings.sections import JobConfig
from mxtrain.settings.titan import titan_fields


@cache
def own_fields() -> dict[str, Field]:
    """The settings that mxtrain declares, by full name."""
    return fields_of(JobConfig, own=True)


def known_fields(custom: type | None = None) -> dict[str, Field]:
    """Every setting by full name.

    Args:
        custom: a job config with other settings, such as the user's.
    """
    known = titan_fields() | own_fields()
    others = fields_of(custom) if custom is not None else {}
    same = {name: replace(field, resume=known[name].resume) for name, field in others.items() if name in known}
    return known | others | same


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
