"""The console command ``mxtrain``. Only the subcommands that need PyTorch import it."""

import os
import sys

from mxtrain import __version__
from mxtrain.cli import certify, compare_command, doctor, hub_commands, plot_command, rehearse_command, train_command
from mxtrain.cli.console import PathParser, open_closed_streams
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError
from mxtrain.settings.resume import separated

__all__ = ["main"]

COMMANDS = (train_command, plot_command, compare_command, rehearse_command, hub_commands, certify, doctor)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status. A mistake in the settings prints one line and returns 2.

    Where the reader of stdout has enough, such as "head", it ends without a word and returns 141, as shells do.
    """
    try:
        open_closed_streams()
        options = _parser().parse_args(separated(sys.argv[1:] if arguments is None else arguments))
        status = options.run(options)
        sys.stdout.flush()
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


def _parser() -> PathParser:
    parser = PathParser(
        prog="mxtrain",
        description="Pretrain language models with MXNorm and MX linear layers in TorchTitan.",
        epilog="'mxtrain COMMAND --help' describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"mxtrain {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
