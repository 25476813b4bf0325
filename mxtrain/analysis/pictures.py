"""What all pictures by Matplotlib share: names as labels, and PNG files."""

import io
from pathlib import Path

from mxtrain.errors import ConfigError
from mxtrain.files import reason, replace_file


def literal(name: str) -> str:
    """Return a label that Matplotlib draws as ``name``: it reads $...$ as math, and hides labels that begin with _."""
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
