"""``mxtrain train`` and ``prepare``, a config and any of TorchTitan's flags; ``configs`` and ``init``, the presets."""

import argparse
import re
from pathlib import Path

from mxtrain.cli.console import FLAG as VERBOSE
from mxtrain.cli.console import hide_library_warnings, take_verbose
from mxtrain.config import configs_folder, presets, summary
from mxtrain.errors import ConfigError
from mxtrain.files import os_errors_as
from mxtrain.launched import end_with_comparison
from mxtrain.settings.resume import FLAG

SLURM = "train.sbatch"


def add(commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train the model of a config",
        add_help=False,
        description="""\
Train on this machine, with one process per accelerator (one process on a CPU), and print a summary at the end.

  mxtrain train llama3_debug                              a preset: 'mxtrain configs' lists them
  mxtrain train train_configs/llama3_125m.toml --mxnorm.p 1 --training.steps 1000
  NGPU=2 mxtrain train train_configs/llama3_1b.toml --job.dump_folder outputs/mine
  mxtrain train --resume outputs/mine                     go on from its newest checkpoint, with its settings
  mxtrain train train_configs/llama3_debug.toml --help    the usual settings, with this config's values

The run's folder is outputs/CONFIG-TIME, or --job.dump_folder. Ctrl-C and SIGTERM save a checkpoint, if
--checkpoint.enable is set, and stop the run. --resume RUN takes the settings of RUN/config.toml, and flags override
them. Changes that make the run another experiment are refused, unless --checkpoint.may_change names them.

environment:
  NGPU             number of processes; at most one per accelerator, any number on a CPU
  OMP_NUM_THREADS  CPU threads per process (default: processes share the cores equally)
  MXTRAIN_VERBOSE  1 has the effect of --verbose

On several machines, start 'torchrun ... -m mxtrain.train --job.config_file CONFIG' on each, with the same flags.
Exit status: 0 for success, 2 for a mistake in the settings, 128 + n after signal n, 1 for another failure.
""",
    )
    parser.set_defaults(run=_train)
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="show this help and the usual settings, and exit")
    parser.add_argument("--help-all", action=_Help, nargs=0, help="show this help and all settings, and exit")
    parser.usage = "mxtrain train [--verbose] CONFIG [FLAGS]\n       mxtrain train [--verbose] --resume RUN [FLAGS]"
    parser.add_argument(
        FLAG,
        metavar="RUN",
        nargs=argparse.REMAINDER,  # the flags follow, which argparse does not know
        help="continue the run in the folder RUN with its own settings, without CONFIG",
    )
    _add_config_and_flags(parser, needs_config=False)

    parser = commands.add_parser(
        "prepare",
        help="collect and tokenize the text of a config",
        description="""\
Collect the text that a config trains on, build its tokenizer, tokenize the text, and print the number of files, bytes
and tokens. The result is cached: training with the same [data] settings starts at once.

  mxtrain prepare train_configs/llama3_125m.toml
  mxtrain prepare train_configs/llama3_debug.toml --training.dataset files --training.dataset_path my_text/
""",
    )
    parser.set_defaults(run=_prepare)
    _add_config_and_flags(parser)

    parser = commands.add_parser(
        "configs",
        help="list the presets",
        description="""\
List the presets: the configs that come with mxtrain. Commands take the name of a preset in the place of a TOML file,
and a TOML file may extend a preset: extends = "llama3_125m".

  mxtrain configs
""",
    )
    parser.set_defaults(run=_configs)
    parser = commands.add_parser(
        "init",
        help="copy a preset, to edit it",
        description="""\
Copy a preset with its comments, or the script for Slurm. If the preset extends another preset, the copy does, too.

  mxtrain init llama3_125m my.toml
  mxtrain init train.sbatch
""",
    )
    parser.set_defaults(run=_init)
    parser.add_argument("name", metavar="NAME", help="a preset ('mxtrain configs' lists them), or train.sbatch")
    parser.add_argument(
        "file", metavar="FILE", type=Path, nargs="?", help="the copy, which must not exist (default: NAME's file name)"
    )


