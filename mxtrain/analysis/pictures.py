"""What all pictures by Matplotlib share: names as labels, and PNG files."""

import functools
import io
from collections.abc import Callable
from pathlib import Path

from mxtrain.errors import ConfigError
from mxtrain.files import reason, replace_file


def in_own_style(draw: Callable) -> Callable:
    """Let a function draw in Matplotlib's own style, whatever the user's matplotlibrc says: it may want LaTeX.

    The function raises ConfigError if Matplotlib cannot be imported, as with an unknown MPLBACKEND.
    """

    @functools.wraps(draw)
    def drawn(*args, **kwargs):
        try:
            from matplotlib import style
        except ValueError as error:
            raise ConfigError(f"Matplotlib cannot start: {error}") from error
        with style.context("default"):
            return draw(*args, **kwargs)

    return drawn


def literal(name: str) -> str:
    """Return a label that Matplotlib draws as ``name``: it reads $...$ as math, and hides labels that begin with _.

    Bytes of a folder's name that are no UTF-8 are question marks.
    """
    name = name.encode("utf-8", "replace").decode()
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def save_picture(figure, path: Path) -> None:
    """Write ``figure`` to ``path`` at once, or leave the file as it was. Raises ConfigError if it cannot be written."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content.getvalue())
    except OSError as error:
        raise ConfigError(f"the picture {path} cannot be written: {reason(error)}") from error
