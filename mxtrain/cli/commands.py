"""The console command ``mxtrain``. Only the subcommands that need PyTorch import it."""

import argparse
import sys
from pathlib import Path

from mxtrain import __version__
from mxtrain.cli import eval_command, export_command, generate_command, import_command, quiet
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError
from mxtrain.settings.resume_flag import FLAG, separated


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status. A mistake in the settings prints one line and returns 2."""
    options = _parser().parse_args(separated(sys.argv[1:] if arguments is None else arguments))
    try:
        return options.run(options)
    except ConfigError as error:
        print(f"mxtrain: error: {error}", file=sys.stderr)
        return CONFIG_ERROR_STATUS
    except KeyboardInterrupt:
        print("mxtrain: stopped by SIGINT", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mxtrain",
        description="Pretrain language models with MXNorm and MX linear layers in TorchTitan.",
        epilog="'mxtrain COMMAND --help' describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"mxtrain {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_prepare(commands)
    _add_cache(commands)
    _add_plot(commands)
    export_command.add(commands)
    import_command.add(commands)
    generate_command.add(commands)
    eval_command.add(commands)
    _add_doctor(commands)
    return parser


def _add(commands, name: str, run, summary: str, description: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=run)
    return parser


def _add_config_and_flags(parser: argparse.ArgumentParser, needs_config: bool = True) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs=None if needs_config else "?",
        help='TOML file; it may extend another with extends = "other.toml"',
    )
    parser.add_argument(
        "flags",
        metavar="FLAGS",
        nargs=argparse.REMAINDER,
        help="any TorchTitan flag, --section.key value; overrides the TOML; 'CONFIG --help' lists all flags",
    )
    parser.add_argument(quiet.FLAG, action="store_true", help="show TorchTitan's log and the warnings of all libraries")


def _add_train(commands) -> None:
    parser = _add(
        commands,
        "train",
        _train,
        "train the model of a TOML file",
        """\
Train on this machine, with one process per accelerator (one process on a CPU), and print a summary at the end.

  mxtrain train train_configs/llama3_debug.toml
  mxtrain train train_configs/llama3_125m.toml --mxnorm.p 1 --training.steps 1000
  NGPU=2 mxtrain train train_configs/llama3_1b.toml --job.dump_folder outputs/mine
  mxtrain train --resume outputs/mine                     go on from its newest checkpoint, with its settings
  mxtrain train --resume outputs/mine --training.steps 2000 --optimizer.lr 1e-4
  mxtrain train train_configs/llama3_debug.toml --help    all flags of TorchTitan and mxtrain

The run's folder is outputs/CONFIG-TIME, or --job.dump_folder. It receives config.toml with all settings, run.json,
metrics.jsonl, loss.png, train.log with TorchTitan's log, conversion.txt with the list of swapped modules, wandb files
and checkpoints. Ctrl-C and SIGTERM save the step and stop (with --checkpoint.enable); a second one stops at once.

--resume RUN takes every setting from RUN/config.toml, and flags override them. The settings are compared with those of
the checkpoint: a changed learning rate or number of steps is applied and reported. A change that would make the run
another experiment (seed, data, model, recipe, batch size) is refused, unless --checkpoint.may_change names it.

environment:
  NGPU             number of processes; at most one per accelerator, any number on a CPU
  OMP_NUM_THREADS  CPU threads per process (default: processes share the cores equally)
  MXTRAIN_VERBOSE  1 does the same as --verbose

On several machines, start 'torchrun ... -m mxtrain.train --job.config_file CONFIG' on each. It takes the same flags,
and --resume RUN in the place of --job.config_file CONFIG.
Exit status: 0 for success, 2 for a mistake in the settings, 128 + n after signal n, 1 for another failure.
""",
    )
    parser.usage = "mxtrain train [--verbose] CONFIG [FLAGS]\n       mxtrain train [--verbose] --resume RUN [FLAGS]"
    parser.add_argument(
        FLAG,
        metavar="RUN",
        nargs=argparse.REMAINDER,  # the flags follow, which argparse does not know
        help="continue the run in this folder, with its settings, in the place of CONFIG",
    )
    _add_config_and_flags(parser, needs_config=False)


def _add_prepare(commands) -> None:
    parser = _add(
        commands,
        "prepare",
        _prepare,
        "build the tokenizer and the tokenized text of a config",
        """\
Collect the text that a config trains on, build its tokenizer, tokenize the text, and print the number of files, bytes
and tokens. The result is cached: training with the same [data] settings starts at once.

  mxtrain prepare train_configs/llama3_125m.toml
  mxtrain prepare train_configs/llama3_debug.toml --training.dataset files --training.dataset_path my_text/
""",
    )
    _add_config_and_flags(parser)


def _add_cache(commands) -> None:
    parser = _add(
        commands,
        "cache",
        _cache,
        "list, verify or remove the prepared texts",
        """\
List the prepared texts in the cache: name, size, last use, dataset, tokens, and whether a text is damaged. Set
data.prepared to a name to train on exactly that text.

  mxtrain cache
  mxtrain cache --verify         also read the tokens and compare their hashes
  mxtrain cache --prune 30       remove what was not used for 30 days, leftovers of killed processes included
  mxtrain cache --remove python-0123456789abcdef
