"""A parser of command lines and subcommands that keeps the lines of descriptions, and refuses addresses of files."""

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
