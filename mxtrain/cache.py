"""Where mxtrain keeps what is worth computing once."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$MXTRAIN_CACHE, or else ~/.cache/mxtrain; it need not exist."""
    return Path(os.environ.get("MXTRAIN_CACHE") or "~/.cache/mxtrain").expanduser()
