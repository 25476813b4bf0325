"""Names that tell runs apart in a table, and in a legend."""

from mxtrain.analysis.runs import Run

COMPARED = {"model": ("model", "flavor"), "lr": ("optimizer", "lr"), "seed": ("debug", "seed")}
"""Word in a label -> section and name of the setting, which is shown where runs differ in it"""

OTHERS = (
    "job",
    "profiling",
    "metrics",
    "checkpoint",
    "comm",
    "parallelism",
    "compile",
    "activation_checkpoint",
    "validation",
    "model.name",  # other models are compared apart
    "model.flavor",
    "model_args",
    "optimizer.lr",
    "debug.seed",
    "training.steps",
    "data.cache_dir",
    "data.prepared",
    "mxnorm.diagnostics",  # changes no bit of the training
    "mxnorm.gather",
    "mxnorm.cache_weights",  # changes no bit of the training
    "mxnorm.group_linears",
    "mxnorm.graph_passes",
)
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
        if not any(name == other or name.startswith(f"{other}.") for other in OTHERS)
    }
