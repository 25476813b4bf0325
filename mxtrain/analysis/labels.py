"""Names that tell runs apart in a table, and in a legend."""

from mxtrain.analysis.runs import Run

COMPARED = {"model": ("model", "flavor"), "lr": ("optimizer", "lr"), "seed": ("debug", "seed")}
"""Word in a label -> section and name of the setting, which is shown where runs differ in it"""

OTHER_SECTIONS = (
    "job",
    "profiling",
    "metrics",
    "checkpoint",
    "comm",
    "parallelism",
    "compile",
    "activation_checkpoint",
    "validation",
)
OTHER_SETTINGS = ("optimizer.lr", "debug.seed", "training.steps", "data.cache_dir", "data.prepared")
"""Sections and settings that do not make another variant"""


def names(runs: list[Run]) -> list[str]:
    """Return a name per run: the folder's name, or its path if another run has the same name."""
    names = [run.name for run in runs]
    return [run.name if names.count(run.name) == 1 else str(run.folder) for run in runs]


def labels(runs: list[Run]) -> list[str]:
    """Return a label per run: its name, its variant, and the settings of ``COMPARED`` in which the runs differ.

    For example "a (mxnorm mxfp8 p=2, lr 0.001, default seed)".
    """
    settings = {word: [run.setting(*place) for run in runs] for word, place in COMPARED.items()}
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
    settings = [_compared(run) for run in runs]
    found = []
    for base, own in zip(bases, settings, strict=True):
        others = [other for name, other in zip(bases, settings, strict=True) if name == base]
        differing = sorted(
            {key for other in others for key in other.keys() | own.keys() if other.get(key) != own.get(key)}
        )
        found.append(", ".join([base, *(f"{key} {own.get(key, 'default')}" for key in differing)]))
    return found


def _compared(run: Run) -> dict[str, object]:
    """Return the settings that make a variant, by full name."""
    flat = {
        f"{section}.{name}": value
        for section, table in run.settings.items()
        if isinstance(table, dict) and section not in OTHER_SECTIONS
        for name, value in table.items()
    }
    return {name: value for name, value in flat.items() if name not in OTHER_SETTINGS}
