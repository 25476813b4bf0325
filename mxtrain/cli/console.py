"""A process and its console: warnings of libraries, closed streams, the parser of words.

Some warnings appear while PyTorch, torchao and TorchTitan are imported, so this module imports none of them.
"""

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path

from mxtrain.files import local_path

FLAG = "--verbose"
VARIABLE = "MXTRAIN_VERBOSE"

# Modules that warn of one another, and mxtrain where it calls them. torch.cuda is not hidden: it warns of drivers.
LIBRARIES = r"(torch(?!\.cuda)|torchao|torchdata|torchtitan|pydantic|wandb|mxtrain)\b"
# Extensions that do not fit this PyTorch; classes registered in a deprecated way; a mesh of two dimensions.
LOGGERS = ("torchao", "torch.utils._pytree", "torch.distributed.tensor._redistribute")


def take_verbose(flags: list[str]) -> tuple[bool, list[str]]:
    """Return whether ``flags`` holds --verbose or MXTRAIN_VERBOSE is set, and the other flags."""
    others = [flag for flag in flags if flag != FLAG]
    return len(others) < len(flags) or os.environ.get(VARIABLE, "0") not in ("", "0"), others


def hide_library_warnings() -> None:
    """Hide what libraries warn of, in this process: a user cannot act on it. Call before PyTorch is imported."""
    warnings.filterwarnings("ignore", module=LIBRARIES)
    warnings.filterwarnings("ignore", "invalid escape sequence")  # in a docstring that Python compiles, of no module
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def open_closed_streams() -> None:
    """Open stdout and stderr on the null device where a shell (``>&-``) or a service manager has closed them."""
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))


class PathParser(argparse.ArgumentParser):
    """Keeps the lines of descriptions, and refuses addresses where it takes files."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **kwargs})
        self.register("type", Path, _path)


def _path(text: str) -> Path:
    try:
        return Path(local_path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


def positive(text: str) -> int:
    """Return a positive integer; the type of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not an integer of at least 1")
    return int(text)
