"""A parser of command lines that keeps the lines of descriptions and refuses addresses of files; types of options."""

import argparse
from pathlib import Path

from mxtrain.files import local_path


class PathParser(argparse.ArgumentParser):
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
