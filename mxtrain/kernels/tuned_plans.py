"""The user's cache of tuned settings: one JSON file per operation and kind of GPU.

Files lie in a folder named for the operation in ``mxtrain.cache.cache_folder``. ``mxtrain.kernels.tuning`` fills them.
"""

import fcntl
import functools
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mxtrain.cache import cache_folder
from mxtrain.files import replace_file
from mxtrain.json_toml import read_json
from mxtrain.kernels.plan_table import Operation, folder_name


class TunedPlan(NamedTuple):
    """What is kept for a tuned shape."""

    settings: dict[str, int | str]
    microseconds: float
    tried: int
    """Number of settings that were timed"""


def file_of(operation: Operation, gpu_name: str) -> Path:
    """The file for GPUs of this name."""
    return cache_folder() / operation.name / f"{folder_name(gpu_name)}.json"


@functools.cache
def tuned_plans(operation: Operation, gpu_name: str) -> dict[str, TunedPlan]:
    """Every shape of an operation that was tuned on a GPU of this name. The file is read once per process."""
    return _read(operation, file_of(operation, gpu_name))


def save(operation: Operation, gpu_name: str, key: str, entry: TunedPlan) -> None:
    """Add a tuned shape to the file, to which other processes may add shapes at the same time."""
    path = file_of(operation, gpu_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        entries = {**_read(operation, path), key: entry}
        texts = {key: {**entry._asdict(), "version": operation.version} for key, entry in sorted(entries.items())}
        replace_file(path, json.dumps(texts, indent=1).encode())
    tuned_plans.cache_clear()


def tuned(operation: Operation, gpu_name: str, key: str) -> tuple[tuple, str] | None:
    """(settings, reason) for a tuned shape; None if the shape is not tuned."""
    entry = tuned_plans(operation, gpu_name).get(key)
    if entry is None:
        return None
    reason = f"the fastest of {entry.tried} plans timed on this GPU, {entry.microseconds:.1f} us"
    return operation.settings(**entry.settings), reason


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of this context for as long as it lasts, unless the file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(operation: Operation, path: Path) -> dict[str, TunedPlan]:
    try:
        entries = read_json(path)
        current = {key: entry for key, entry in entries.items() if entry["version"] == operation.version}
        return {key: _checked(operation, **entry) for key, entry in current.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(f"tuned plans in {str(path)!r} are ignored: {error!r}", stacklevel=2)
        return {}


def _checked(operation: Operation, settings, microseconds, tried, version) -> TunedPlan:
    types = operation.settings.__annotations__
    if settings.keys() != types.keys():
        raise KeyError(f"fields {', '.join(settings)}: expected {', '.join(types)}")
    for value, kind in (*((settings[field], kind) for field, kind in types.items()), (tried, int)):
        if not isinstance(value, kind):
            raise TypeError(f"{value!r} is not of type {kind.__name__}")
    if not isinstance(microseconds, (int, float)):
        raise TypeError(f"{microseconds!r} is not a number")
    return TunedPlan(settings, microseconds, tried)