""",
    )
    parser.add_argument("--cache-dir", metavar="DIR", default="", help="default: $MXTRAIN_CACHE, else ~/.cache/mxtrain")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--verify", action="store_true", help="read the tokens and compare their hashes")
    action.add_argument("--prune", metavar="DAYS", type=float, help="remove what was not used for so many days")
    action.add_argument("--remove", metavar="NAME", nargs="+", help="remove these")


def _add_plot(commands) -> None:
    parser = _add(
        commands,
        "plot",
        _plot,
        "draw the loss curves of runs and compare the runs in a table",
        """\
Draw the loss curves of one or more runs in one PNG. Print a table with the last loss, the mean loss of the last 10 %
of the steps, tokens per second per device, and peak memory.

  mxtrain plot outputs/llama3_debug-*
  mxtrain plot outputs/a outputs/b -o comparison.png
""",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, with metrics.jsonl")
    parser.add_argument(
        "-o", "--output", metavar="PNG", type=Path, help="default: loss.png, in the run's folder for a single run"
    )


def _add_doctor(commands) -> None:
    parser = _add(
        commands,
        "doctor",
        _doctor,
        "show this machine's versions and devices, and how each recipe would run",
        """\
Print versions, devices, and for each recipe the execution mode that mode = "auto" picks on this machine, and why.

  mxtrain doctor
  mxtrain doctor --explain-norm 32768 4096           which kernels the fused RMSNorm runs for this shape, and why
  mxtrain doctor --explain-norm 32768 4096 --tune    find the fastest plan on this GPU first, and keep it
  mxtrain doctor --explain-router 8192 256 7168      which kernels a router's gate runs, and why; also takes --tune
""",
    )
    parser.add_argument(
        "--explain-norm",
        nargs=2,
        type=int,
        metavar=("M", "N"),
        help="print only which kernels the fused RMSNorm of an M x N matrix runs here, and why",
    )
    parser.add_argument(
        "--explain-router",
        nargs=3,
        type=int,
        metavar=("TOKENS", "EXPERTS", "HIDDEN"),
        help="print only which kernels a router's gate runs here, and why",
    )
    parser.add_argument("--dtype", help="dtype of the matrix or gate: bfloat16 (the default), float16 or float32")
    parser.add_argument("--tune", action="store_true", help="time other plans first and keep the fastest")


def _train(options) -> int:
    verbose, flags = _take_verbose(options)
    from mxtrain.settings.read import asks_for_help

    config, flags = _config_or_run(options, flags)
    if asks_for_help(flags):
        _job_config(config, flags)  # TorchTitan prints the help, with the config's values, and exits
    from mxtrain.cli.launch import train

    return train(config, flags, [quiet.FLAG] if verbose else [])


def _config_or_run(options, flags: list[str]) -> tuple[str, list[str]]:
    """Return the config and the flags of 'train', which names a config or a run to resume."""
    if options.resume is not None:
        from mxtrain.settings.resume_run import resumed

        return resumed(*(flags[:1] or [""]), flags[1:])
    if options.config is None:
        raise ConfigError("CONFIG is missing: give a TOML file, or --resume and the folder of a run")
    if FLAG in flags:
        raise ConfigError(f"{FLAG}: CONFIG = {options.config!r} is one run too many; a run resumes with its own config")
    return options.config, flags


def _prepare(options) -> int:
    _, flags = _take_verbose(options)
    job_config = _job_config(options.config, flags)
    from mxtrain.titan.datasets import prepare_from_job
    from mxtrain.titan.terminal import Screen

    screen = Screen()
    screen.line(prepare_from_job(job_config, progress=screen.status).report)
    return 0


def _cache(options) -> int:
    from mxtrain.cli import cache_command

    if options.prune is not None:
        print(cache_command.prune(options.cache_dir, options.prune))
    elif options.remove:
        print(cache_command.remove(options.cache_dir, options.remove))
    else:
        print(cache_command.report(options.cache_dir, options.verify))
    return 0


def _plot(options) -> int:
    from mxtrain.analysis import load_run, plot, table

    runs = [load_run(folder) for folder in options.runs]
    default = runs[0].folder / "loss.png" if len(runs) == 1 else Path("loss.png")
    print(table(runs))
    print(f"loss curves: {plot(runs, options.output or default)}")
    return 0


def _doctor(options) -> int:
    asked = [sizes for sizes in (options.explain_norm, options.explain_router) if sizes is not None]
    if not asked and (options.dtype or options.tune):
        raise ConfigError("--dtype and --tune go with --explain-norm M N or --explain-router TOKENS EXPERTS HIDDEN")
    if len(asked) > 1:
        raise ConfigError("--explain-norm and --explain-router: ask for one at a time")
    from mxtrain.cli import doctor

    if not asked:
        print(doctor.report())
    else:
        explain = doctor.explain_norm if options.explain_norm else doctor.explain_router
        print(explain(*asked[0], options.dtype or "bfloat16", options.tune))
    return 0


def _take_verbose(options) -> tuple[bool, list[str]]:
    """Return whether the run is verbose, and TorchTitan's flags. Hide library warnings unless the run is verbose."""
    verbose, flags = quiet.take_verbose([*(getattr(options, "resume", None) or []), *options.flags])
    verbose = verbose or options.verbose
    if not verbose:
        quiet.hide_library_warnings()
    return verbose, flags


def _job_config(config: str, flags: list[str]):
    from mxtrain.settings.names import check_names
    from mxtrain.settings.read import asks_for_help, places, read_settings

    arguments = [f"--job.config_file={config}", *flags]
    if not asks_for_help(flags):
        settings = read_settings(arguments)  # finds mistakes before the slow import of TorchTitan
        with places(arguments):
            check_names(settings)
    from mxtrain.titan.parse import parse_job_config

    return parse_job_config(arguments)
