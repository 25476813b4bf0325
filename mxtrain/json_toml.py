"""Reads JSON and TOML that anybody may have written: whatever is wrong with a file is one line that names it."""

import json
from pathlib import Path

import tomli

from mxtrain.errors import ConfigError
from mxtrain.files import reason


def read_json(path: Path, name: str = "", kind: type = dict):
    """Return the value in a JSON file, which has the type ``kind``. Messages call the file ``name``, or by its path.

    Raises FileNotFoundError, or ConfigError if it cannot be read, is not UTF-8 or JSON, is nested too deep to parse,
    or has another type.
    """
    value = _read(path, name or str(path), "JSON", json.loads)
    if not isinstance(value, kind):
        raise ConfigError(f"{name or path} holds {type(value).__name__}, not {kind.__name__}")
    return value


def read_toml(path: Path, name: str = "") -> dict:
    """Return the tables in a TOML file, with the arguments and errors of ``read_json``."""
    return _read(path, name or str(path), "TOML", tomli.loads)


def parse(text: str, loads=json.loads):
    """Return ``loads(text)``. Raises ValueError, also for what is nested too deep."""
    try:
        return loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _read(path: Path, name: str, language: str, loads):
    try:
        content = Path(path).read_bytes()
        return parse(content.decode("utf-8-sig"), loads)  # editors on Windows begin a file with a BOM
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{name} is not valid {language}: {error}") from error
