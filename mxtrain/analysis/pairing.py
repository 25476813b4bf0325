"""What runs must have in common, so that their losses can be compared step by step."""

from collections.abc import Iterable, Mapping

STEPS = "training.steps"
"""Changes the learning rate's schedule. The steps of finished runs are compared by their curves instead"""

PAIRING_SETTINGS = (
    "training.dataset", "training.dataset_path", "training.seq_len", "training.global_batch_size",
    "training.local_batch_size", STEPS, "data.installed", "data.other_files", "data.vocab_size", "data.max_bytes",
    "data.package_share", "data.validation_share", "data.seed", "data.text_key", "data.hf_config", "data.prepared",
    "model.name", "model.flavor", "model.hf_assets_path", "model.tokenizer_path", "checkpoint.initial_load_path",
    "checkpoint.initial_load_in_hf", "validation.dataset", "validation.dataset_path", "validation.steps",
    "validation.seq_len", "validation.local_batch_size", "metrics.log_freq",
)  # fmt: skip
"""
Settings in which paired runs must agree: they read the same text in the same steps, start from equal weights, are
validated on the same text, and log the same steps. So are all of ``MODEL_ARGS``
"""

MODEL_ARGS = "model_args."

HASH_DIGITS = 12
"""Shown of a hash"""

TEXT = {
    "tokenizer": ("tokenizer", "their losses are per token of different tokenizers"),
    "train": ("training text", "their runs are not paired step by step"),
    "validation": ("validation text", "their validation losses are not of the same text"),
    "sequences": ("number of sequences per validation", "their validation losses are not of the same text"),
    "stream": ("version of a stream", "they may have read other text, and are then not paired step by step"),
    "held_out": ("share held out of a stream", "their runs are not paired step by step"),
}
"""
Key in a run's ``data.json`` -> what it identifies, and the effect of a difference. Files may change between two runs of
equal settings
"""


OPTIONAL = ("validation", "sequences", "stream")
"""Keys of TEXT that a run may lack: it was not validated, streams no text, or an earlier version made it"""


def unpaired(runs: Iterable[tuple[str, Mapping[str, object]]], left_out: tuple[str, ...] = ()) -> list[str]:
    """Return a line for each of PAIRING_SETTINGS, and of MODEL_ARGS, in which runs differ.

    Args:
        runs: variant and settings by full name, per run. A setting that is missing has its default.
        left_out: settings that are not compared.
    """
    runs, lines = list(runs), []
    sizes = sorted({name for _, own in runs for name in own if name.startswith(MODEL_ARGS)})
    for name in (*PAIRING_SETTINGS, *sizes):
        found = dict.fromkeys((repr(own[name]) if name in own else "default", variant) for variant, own in runs)
        if name not in left_out and len({value for value, _ in found}) > 1:
            shown = ", ".join(f"{value} in {variant}" for value, variant in found)
            lines.append(f"variants differ in {name} ({shown}): {_effect(name)}")
    return lines


def other_texts(runs: Iterable[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return a line for each part of TEXT in which runs differ.

    Args:
        runs: name and hashes per run. A run without hashes is not compared, and one without a key of OPTIONAL
            not by that key.
    """
    runs, lines = [(name, own) for name, own in runs if own], []
    for key, (what, effect) in TEXT.items():
        compared = [(name, own) for name, own in runs if key in own or key not in OPTIONAL]
        values = [own.get(key, "none")[:HASH_DIGITS] for _, own in compared]
        if len(set(values)) > 1:
            shown = _shown([name for name, _ in compared], values)
            lines.append(f"runs differ in their {what} ({shown}): {effect}")
    return lines


def other_batches(runs: Iterable[tuple[str, int, int]]) -> list[str]:
    """Return a line if runs differ in their tokens per step. ``runs``: name, tokens and steps per run."""
    runs = list(runs)
    values = [f"{tokens / steps:,.10g}" for _, tokens, steps in runs]
    if len(set(values)) < 2:
        return []
    shown = _shown([name for name, _, _ in runs], values)
    return [f"runs differ in tokens per step ({shown}): they are not paired step by step"]


def _shown(names: list[str], values: list[str]) -> str:
    """Return every value with the runs that have it: "64 in a and 2 more, 128 in b"."""
    words = []
    for value in dict.fromkeys(values):
        first, *others = [name for name, own in zip(names, values, strict=True) if own == value]
        words.append(f"{value} in {first}" + (f" and {len(others)} more" if others else ""))
    return ", ".join(words)


def _effect(name: str) -> str:
    if name.startswith("validation."):
        return "their validation losses are not of the same text"
    if name.startswith(MODEL_ARGS):
        return "their models differ"
    if name.startswith("metrics."):
        return "their last 10 % and their spikes are computed from other steps"
    if name.startswith("checkpoint."):
        return "their runs do not start from equal weights"
    return "their runs are not paired step by step"
