"""The console command ``mxtrain``. PyTorch is imported only by the subcommands that need it."""

import argparse
import sys
from functools import partial
from pathlib import Path

from mxtrain import __version__
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError

HELP_FLAGS = ("-h", "--help")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status: 2 after a mistake in the settings, told in one line."""
    options = _parser().parse_args(arguments)
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
        epilog="'mxtrain COMMAND --help' tells more about each command.",
    )
    parser.add_argument("--version", action="version", version=f"mxtrain {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_prepare(commands)
    _add_plot(commands)
    _add_doctor(commands)
    return parser


def _add(commands, name: str, run, summary: str, description: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=run)
    return parser


def _add_config_and_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help='TOML file; it may extend another with extends = "other.toml"')
    parser.add_argument(
        "flags",
        metavar="FLAGS",
        nargs=argparse.REMAINDER,
        help="any TorchTitan flag, --section.key value; it overrides the TOML; CONFIG --help lists them",
    )


def _add_train(commands) -> None:
    parser = _add(
        commands,
        "train",
        _train,
        "train a model as a TOML file says",
        """\
Train on this machine, one process per accelerator (one on a CPU), and sum the run up at its end.

  mxtrain train train_configs/llama3_debug.toml
  mxtrain train train_configs/llama3_125m.toml --mxnorm.p 1 --training.steps 1000
  NGPU=2 mxtrain train train_configs/llama3_1b.toml --job.dump_folder outputs/mine
  mxtrain train train_configs/llama3_debug.toml --help    every TorchTitan flag, and mxtrain's

The run's folder, outputs/CONFIG-TIME unless --job.dump_folder is given, receives the resolved config.toml,
run.json, metrics.jsonl, loss.png, wandb files and checkpoints. To resume from checkpoints, give the folder again.

environment:
  NGPU             number of processes; at most one per accelerator, any number on a CPU
  OMP_NUM_THREADS  CPU threads of each process (default: several processes share the cores equally)

Several machines: start 'torchrun ... -m mxtrain.train --job.config_file CONFIG' on each; it takes the same flags.
Exit status: 0, or 2 after a mistake in the settings, 1 after another failure.
""",
    )
    _add_config_and_flags(parser)


def _add_prepare(commands) -> None:
    parser = _add(
        commands,
        "prepare",
        _prepare,
        "build the tokenizer and the tokenized text of a config, and count them",
        """\
Collect the text that a config trains on, build its tokenizer, tokenize the text, and print how many files, bytes and
tokens there are. The result is cached: training with the same [data] settings starts at once.

  mxtrain prepare train_configs/llama3_125m.toml
  mxtrain prepare train_configs/llama3_debug.toml --training.dataset files --training.dataset_path my_text/
""",
    )
    _add_config_and_flags(parser)


def _add_plot(commands) -> None:
    parser = _add(
        commands,
        "plot",
        _plot,
        "draw the loss curves of runs and compare them in a table",
        """\
Draw the loss curves of one or more run folders into one PNG, and print a table: last loss, mean of the last 10 % of
the steps, tokens per second and device, peak memory.

  mxtrain plot outputs/llama3_debug-*
  mxtrain plot outputs/a outputs/b -o comparison.png
""",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run: it holds metrics.jsonl")
    parser.add_argument(
        "-o", "--output", metavar="PNG", type=Path, help="default: loss.png, in the run's folder if there is just one"
    )


def _add_doctor(commands) -> None:
    parser = _add(
        commands,
        "doctor",
        _doctor,
        "say what this machine has and how each recipe would run on it",
        """\
Print versions, devices, and for each recipe the execution mode that mode = "auto" takes here, and why.

  mxtrain doctor
  mxtrain doctor --explain-norm 32768 4096           how the fused RMSNorm walks such a matrix, and why
  mxtrain doctor --explain-norm 32768 4096 --tune    find the fastest way on this GPU first, and keep it
  mxtrain doctor --explain-router 8192 256 7168      by which route a router multiplies, and why; it takes --tune, too
""",
    )
    parser.add_argument(
        "--explain-norm",
        nargs=2,
        type=int,
        metavar=("M", "N"),
        help="print instead which kernels the fused RMSNorm of M rows of N elements takes here, and why",
    )
    parser.add_argument(
        "--explain-router",
        nargs=3,
        type=int,
        metavar=("TOKENS", "EXPERTS", "HIDDEN"),
        help="print instead by which routes the gate of a router multiplies here, and why",
    )
    parser.add_argument("--dtype", help="of that matrix or gate: bfloat16 (the default), float16 or float32")
    parser.add_argument("--tune", action="store_true", help="time other tiles and splits first and keep the fastest")


def _train(options) -> int:
    if _wants_help(options):
        return _titan_help(options)
    from mxtrain.cli.launch import train

    return train(options.config, options.flags)


def _prepare(options) -> int:
    if _wants_help(options):
        return _titan_help(options)
    job_config = _job_config(options)
    from mxtrain.titan.datasets import prepare_from_job

    print(prepare_from_job(job_config, progress=partial(print, flush=True)).report)
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


def _wants_help(options) -> bool:
    return any(flag in HELP_FLAGS for flag in options.flags)


def _titan_help(options) -> int:
    """TorchTitan prints the help itself and exits, with the values of the config as defaults."""
    _job_config(options)
    return 0


def _job_config(options):
    from mxtrain.config import load_config

    load_config(options.config)  # its mistakes are told before TorchTitan is imported
    from mxtrain.titan.train import parse_job_config

    return parse_job_config(["--job.config_file", options.config, *options.flags])
