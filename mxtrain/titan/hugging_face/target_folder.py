"""The folder that a command writes: it does not exist before, and is complete once it exists."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mxtrain.data.cache_folders import new_folder
from mxtrain.errors import ConfigError
from mxtrain.files import reason


def require_new(target: Path, argument: str) -> None:
    """Raise ConfigError if ``target`` exists and is not an empty folder, or is the current folder.

    Args:
        argument: name of the command's argument that gives the folder, with which messages begin.
    """
    try:
        is_empty = target.is_dir() and not any(target.iterdir())
    except OSError as error:
        raise ConfigError(f"{argument} = {str(target)!r} cannot be read: {reason(error)}") from error
    if is_empty:
        if target.resolve() == Path.cwd():
            # The complete folder would take its place, and leave the user's shell in a folder that is gone.
            raise ConfigError(f"{argument} = {str(target)!r} is the folder that you are in; choose another folder")
        return
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{argument} = {str(target)!r} exists; choose another folder, or remove it")


@contextmanager
def new_target(target: Path, argument: str) -> Iterator[Path]:
    """Yield an empty folder beside ``target``, which gets that name at the end. After an exception nothing is left.

    A link to an empty folder stays: the folder that it names is filled.

    Raises:
        ConfigError: as ``require_new``, and if the folder cannot be written. An OSError in the context becomes one,
            too: its message names the target, or the file elsewhere that could not be read.
    """
    require_new(target, argument)
    place = target.resolve()

    def appeared(_: Path) -> bool:
        raise ConfigError(f"{argument} = {str(target)!r} was written by another process meanwhile")

    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(place, appeared) as folder:
            try:
                yield folder
            except OSError as error:
                if error.filename is None or folder in Path(str(error.filename)).parents:
                    raise
                raise ConfigError(f"{error.filename} cannot be read: {reason(error)}") from error
    except OSError as error:
        raise ConfigError(f"{argument} = {str(target)!r} cannot be written: {reason(error)}") from error