class _Help(argparse.Action):
    """Prints the help of the command and of settings, which take a second to collect."""

    def __call__(self, parser, namespace, values, option_string=None):
        from mxtrain.settings.help import settings_help

        print(parser.format_help())
        print(settings_help([option_string]))
        parser.exit()


def _add_config_and_flags(parser: argparse.ArgumentParser, needs_config: bool = True) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs=None if needs_config else "?",
        help='a TOML file, which may extend another with extends = "other.toml", or the name of a preset',
    )
    parser.add_argument(
        "flags",
        metavar="FLAGS",
        nargs=argparse.REMAINDER,
        help="any setting as --section.name VALUE, which overrides CONFIG; 'CONFIG --help-all' lists all of them",
    )
    parser.add_argument(VERBOSE, action="store_true", help="show TorchTitan's log and the warnings of libraries")


def _train(options) -> int:
    end_with_comparison()
    verbose, flags = _take_verbose(options)
    from mxtrain.settings.read import asks_for_help

    config = options.config
    if options.resume is not None:
        from mxtrain.settings.resume import resumed

        config, flags = resumed(*(flags[:1] or [""]), flags[1:])
    elif config is None:
        raise ConfigError("CONFIG is missing; name a TOML file or a preset, or write --resume and the folder of a run")
    elif FLAG in flags:
        raise ConfigError(f"CONFIG = {config!r} and {FLAG} RUN are both given; leave one of them out")
    if asks_for_help(flags):
        return _print_settings("train", config, flags)
    from mxtrain.cli.launch import train

    return train(config, flags, [VERBOSE] if verbose else [])


def _prepare(options) -> int:
    _, flags = _take_verbose(options)
    from mxtrain.settings.read import asks_for_help, places

    if asks_for_help(flags):
        return _print_settings("prepare", options.config, flags)
    from mxtrain.checkpoints.terminal import show
    from mxtrain.titan.data import prepare_from_job
    from mxtrain.titan.job_config import parse_job_config

    arguments = [f"--job.config_file={options.config}", *flags]
    with places(arguments):
        job_config = parse_job_config(arguments)
    show(prepare_from_job(job_config, progress=show).report)
    return 0


def _print_settings(command: str, config: str, flags: list[str]) -> int:
    from mxtrain.settings.help import settings_help

    print(f"usage: mxtrain {command} CONFIG [FLAGS]\n")
    print(settings_help([f"--job.config_file={config}", *flags]))
    return 0


def _take_verbose(options) -> tuple[bool, list[str]]:
    """Return whether the run is verbose, and TorchTitan's flags. Hide library warnings unless the run is verbose."""
    verbose, flags = take_verbose([*(getattr(options, "resume", None) or []), *options.flags])
    verbose = verbose or options.verbose
    if not verbose:
        hide_library_warnings()
    return verbose, flags


def _configs(options) -> int:
    found = presets()
    width = max(map(len, found))
    for name, path in found.items():
        print(f"{name:<{width}}  {summary(path)}")
    return 0


def _init(options) -> int:
    found = presets() | {SLURM: configs_folder() / SLURM}
    if options.name not in found:
        raise ConfigError(f"NAME = {options.name!r} is not a preset; 'mxtrain configs' lists the presets")
    file = options.file or Path(found[options.name].name)
    # A copy extends others by the names of presets instead of files beside it.
    extends = re.compile(r'^(extends = ")(\w+)\.toml"', flags=re.MULTILINE)
    text = extends.sub(r'\1\2"', found[options.name].read_text(encoding="utf-8"))
    with os_errors_as(f"FILE = {str(file)!r} cannot be written"), file.open("x", encoding="utf-8") as copy:
        copy.write(text)
    start = f"sbatch {file} CONFIG" if options.name == SLURM else f"mxtrain train {file}"
    print(f"{file}: a copy of {options.name}; start it with '{start}'")
    return 0
