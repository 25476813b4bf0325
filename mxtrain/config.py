"""Reads and writes TOML configs, which may extend one another, and finds those that mxtrain brings along by name.

Imports nothing heavy, because the launcher reads configs before PyTorch is needed.
"""

import os
import re
from collections import Counter
from pathlib import Path

import tomli_w

from mxtrain.checkpoints.run_folder import CONFIG_FILE
from mxtrain.errors import ConfigError, closest
from mxtrain.files import read_toml, replace_file

_PACKAGE = Path(__file__).parent


def configs_folder() -> Path:
    """Return the folder of the presets and of ``train.sbatch``.

    In a checkout, and in an editable installation of one, it is beside the package; a wheel has it inside.
    """
    inside, beside = _PACKAGE / "train_configs", _PACKAGE.parent / "train_configs"
    return inside if inside.is_dir() else beside


def presets() -> dict[str, Path]:
    """Return name -> file of every preset, sorted by name."""
    return {path.stem: path for path in sorted(configs_folder().glob("*.toml"))}


def config_path(config: str | os.PathLike, folder: Path | None = None) -> Path:
    """Return the file that ``config`` names: a path, relative to ``folder``, or a preset if there is no such file."""
    path = Path(config) if folder is None else folder / config
    return path if os.path.isfile(path) else presets().get(str(config), path)


def summary(preset: Path) -> str:
    """Return the first line of a preset's comment, which describes it."""
    first = preset.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()


def load_config(path: str | os.PathLike) -> dict:
    """Return a TOML file as nested dicts, with ``extends = "base.toml"`` resolved and removed.

    ``path`` and the path in ``extends`` may also be the name of a preset (see ``config_path``). The path in ``extends``
    is relative to the file that contains it. The base file may extend another file.
    Tables are merged key by key. Any other value, lists included, replaces the value in the base file.
    """
    return _load(config_path(path), ())


def without_other_limit(config: dict, over: dict) -> dict:
    """Return ``config`` without its ``data.max_bytes`` if ``over`` sets another ``training.dataset`` than it limits."""
    names = [table.get("dataset") for tables in (config, over) if isinstance(table := tables.get("training"), dict)]
    is_other = len(names) == 2 and None not in names and names[0] != names[1]
    return _merge(config, {"data": {"max_bytes": 0}}) if is_other and "data" in config else config


def dump_config(config: dict, path: str | os.PathLike) -> None:
    """Write nested dicts as TOML, whole or not at all: a run resumes with the settings in this file.

    TOML has no null, so ``config`` must not contain None. Raises OSError.
    """
    replace_file(Path(path), tomli_w.dumps(config).encode())


def find_setting(name: str, path: Path, extended_by: tuple[Path, ...] = ()) -> tuple[Path, int] | None:
    """The file and line that set ``name``: in the config or, further up, in one that it extends.

    A name is "training.steps" or, in the second table of an array, "mxnorm.schedule[1].recipe". An array on one line
    is one setting.
    """
    path = config_path(path)
    if any(_same_file(path, earlier) for earlier in extended_by):
        return None
    table, extended = "", None
    tables: Counter[str] = Counter()
    array = name.partition("[")[0] if "[" in name else None
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError):
        return None
    for number, line in enumerate(lines, start=1):
        if header := re.match(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$", line):
            table = header[2]
            if header[1] == "[[":
                tables[table] += 1
                table = f"{table}[{tables[table] - 1}]"
            key = table
        elif assignment := re.match(r"\s*([\w.\"'-]+)\s*=\s*(.*)", line):
            key = f"{table}.{assignment[1]}".removeprefix(".")
            if key == "extends":
                extended = config_path(assignment[2].split("#")[0].strip().strip("\"'"), path.parent)
        else:
            continue
        if key.replace('"', "").replace("'", "") in (name, f"{name}[0]", array):
            return path, number
    return find_setting(name, extended, (*extended_by, path)) if extended is not None else None


def _load(path: Path, extended_by: tuple[Path, ...]) -> dict:
    config = _where_it_lies(_read(path, extended_by), path.absolute().parent)
    base = config.pop("extends", None)
    if base is None:
        return config
    if not isinstance(base, str):
        raise ConfigError(f"extends = {base!r} in {str(path)!r} is not a string; name one TOML file or preset")
    chain = (*extended_by, path)
    base_path = config_path(base, path.parent)
    for i, earlier in enumerate(chain):
        if _same_file(base_path, earlier):
            cycle = " extends ".join(repr(str(p)) for p in (*chain[i:], earlier))
            raise ConfigError(f"configs extend each other in a circle: {cycle}; remove one of these lines")
    return _merge(without_other_limit(_load(base_path, chain), config), config)


def _read(path: Path, extended_by: tuple[Path, ...]) -> dict:
    where = f"config {str(path)!r}"
    if extended_by:
        where += f" (which {str(extended_by[-1])!r} extends)"
    if os.path.isdir(path):
        raise ConfigError(f"{where} is a folder{_way_on(path)}")
    try:
        return read_toml(path, where)
    except FileNotFoundError:
        raise ConfigError(f"{where} does not exist{_hint(path)}") from None


def _where_it_lies(config: dict, folder: Path) -> dict:
    """Let the config of an imported run, which names its own folder, name ``folder`` after the run was moved."""
    match config:
        case {
            "job": {"dump_folder": str(old)},
            "model": {"hf_assets_path": str(own)},
            "checkpoint": {"initial_load_path": str(weights)},
        } if own.startswith(f"{old}/") and (folder / own.removeprefix(f"{old}/")).exists():
            if Path(old).absolute() == folder:
                return config
            old, own, weights = (
                f"{folder}{path.removeprefix(old)}" if f"{path}/".startswith(f"{old}/") else path
                for path in (old, own, weights)
            )
            moved = {"job": {"dump_folder": old}, "model": {"hf_assets_path": own}}
            return _merge(config, {**moved, "checkpoint": {"initial_load_path": weights}})
    return config


def _hint(path: Path) -> str:
    """The preset, or the file in the same folder, with the closest name to a file that does not exist."""
    names = {file.stem: str(file) for file in path.parent.glob("*.toml")} | {name: name for name in presets()}
    close = closest(path.stem, names)
    return f"; did you mean {names[close]!r}?" if close else "; 'mxtrain configs' lists the presets"


def _way_on(folder: Path) -> str:
    """What leads on from a folder that stands in the place of a TOML file."""
    if (config := folder / CONFIG_FILE).is_file():
        return f"; write {str(config)!r} for the run's settings, or 'mxtrain train --resume' to continue the run"
    if (folder / "config.json").is_file():
        return " with a Hugging Face model; 'mxtrain import MODEL_DIR RUN_DIR' makes a run with a config.toml from it"
    return "; name a TOML file or a preset"


def _same_file(a: Path, b: Path) -> bool:
    try:
        return a.samefile(b)
    except OSError:  # a missing file is reported when it is read
        return False


def _merge(base: dict, over: dict) -> dict:
    merged = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if both_tables else value
    return merged
