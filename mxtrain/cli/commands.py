"""The console command ``mxtrain``. Only the subcommands that need PyTorch import it."""

import argparse
import os
import sys
from pathlib import Path

from mxtrain import __version__
from mxtrain.cli import (
    compare_command,
    completion_command,
    configs_command,
    eval_command,
    export_command,
    generate_command,
    import_command,
    report_command,
    train_command,
)
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError
from mxtrain.settings.own_modules import search_beside
from mxtrain.settings.resume_flag import separated


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status. A mistake in the settings prints one line and returns 2.

    Where the reader of stdout has enough, such as "head", it ends without a word and returns 141, as shells do.
    """
    try:
        options = _parser().parse_args(separated(sys.argv[1:] if arguments is None else arguments))
        search_beside(None)  # a run may have models of the user's own
        status = options.run(options)
        _flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at its end
        return 141
    except ConfigError as error:
        print(f"mxtrain: error: {error}", file=sys.stderr)
        return CONFIG_ERROR_STATUS
    except KeyboardInterrupt:
        print("mxtrain: stopped by SIGINT", file=sys.stderr)
        return 130


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:
        pass  # stdout is a file on a full disk, and what the command did is done


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mxtrain",
        description="Pretrain language models with MXNorm and MX linear layers in TorchTitan.",
        epilog="'mxtrain COMMAND --help' describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"mxtrain {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train_command.add(commands)
    configs_command.add(commands)
    _add_cache(commands)
    _add_plot(commands)
    compare_command.add(commands)
    report_command.add(commands)
    export_command.add(commands)
    import_command.add(commands)
    generate_command.add(commands)
    eval_command.add(commands)
    _add_doctor(commands)
    completion_command.add(commands)
    return parser


def _add(commands, name: str, run, summary: str, description: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=run)
    return parser


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
of the steps, tokens per second per device, and peak memory. A folder that cannot be read is one line on stderr.

  mxtrain plot outputs/llama3_debug-*
  mxtrain plot outputs/a outputs/b -o comparison.png
  mxtrain plot outputs/p1 outputs/p2 --baseline outputs/bf16     a second panel: losses minus those of bf16
  mxtrain plot outputs/a --smooth 20 --x tokens

With --numerics, draw the figures of one run with mxnorm.diagnostics.every > 0: a heat map of modules by steps for each.

  mxtrain plot --numerics outputs/a
""",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, with metrics.jsonl")
    parser.add_argument(
        "-o", "--output", metavar="PNG", type=Path, help="default: loss.png, in the run's folder for a single run"
    )
    parser.add_argument("--baseline", metavar="RUN", help="folder of the run to compare with, in a second panel")
    parser.add_argument(
        "--smooth",
        metavar="N",
        type=int,
        help="draw the mean of N logged steps, an even N as N + 1; 1: none (default: about 4 %% of a curve of 50 steps "
        "or more)",
    )
    parser.add_argument(
        "--numerics", action="store_true", help="draw the figures of diagnostics (default: numerics.png, in the folder)"
    )
    parser.add_argument(
        "--x",
        choices=("step", "tokens", "time"),
        default="step",
        help="the x-axis (default: step); time includes validation and the pauses of a resumed run",
    )


def _add_doctor(commands) -> None:
    parser = _add(
        commands,
        "doctor",
        _doctor,
        "show this machine's versions and devices, how each recipe would run, and what a config's model takes",
        """\
Print versions, devices, and for each recipe the execution mode that mode = "auto" picks on this machine, and why.

  mxtrain doctor
  mxtrain doctor --explain-norm 32768 4096           which kernels the fused RMSNorm runs for this shape, and why
  mxtrain doctor --explain-norm 32768 4096 --norm layer   the same for the fused LayerNorm
  mxtrain doctor --explain-norm 32768 4096 --tune    find the fastest plan on this GPU first, and keep it
  mxtrain doctor --explain-router 8192 256 7168      which kernels a router's gate runs, and why; also takes --tune
  mxtrain doctor --model CONFIG --mxnorm.p 1         a config's parameters, memory per GPU, multiplications, conversion
""",
    )
    parser.add_argument(
        "--model",
        metavar="CONFIG",
        nargs=argparse.REMAINDER,  # the flags follow, which argparse does not know
        help="print only what the model of a TOML file takes; any flags of 'mxtrain train' follow",
    )
    parser.add_argument(
        "--explain-norm",
        nargs=2,
        type=int,
        metavar=("M", "N"),
        help="print only which kernels the fused RMSNorm of an M x N matrix runs here, and why",
    )
    parser.add_argument("--norm", help="with --explain-norm: rms (RMSNorm, the default) or layer (LayerNorm)")
    parser.add_argument(
        "--explain-router",
        nargs=3,
        type=int,
        metavar=("TOKENS", "EXPERTS", "HIDDEN"),
        help="print only which kernels a router's gate runs here, and why",
    )
    parser.add_argument("--dtype", help="dtype of the matrix or gate: bfloat16 (the default), float16 or float32")
    parser.add_argument("--tune", action="store_true", help="time other plans first and keep the fastest")


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
    from mxtrain.cli import plot_command

    if options.numerics:
        if len(options.runs) > 1 or options.baseline or options.smooth or options.x != "step":
            raise ConfigError("--numerics draws one RUN, over steps: allowed beside it is -o PNG")
        print(plot_command.draw_figures(options.runs[0], options.output))
        return 0
    if options.smooth is not None and options.smooth < 1:
        raise ConfigError(f"--smooth {options.smooth}: allowed is 1 (no smoothing) or more")
    print(plot_command.draw(options.runs, options.output, options.baseline, options.smooth, options.x))
    return 0


def _doctor(options) -> int:
    if options.model is not None:
        from mxtrain.cli import doctor_model

        print(doctor_model.report(options.model))
        return 0
    asked = [sizes for sizes in (options.explain_norm, options.explain_router) if sizes is not None]
    if not asked and (options.dtype or options.tune):
        raise ConfigError("--dtype and --tune go with --explain-norm M N or --explain-router TOKENS EXPERTS HIDDEN")
    if options.norm and not options.explain_norm:
        raise ConfigError("--norm goes with --explain-norm M N")
    if len(asked) > 1:
        raise ConfigError("--explain-norm and --explain-router: ask for one at a time")
    from mxtrain.cli import doctor

    if not asked:
        print(doctor.report())
    else:
        explain = doctor.explain_norm if options.explain_norm else doctor.explain_router
        kind = {"norm": options.norm} if options.norm else {}
        print(explain(*asked[0], options.dtype or "bfloat16", options.tune, **kind))
    return 0
