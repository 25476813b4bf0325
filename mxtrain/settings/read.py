"""Read the settings of a job from its TOML file and flags, and check them."""

import sys
import traceback
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType

from mxtrain.config import find_setting, load_config, without_other_limit
from mxtrain.errors import ConfigError, setting_in
from mxtrain.settings.check import check_settings
from mxtrain.settings.fields import Field, Known, Settings, flat
from mxtrain.settings.titan import known_fields, require_all_fields, unknown

HELP_ALL = "--help-all"
HELP_FLAGS = ("-h", "--help", HELP_ALL)
OWN_MODULE = "mxtrain.titan.job_config"


def read_settings(arguments: list[str]) -> Settings:
    """Read and check the settings in ``arguments``: TorchTitan's flags, with ``--job.config_file`` among them.

    Flags override the TOML file, which may extend others. Finds every mistake that shows without the machine and the
    model.
    """
    require_all_fields()
    path = config_file(arguments)
    config = {} if path is None else load_config(path)
    search_beside(path)
    with places(arguments):
        module = _custom_module(arguments, config)
        known = known_fields(None if module in ("", OWN_MODULE) else _job_config_in(module))
        flags = flag_values(arguments, known)
        config = without_other_limit(config, Settings(known, flags).tables())
        return settings_in(config, known, flags)


def settings_in(tables: Mapping, known: Known, flags: Mapping[str, object] = MappingProxyType({})) -> Settings:
    """Check the settings in nested ``tables``, as a TOML file has them, and in ``flags``, by full name."""
    values = {name: _checked(name, value, known) for name, value in flat(tables, known)}
    values |= flags
    if older := values.get("model.tokenizer_path"):
        values["model.hf_assets_path"] = older
    settings = Settings(known, values)
    own = settings["experimental.custom_import"]
    if own and own.partition(".")[0] != __package__.partition(".")[0]:
        import_own("experimental.custom_import", own)  # it may register recipes
    check_settings(settings)
    return settings


def flag_values(words: list[str], known: Mapping[str, Field]) -> dict:
    """Return full name -> value of every flag: ``--training.steps 100``, ``--training.steps=100``.

    The rules are those of TorchTitan: the last of two flags counts, "-" and "_" in names are the same,
    ``--section.no-name`` is false. ``Field.from_words`` reads the words after a flag.
    """
    values = {}
    while words:
        flag, *words = words
        if not flag.startswith("--"):
            raise ConfigError(f"{flag!r} belongs to no flag; write --section.name VALUE")
        name, equals, text = flag[2:].partition("=")
        count = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
        given, words = ([text], words) if equals else (words[:count], words[count:])
        name = name.replace("-", "_")
        section, _, last = name.rpartition(".")
        positive = f"{section}.{last.removeprefix('no_')}"
        if name in known:
            values[name] = known[name].from_words(given)
        elif not last.startswith("no_") or positive not in known or known[positive].kind != "switch":
            raise unknown(name, known)
        elif given:
            raise ConfigError(f"{positive} takes no value after --{positive.replace('.', '.no-')}")
        else:
            values[positive] = False
    return values


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
    return any(word in HELP_FLAGS for word in arguments)


def config_file(arguments: list[str]) -> str | None:
    return _word_after("job.config_file", arguments)


def import_own(setting: str, module: str) -> ModuleType:
    """Import a user's ``module``, which ``setting`` names."""
    try:
        return import_module(module)
    except Exception as error:  # whatever the user's module raises
        what = " ".join(f"{type(error).__name__}: {error}".split())
        frame = traceback.extract_tb(error.__traceback__)[-1]
        # The import system names the place in its message, or has none.
        place = "" if frame.filename.startswith("<frozen") else f" ({frame.filename}, line {frame.lineno})"
        raise ConfigError(f"{setting} = {module!r} cannot be imported: {what}{place}") from error


def search_beside(config: str | None) -> None:
    """Let Python also import modules from the current folder and from the folder of the file ``config``.

    What is installed comes first: a user's "datasets.py" must not stand in for the package that TorchTitan imports.
    """
    for folder in (Path.cwd(), *([Path(config).absolute().parent] if config else [])):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def _custom_module(arguments: list[str], config: dict) -> str:
    flag = _word_after("job.custom_config_module", arguments)
    job = config.get("job", {})
    module = job.get("custom_config_module", "") if isinstance(job, dict) else ""
    return flag or (module if isinstance(module, str) else "")


def _job_config_in(module: str) -> type:
    job_config = getattr(import_own("job.custom_config_module", module), "JobConfig", None)
    if not is_dataclass(job_config):
        raise ConfigError(f"job.custom_config_module = {module!r} has no class JobConfig that is a dataclass")
    return job_config


def _word_after(name: str, arguments: list[str]) -> str | None:
    for word, following in zip(arguments, [*arguments[1:], None]):
        flag, equals, value = word.partition("=")
        if flag.replace("-", "_") == f"__{name}":
            return value if equals else following
    return None


def _checked(name: str, value: object, known: Mapping[str, Field]) -> object:
    if name in known:
        return known[name].checked(value)
    if any(other.startswith(f"{name}.") for other in known):
        raise ConfigError(f"{name} = {value!r} is not a table; write [{name}] and its settings below")
    raise unknown(name, known, is_table=isinstance(value, dict))
