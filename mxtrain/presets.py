"""The configs that mxtrain brings along, by name: "llama3_debug" is ``train_configs/llama3_debug.toml``."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).parent


def presets() -> dict[str, Path]:
    """Return name -> file of every preset, sorted by name."""
    # In a checkout, and in an editable installation of one, the folder is beside the package; a wheel has it inside.
    inside, beside = _PACKAGE / "train_configs", _PACKAGE.parent / "train_configs"
    return {path.stem: path for path in sorted((inside if inside.is_dir() else beside).glob("*.toml"))}


def config_path(config: str | os.PathLike, folder: Path | None = None) -> Path:
    """Return the file that ``config`` names: a path, or a preset if there is no such file.

    Args:
        folder: the path is relative to it; None for the current folder.
    """
    path = Path(config) if folder is None else folder / config
    return path if path.is_file() else presets().get(str(config), path)


def summary(preset: Path) -> str:
    """Return the first line of a preset's comment, which describes it."""
    first = preset.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()
