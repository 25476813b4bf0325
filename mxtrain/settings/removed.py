"""What earlier versions had, and what to do instead."""

from collections.abc import Sequence

from mxtrain.errors import ConfigError

SETTINGS = {
    "mxnorm.combine_backward": "gradients of the experts' results travel in high precision; leave it out",
    "mxnorm.guard": "an entry of mxnorm.schedule changes the recipe, from a step before the spike",
}
"""Setting or table -> what to do instead"""

COMMANDS = {
    "completion": "'mxtrain train --help' lists all settings",
    "doctor --nccl": "all_reduce_perf of NVIDIA's nccl-tests measures the network (train_configs/LAYOUTS.md)",
}
"""Command and option -> what to do instead"""


def refuse_removed_command(words: Sequence[str]) -> None:
    """Raise ConfigError for a command line, without its first word, that an earlier version had."""
    for command, instead in COMMANDS.items():
        name, *options = command.split()
        if list(words[:1]) == [name] and set(options) <= set(words):
            raise ConfigError(f"'mxtrain {command}' no longer exists: {instead}")
