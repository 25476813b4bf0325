"""``mxtrain configs`` and ``mxtrain init``: the configs that mxtrain brings along."""

import re
from pathlib import Path

from mxtrain.config import configs_folder, presets, summary
from mxtrain.errors import ConfigError
from mxtrain.files import os_errors_as

SLURM = "train.sbatch"


def add(commands) -> None:
    """Add both commands to argparse's subcommands."""
    parser = commands.add_parser(
        "configs",
        help="list the presets",
        description="""\
List the presets: the configs that come with mxtrain. A preset is named as a file is, in any folder.

  mxtrain configs
  mxtrain train llama3_debug          trains one
  mxtrain init llama3_125m my.toml    copies one, to edit it

A TOML file may also extend a preset: extends = "llama3_125m".
""",
    )
    parser.set_defaults(run=_configs)
    parser = commands.add_parser(
        "init",
        help="copy a preset",
        description="""\
Copy a preset with its comments, to edit it. A preset that extends another still does. The script for Slurm is copied,
too.

  mxtrain init llama3_125m my.toml
  mxtrain train my.toml
  mxtrain init train.sbatch
  sbatch --nodes=2 train.sbatch my.toml
""",
    )
    parser.set_defaults(run=_init)
    parser.add_argument("name", metavar="NAME", help="a preset; 'mxtrain configs' lists them; or train.sbatch")
    parser.add_argument(
        "file", metavar="FILE", type=Path, nargs="?", help="the copy, which must not exist (default: its name)"
    )


def _configs(options) -> int:
    found = presets()
    width = max(map(len, found))
    for name, path in found.items():
        print(f"{name:<{width}}  {summary(path)}")
    return 0


def _init(options) -> int:
    found = presets() | {SLURM: configs_folder() / SLURM}
    if options.name not in found:
        raise ConfigError(f"NAME = {options.name!r} is not one of the presets: {', '.join(found)}")
    file = options.file or Path(found[options.name].name)
    # A copy extends others by the names of presets instead of files beside it.
    extends = re.compile(r'^(extends = ")(\w+)\.toml"', flags=re.MULTILINE)
    text = extends.sub(r'\1\2"', found[options.name].read_text(encoding="utf-8"))
    with os_errors_as(f"FILE = {str(file)!r} cannot be written"), file.open("x", encoding="utf-8") as copy:
        copy.write(text)
    start = f"sbatch {file} CONFIG" if options.name == SLURM else f"mxtrain train {file}"
    print(f"{file}: a copy of {options.name}; start it with '{start}'")
    return 0
