"""Names that tell runs apart in a table, and in a legend."""

from mxtrain.analysis.runs import Run

COMPARED = {"model": ("model", "flavor"), "lr": ("optimizer", "lr"), "seed": ("debug", "seed")}
"""Word in a label -> section and name of the setting, which is shown where runs differ in it"""


def names(runs: list[Run]) -> list[str]:
    """Return a name per run: the folder's name, or its path if another run has the same name."""
    names = [run.name for run in runs]
    return [run.name if names.count(run.name) == 1 else str(run.folder) for run in runs]


def labels(runs: list[Run]) -> list[str]:
    """Return a label per run: its name, its variant, and the settings of ``COMPARED`` in which the runs differ.

    For example "a (mxnorm mxfp8 p=2, lr 0.001, default seed)".
    """
    settings = {word: [_setting(run, *place) for run in runs] for word, place in COMPARED.items()}
    found = []
    for index, (run, name) in enumerate(zip(runs, names(runs), strict=True)):
        words = [run.variant] if run.variant else []
        for word, values in settings.items():
            if any(value != values[0] for value in values):
                words.append(f"default {word}" if values[index] is None else f"{word} {values[index]}")
        found.append(f"{name} ({', '.join(words)})" if words else name)
    return found


def _setting(run: Run, section: str, name: str):
    """Return a setting of a run; None where its config.toml, which holds no defaults, does not set it."""
    table = run.settings.get(section)
    return table.get(name) if isinstance(table, dict) else None
