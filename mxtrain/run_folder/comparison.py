"""The file ``comparison.json`` in a folder of paired runs: which runs belong to it, and how each of them ended."""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mxtrain.errors import ConfigError
from mxtrain.files import os_errors_as, replace_file
from mxtrain.json_toml import read_json

COMPARISON_FILE = "comparison.json"
SET_ASIDE = "set_aside"
"""Folder inside of a comparison for runs that could not go on and were started again"""


@dataclass(frozen=True)
class PairedRun:
    """One run of a comparison."""

    name: str
    """Of its folder inside of the comparison's folder"""
    variant: str
    """Runs of one variant differ in seed and learning rate only"""
    arguments: list[str]
    """Config and flags of 'mxtrain train', without the folder"""
    config_sha256: str
    """Hash of what the config file held"""
    status: int | None = None
    """Exit status of the last start; 0: finished, None: has not ended"""
    gpus: int = 1
    """GPUs (on a CPU: processes) of its next start; of its last one if it has finished"""
    directory: str = ""
    """Where the run was planned, and is done: paths in ``arguments`` may be relative to it"""

    @property
    def working_directory(self) -> str:
        """``directory``, or the current one if that is gone or not known."""
        return self.directory if os.path.isdir(self.directory) else os.getcwd()


def read_comparison(folder: Path) -> dict[str, PairedRun]:
    """Return the runs of the comparison in ``folder`` by name; empty if there is none.

    Raises ConfigError if the file cannot be read or is damaged.
    """
    path = folder / COMPARISON_FILE
    try:
        runs = [PairedRun(**row) for row in read_json(path, kind=list)]
        if any(not isinstance(getattr(run, name), str) for run in runs for name in ("name", "variant")):
            raise TypeError("a name is not a string")
    except FileNotFoundError:
        return {}
    except TypeError as error:
        names = ", ".join(field.name for field in fields(PairedRun))
        raise ConfigError(f"{path} is damaged: it is not a JSON list of runs with {names}") from error
    return {run.name: run for run in runs}


def write_comparison(folder: Path, runs: dict[str, PairedRun]) -> None:
    """Write the runs of a comparison. Raises ConfigError if that fails."""
    content = json.dumps([asdict(run) for run in runs.values()], indent=1) + "\n"
    with os_errors_as(f"{folder / COMPARISON_FILE} cannot be written"):
        replace_file(folder / COMPARISON_FILE, content.encode())
