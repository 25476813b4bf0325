"""The folder in which mxtrain keeps results for later runs."""

import os
from pathlib import Path

from mxtrain.errors import ConfigError
from mxtrain.files import local_path


def cache_folder() -> Path:
    """Return $MXTRAIN_CACHE if it is set, else ~/.cache/mxtrain. Does not create the folder.

    Raises ConfigError for a user without a home, and for an address.
    """
    folder = os.environ.get("MXTRAIN_CACHE") or "~/.cache/mxtrain"
    try:
        return Path(local_path(folder)).expanduser()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"$MXTRAIN_CACHE: {folder} cannot be found ({error}); set it to a folder") from error
