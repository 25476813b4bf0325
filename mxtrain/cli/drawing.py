"""What ``mxtrain plot`` draws: the losses of runs and their table, or the figures of one run."""

import sys
from pathlib import Path

from mxtrain.analysis import Run, load_run, plot, table
from mxtrain.analysis.curves import XAxis, curve, notes
from mxtrain.analysis.heat_maps import draw_numerics
from mxtrain.analysis.labels import names
from mxtrain.errors import ConfigError
from mxtrain.run_folder.files import NUMERICS_FILE, PICTURE_FILE


def draw(folders: list[str], output: Path | None, baseline: str | None, smooth: int | None, x: XAxis) -> str:
    """Draw the runs in ``folders``, and return their table and where the picture is.

    A run that cannot be drawn is one line on stderr, and so is whatever else a reader should know of a curve.

    Args:
        output: of the picture; None for the run's folder, or this one if there are several runs.
        baseline: folder of the run to which the others are compared. It is drawn, too.
        smooth, x: as for ``plot``.

    Raises ConfigError if no run is left, or the baseline cannot be drawn.
    """
    compared = None if baseline is None else _load(baseline, x)
    runs = [] if compared is None else [compared]
    for folder in folders:
        if baseline is not None and Path(folder).resolve() == Path(baseline).resolve():
            continue
        try:
            runs.append(_load(folder, x))
        except ConfigError as error:
            if len(folders) == 1:
                raise
            print(f"mxtrain: not drawn: {error}", file=sys.stderr)
    if not runs:
        raise ConfigError(f"none of the {len(folders)} folders holds a run that can be drawn")
    for line in notes(runs, names(runs)):
        print(f"mxtrain: note: {line}", file=sys.stderr)
    path = output or (runs[0].folder / PICTURE_FILE if len(runs) == 1 else Path(PICTURE_FILE))
    return f"{table(runs)}\nloss curves: {plot(runs, path, compared, smooth, x)}"


def draw_figures(folder: str, output: Path | None) -> str:
    """Draw the figures of a run's diagnostics; return what deserves a look in them, and where the picture is.

    Raises ConfigError as ``draw_numerics``.
    """
    path, remarks = draw_numerics(folder, output or Path(folder) / NUMERICS_FILE)
    return "\n".join([*remarks, f"numerics: {path}"])


def _load(folder: str, x: XAxis) -> Run:
    """Return a run that can be drawn over ``x``. Raises ConfigError if it cannot."""
    run = load_run(folder)
    curve(run, x)
    return run
