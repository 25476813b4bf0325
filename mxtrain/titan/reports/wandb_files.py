"""What a wandb run holds beside its metrics: the run's files and pictures, and a chart of both losses."""

import math
import shutil
from contextlib import suppress
from pathlib import Path

from mxtrain.analysis.numerics import draw_numerics
from mxtrain.analysis.plots import plot
from mxtrain.analysis.runs import load_run
from mxtrain.errors import ConfigError
from mxtrain.run_folder.files import CONFIG_FILE, CONVERSION_FILE, FACTS_FILE, NUMERICS_FILE, PICTURE_FILE

ATTACHED = (CONFIG_FILE, FACTS_FILE, CONVERSION_FILE, PICTURE_FILE, NUMERICS_FILE)
"""Every setting; versions and device; what was swapped; the loss curve; heat maps of diagnostics"""

CHART_POINTS = 1000
"""Largest number of points per curve, which keeps the chart of a long run small"""


def attach(run, folder: Path) -> None:
    """Upload copies of those of a training run's files that exist, as ``mxtrain/NAME``.

    The copies are in wandb's folder, so that an offline run is uploaded whole after its folder has moved.

    Args:
        run: a ``wandb.Run``.
    """
    place = Path(run.dir) / "mxtrain"
    place.mkdir(exist_ok=True)
    for name in ATTACHED:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, place / name)
            run.save(str(place / name), base_path=run.dir, policy="now")


def draw_pictures(folder: Path) -> None:
    """Draw the loss curve and the figures of diagnostics of a training run, each if it has any and can be written."""
    with suppress(ConfigError):
        plot([load_run(folder)], folder / PICTURE_FILE)
    with suppress(ConfigError):
        draw_numerics(load_run(folder), folder / NUMERICS_FILE)


def log_loss_chart(run, folder: Path, key: str) -> None:
    """Log a chart with both curves: training and validation loss (nats per token) over steps.

    Does nothing for a training run without validation, whose loss wandb shows anyway.

    Args:
        run: a ``wandb.Run``.
    """
    import wandb

    try:
        logged = load_run(folder)
    except ConfigError:  # no step is logged
        return
    curves = {"training": _points(logged.training, "loss"), "validation": _points(logged.validation, "validation_loss")}
    if all(curves.values()):
        steps, losses = ([[point[axis] for point in points] for points in curves.values()] for axis in (0, 1))
        title = "loss (nats per token)"
        run.log({key: wandb.plot.line_series(steps, losses, keys=list(curves), title=title, xname="step")})


def _points(rows: list[dict], key: str) -> list[tuple[int, float]]:
    """Return steps with finite losses, evenly thinned, the last one among them."""
    points = [(row["step"], row[key]) for row in rows if math.isfinite(row[key])]
    stride = math.ceil(len(points) / CHART_POINTS) or 1
    return points[::-1][::stride][::-1]
