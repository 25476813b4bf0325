"""The ``mxtrain`` command."""

from mxtrain.cli.commands import main

__all__ = ["main"]
