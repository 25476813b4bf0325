"""The user's own modules: ``job.custom_config_module`` and ``experimental.custom_import``."""

import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType

from mxtrain.errors import ConfigError


def search_beside(config: str | None) -> None:
    """Let Python also import modules from the current folder and from the folder of the file ``config``.

    What is installed comes first: a user's "datasets.py" must not stand in for the package that TorchTitan imports.
    """
    for folder in (Path.cwd(), *([Path(config).absolute().parent] if config else [])):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def import_own(setting: str, module: str) -> ModuleType:
    """Import a user's ``module``, which ``setting`` names.

    Raises:
        ConfigError: the import fails. The message has the error, and the file and line that raised it.
    """
    try:
        return import_module(module)
    except Exception as error:  # whatever the user's module raises
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{setting} = {module!r} cannot be imported: {what}{_place(error)}") from error


def _place(error: Exception) -> str:
    """Where a user's module raised ``error``; empty if the import system did, which names the place or has none."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return "" if frame.filename.startswith("<frozen") else f" ({frame.filename}, line {frame.lineno})"
