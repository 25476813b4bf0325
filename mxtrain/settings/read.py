"""Read the settings of a job from its TOML file and flags, and check them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

from mxtrain.config import find_setting, load_config, without_other_limit
from mxtrain.errors import ConfigError, setting_in
from mxtrain.settings.fields import Field, fields_of, unknown
from mxtrain.settings.flags import flag_values
from mxtrain.settings.model_settings import check_model_args
from mxtrain.settings.own_modules import import_own, search_beside
from mxtrain.settings.relations import check_relations
from mxtrain.settings.sections import JobConfig
from mxtrain.settings.titan_fields import ALLOWED, titan_job_config
from mxtrain.settings.values import Settings

CONFIG_FLAGS = ("--job.config_file", "--job.config-file")
HELP_FLAGS = ("-h", "--help")
OWN_MODULE = "mxtrain.titan.job_config"


def read_settings(arguments: list[str]) -> Settings:
    """Read and check the settings in ``arguments``: TorchTitan's flags, with ``--job.config_file`` among them.

    Flags override the TOML file, which may extend others.

    Raises:
        ConfigError: for any mistake that shows without PyTorch and without reading text. It names the setting, and
            the file and line where it stands.
    """
    path = config_file(arguments)
    config = {} if path is None else load_config(path)
    search_beside(path)
    with places(arguments):
        known = known_fields(_custom_module(arguments, config))
        flags = flag_values(arguments, known)
        config = without_other_limit(config, Settings(known, flags).tables())
        settings = Settings(known, {**dict(_flat(config, known)), **flags})
        check_relations(settings)
        check_model_args(settings)
    return settings


@contextmanager
def places(arguments: list[str]):
    """Add file and line to a ConfigError that begins with the name of a setting that the config file gives."""
    try:
        yield
    except ConfigError as error:
        message = str(error)
        name, path = setting_in(message), config_file(arguments)
        section, _, last = name.rpartition(".")
        flags = (f"__{name.partition('[')[0]}", f"__{section}.no_{last}")
        is_flag = any(word.partition("=")[0].replace("-", "_") in flags for word in arguments)
        found = None if path is None or is_flag else find_setting(name, Path(path))
        place = f" ({found[0]}, line {found[1]})" if found else ""
        raise ConfigError(message.removesuffix(place) + place) from None


def asks_for_help(arguments: list[str]) -> bool:
    """Whether ``-h`` or ``--help`` is among the flags: TorchTitan prints the help then."""
    return any(word in HELP_FLAGS for word in arguments)


def config_file(arguments: list[str]) -> str | None:
    """The path after ``--job.config_file``; None without that flag."""
    return _word_after(CONFIG_FLAGS, arguments)


def known_fields(custom_module: str = OWN_MODULE) -> dict[str, Field]:
    """Every setting: TorchTitan's, mxtrain's and those of the user's ``job.custom_config_module``."""
    titan = fields_of(titan_job_config())
    limited = {name: Field(name, allowed, titan[name].default) for name, allowed in ALLOWED.items()}
    custom = {} if custom_module in ("", OWN_MODULE) else fields_of(_job_config_in(custom_module))
    return {**titan, **limited, **fields_of(JobConfig), **custom}


def _custom_module(arguments: list[str], config: dict) -> str:
    flag = _word_after(("--job.custom_config_module", "--job.custom-config-module"), arguments)
    job = config.get("job", {})
    module = job.get("custom_config_module", "") if isinstance(job, dict) else ""
    return flag or (module if isinstance(module, str) else "")


def _job_config_in(module: str) -> type:
    job_config = getattr(import_own("job.custom_config_module", module), "JobConfig", None)
    setting = f"job.custom_config_module = {module!r}"
    if job_config is None:
        raise ConfigError(f"{setting} has no class JobConfig")
    if problem := _problem_with(job_config):
        raise ConfigError(f"{setting}: {problem}")
    return job_config


def _problem_with(job_config: type, section: str = "JobConfig") -> str | None:
    """What keeps TorchTitan from merging a user's class into its own."""
    if not is_dataclass(job_config):
        return f"{section} is not a dataclass: write @dataclass above it"
    for f in fields(job_config):
        name = f"{section}.{f.name}"
        if isinstance(f.type, str):
            return f"the type of {name} is a string: remove quotes and 'from __future__ import annotations'"
        if f.default is MISSING and f.default_factory is MISSING:
            return f"{name} has no default"
        if is_dataclass(f.type) and (problem := _problem_with(f.type, name)):
            return problem
    return None


def _word_after(flags: tuple[str, ...], arguments: list[str]) -> str | None:
    for word, following in zip(arguments, [*arguments[1:], None]):
        flag, equals, value = word.partition("=")
        if flag in flags:
            return value if equals else following
    return None


def _flat(tables: Mapping, known: Mapping[str, Field], section: str = "") -> Iterator[tuple[str, object]]:
    """Full name and checked value of everything in nested tables."""
    for key, value in tables.items():
        name = f"{section}.{key}".removeprefix(".")
        if name in known:
            yield name, known[name].checked(value)
        elif not any(other.startswith(f"{name}.") for other in known):
            raise unknown(name, known)
        elif isinstance(value, dict):
            yield from _flat(value, known, name)
        else:
            raise ConfigError(f"{name} = {value!r} is not a table: write [{name}] and its settings below")
