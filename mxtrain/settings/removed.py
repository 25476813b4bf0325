"""What earlier versions had, and what to do instead."""

from collections.abc import Mapping, Sequence

from mxtrain.errors import ConfigError
from mxtrain.settings.mxnorm_section import quantizing_among

CONVERTERS = {"fused_rmsnorm": "name 'fused_norm', which also swaps LayerNorms"}
SETTINGS = {
    "data.other_files": "remove it; training.dataset = 'files' reads files of any kind",
    "data.package_share": "remove it; with data.installed, a package is at most 0.2 of the text",
    "fused_rmsnorm": "its settings are those of [fused_norm]",
    "mxnorm.combine_backward": "gradients of the experts' results travel in high precision; remove it",
    "mxnorm.guard": "remove it; entries of mxnorm.schedule change the recipe by step",
}
SCHEDULE_KEYS = dict.fromkeys(("p", "estimator"), "remove it; [mxnorm] sets it for all steps")
COMMANDS = {
    "report": "'mxtrain compare' ends with the table and differences.svg, 'mxtrain compare --from CSV' too",
    "compare --gpus": "--devices N gives every run N GPUs",
    "compare --side-by-side": "--devices N cuts the machine into shares of N GPUs, and each does one run at a time",
    "compare --resume": "the command that began the comparison goes on, with -o FOLDER",
    "completion": "'mxtrain train --help-all' lists all settings",
    "cache": "the folder of prepared texts, $MXTRAIN_CACHE or ~/.cache/mxtrain, may be looked at and removed by hand",
    "eval --max-tokens": "every file is read whole: cut the text, by 'head -c' for example",
    "eval --stride": "windows follow one another; --seq-len sets their length",
    "export --loss-tokens": "'mxtrain eval RUN FILE' and 'mxtrain eval DIR FILE' give the loss of the export on a text",
    "export --device": "an export computes nothing on a device",
    "doctor --nccl": "all_reduce_perf of NVIDIA's nccl-tests measures the network (train_configs/LAYOUTS.md)",
}
"""The keys of these four tables -> what to do instead. A key of COMMANDS is a command, or a command and its option"""


def in_this_version(tables: Mapping, trains: bool = True) -> dict:
    """Return the settings that a run kept, as nested tables, without removed ones that change no number.

    TorchTitan's language models have no LayerNorm, so "fused_norm" does what "fused_rmsnorm" did.

    Args:
        trains: whether the run goes on. For an export, no removed setting changes a number.
    """
    tables = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    model, mxnorm, parallelism, data = (
        table if isinstance(table := tables.get(name), dict) else {}
        for name in ("model", "mxnorm", "parallelism", "data")
    )
    for name in ("other_files", "package_share"):  # the data loader compares hashes of the text
        data.pop(name, None)
    names = names if isinstance(names := model.get("converters"), list) else []
    if "fused_rmsnorm" in names:
        model["converters"] = ["fused_norm" if name == "fused_rmsnorm" else name for name in names]
        tables["fused_norm"] = tables.pop("fused_rmsnorm", {})
    elif "fused_norm" not in names:
        tables.pop("fused_rmsnorm", None)
    has_effect = trains and quantizing_among(names)
    if not has_effect:
        mxnorm.pop("guard", None)
        if isinstance(entries := mxnorm.get("schedule"), list) and all(isinstance(entry, dict) for entry in entries):
            entries = [{key: entry[key] for key in entry if key not in SCHEDULE_KEYS} for entry in entries]
            mxnorm["schedule"] = [entry for entry in entries if "recipe" in entry or "norm" in entry]
    if not has_effect or parallelism.get("expert_parallel_degree", 1) == 1:
        mxnorm.pop("combine_backward", None)
    return tables


def removed_in_effect(tables: Mapping) -> dict[str, object]:
    """Return the removed settings, by full name, that changed numbers of the run that kept ``tables``."""
    tables, found = in_this_version(tables), {}
    for name in SETTINGS:
        section, _, key = name.partition(".")
        if key and isinstance(table := tables.get(section), dict) and key in table:
            found[name] = table[key]
    return found


def refuse_removed_command(words: Sequence[str]) -> None:
    """Raise ConfigError for a command line, without its first word, that an earlier version had."""
    for command, instead in COMMANDS.items():
        name, *options = command.split()
        if list(words[:1]) == [name] and set(options) <= {word.partition("=")[0] for word in words}:
            raise ConfigError(f"'mxtrain {command}' no longer exists: {instead}")
