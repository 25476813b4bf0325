"""Names that tell runs apart in a table, and in a legend."""

import re

from mxtrain.analysis.runs import Run
from mxtrain.settings.known import rules_of, worded_settings
from mxtrain.settings.types import Resume


def names(runs: list[Run]) -> list[str]:
    """Return a name per run: the folder's name, or its path if another run has the same name."""
    names = [run.name for run in runs]
    return [run.name if names.count(run.name) == 1 else str(run.folder) for run in runs]


def labels(runs: list[Run]) -> list[str]:
    """Return a label per run: its name, its variant, and settings with a ``Label.word`` in which the runs differ.

    For example "a (mxnorm mxfp8 p=2, lr 0.001, default seed)".
    """
    settings = {word: [run.setting(*name.split(".")) for run in runs] for word, name in worded_settings().items()}
    found = []
    for index, (run, name) in enumerate(zip(runs, names(runs), strict=True)):
        words = [run.variant] if run.variant else []
        for word, values in settings.items():
            if any(value != values[0] for value in values):
                words.append(f"default {word}" if values[index] is None else f"{word} {values[index]}")
        found.append(f"{name} ({', '.join(words)})" if words else name)
    return found


def variants(runs: list[Run]) -> list[str]:
    """Return the name of each run's variant: what it trains, whatever its learning rate, seed and length.

    Runs of one converter that differ in other settings are told apart by these: "mxnorm mxfp8 p=2, optimizer.beta2
    0.99".
    """
    bases = [run.variant or run.name for run in runs]
    settings = [compared_settings(run) for run in runs]
    found = []
    for base, own in zip(bases, settings, strict=True):
        others = [other for name, other in zip(bases, settings, strict=True) if name == base]
        differing = sorted(
            {key for other in others for key in other.keys() | own.keys() if other.get(key) != own.get(key)}
        )
        found.append(", ".join([base, *(f"{key} {own.get(key, 'default')}" for key in differing)]))
    return found


def flat_settings(run: Run) -> dict[str, object]:
    """Return the settings in config.toml by full name: "mxnorm.guard.recipe", "mxnorm.schedule[0].modules"."""
    return {
        name: value
        for section, table in run.settings.items()
        if isinstance(table, dict)
        for name, value in _flat(section, table).items()
    }


def _flat(name: str, value: object) -> dict[str, object]:
    if isinstance(value, dict):
        parts = [(f"{name}.{key}", part) for key, part in value.items()]
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        parts = [(f"{name}[{index}]", part) for index, part in enumerate(value)]
    else:
        return {name: value}
    return {full: leaf for part in parts for full, leaf in _flat(*part).items()}


def compared_settings(run: Run) -> dict[str, str]:
    """Return the settings that make a variant, by full name."""
    return {
        name: " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in flat_settings(run).items()
        if _makes_variant(name)
    }


def _makes_variant(name: str) -> bool:
    resume, label = rules_of(re.sub(r"\[.*", "", name))
    return resume is not Resume.FREE if label is None else label.variant
