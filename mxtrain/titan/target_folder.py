"""The folder that a command writes: it does not exist before, and is complete once it exists."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mxtrain.data.cache_folders import new_folder
from mxtrain.errors import ConfigError
from mxtrain.run_folder.files import reason


def require_new(target: Path, argument: str) -> None:
    """Raise ConfigError if ``target`` exists and is not an empty folder.

    Args:
        argument: name of the command's argument that gives the folder, with which messages begin.
    """
    try:
        if target.is_dir() and not any(target.iterdir()):
            return
    except OSError as error:
        raise ConfigError(f"{argument} = {str(target)!r} cannot be read: {reason(error)}") from error
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{argument} = {str(target)!r} exists; choose another folder, or remove it")


@contextmanager
def new_target(target: Path, argument: str) -> Iterator[Path]:
    """Yield an empty folder beside ``target``, which gets that name at the end. After an exception nothing is left.

    Raises:
        ConfigError: as ``require_new``, and if the folder cannot be written.
    """
    require_new(target, argument)

    def appeared(_: Path) -> bool:
        raise ConfigError(f"{argument} = {str(target)!r} was written by another process meanwhile")

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(target, appeared) as folder:
            yield folder
    except OSError as error:
        raise ConfigError(f"{argument} = {str(target)!r} cannot be written: {reason(error)}") from error
