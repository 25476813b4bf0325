"""What earlier versions had, and what to do instead."""

from collections.abc import Sequence

from mxtrain.errors import ConfigError

COMMANDS = {
    "report": "'mxtrain compare' ends with the table and differences.svg; --from CSV compares rows of results",
    "compare --gpus": "--devices N gives every run N GPUs",
    "compare --side-by-side": "--devices N cuts the machine into shares of N GPUs, and each does one run at a time",
    "compare --resume": "the command that began the comparison goes on, with -o FOLDER",
}
"""Command and option -> what to do instead"""


def refuse_removed_command(words: Sequence[str]) -> None:
    """Raise ConfigError for a command line, without its first word, that an earlier version had."""
    for command, instead in COMMANDS.items():
        name, *options = command.split()
        if list(words[:1]) == [name] and set(options) <= {word.partition("=")[0] for word in words}:
            raise ConfigError(f"'mxtrain {command}' no longer exists: {instead}")
