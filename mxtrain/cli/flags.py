"""Reads single settings from a config and TorchTitan's flags, before TorchTitan itself parses them all."""

import re
from dataclasses import fields

from mxtrain.errors import ConfigError
from mxtrain.run_folder.start import CheckpointSettings


def flag_value(flags: list[str], name: str) -> str | None:
    """Return the value of the last ``--name`` in TorchTitan's flags, or None.

    Takes ``_`` or ``-``, and ``=`` or a space.
    """
    found = None
    for i, flag in enumerate(flags):
        key, equals, value = flag.partition("=")
        if _normal(key) == f"__{name}":
            found = value if equals else flags[i + 1] if i + 1 < len(flags) else ""
    return found


def switch_value(flags: list[str], section: str, field: str) -> bool | None:
    """Return whether ``--section.field`` or ``--section.no-field`` comes last in TorchTitan's flags, or None."""
    values = {f"__{section}.{field}": True, f"__{section}.no_{field}": False}
    found = [values[_normal(flag)] for flag in flags if _normal(flag) in values]
    return found[-1] if found else None


def _normal(flag: str) -> str:
    return flag.replace("-", "_")


def section(config: dict, name: str) -> dict:
    """Return a table of the TOML file; empty if it is missing or no table, which the worker reports."""
    table = config.get(name, {})
    return table if isinstance(table, dict) else {}


def checkpoint_settings(config: dict, flags: list[str]) -> CheckpointSettings:
    """Return the settings of ``[checkpoint]`` that decide where a run starts.

    Args:
        config: the tables of the TOML file.
        flags: TorchTitan's flags, which override the file.

    Raises:
        ConfigError: for a value of a wrong type.
    """
    table, values = section(config, "checkpoint"), {}
    for field in fields(CheckpointSettings):
        value = table.get(field.name, field.default)
        if field.type is bool:
            switch = switch_value(flags, "checkpoint", field.name)
            value = value if switch is None else switch
        elif (text := flag_value(flags, f"checkpoint.{field.name}")) is not None:
            value = _parsed(text, field.type)
        if not isinstance(value, field.type):
            raise ConfigError(f"checkpoint.{field.name} = {value!r} is not of the type {_name(field.type)}")
        values[field.name] = value
    return CheckpointSettings(**values)


def _parsed(text: str, wanted: type) -> str | int | list | None:
    """Return the value of a flag as TorchTitan's parser does. A text that is not of the type ``wanted`` stays."""
    if wanted is int:
        return int(text) if re.fullmatch("-?[0-9]+", text) else text
    if wanted == list | tuple:
        return text.split(",")
    return None if text == "None" and wanted == str | None else text


def _name(wanted: type) -> str:
    return getattr(wanted, "__name__", str(wanted))
