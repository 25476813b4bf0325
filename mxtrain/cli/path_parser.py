"""A parser of command lines that refuses addresses for arguments of type Path, as its subcommands' parsers do."""

import argparse
from pathlib import Path

from mxtrain.files import local_path


class PathParser(argparse.ArgumentParser):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register("type", Path, _path)


def _path(text: str) -> Path:
    try:
        return Path(local_path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None
