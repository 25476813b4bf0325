"""The folder in which mxtrain keeps results for later runs."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $MXTRAIN_CACHE if it is set, else ~/.cache/mxtrain. Does not create the folder."""
    return Path(os.environ.get("MXTRAIN_CACHE") or "~/.cache/mxtrain").expanduser()
