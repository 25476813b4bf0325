"""Draws loss curves of one or more runs as a PNG."""

import io
import os
from pathlib import Path

import numpy as np

from mxtrain.analysis.runs import Run, labels
from mxtrain.errors import ConfigError
from mxtrain.run_folder.files import reason, replace_file

SMOOTH_FROM = 50
"""Curves with at least this many points are drawn faintly, with a moving average on top"""

COLORS = ("C0", "C1", "C2", "C3", "C4", "C8", "C9", "C6", "C5")
"""Matplotlib's color cycle, reordered, without the grey C7, which looks like the grid"""

VALIDATION_MARKER = {"linestyle": "none", "marker": "D", "markersize": 5, "markeredgecolor": "black"}


def plot(runs: list[Run], path: str | os.PathLike) -> Path:
    """Draw training loss over steps, one line per run, and validation losses as diamonds.

    Losses that are not finite leave gaps, and the run's label names the first such step. Creates the folder of
    ``path`` if needed. Returns ``path``.

    Raises ConfigError if ``path`` does not end in ".png" or cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ConfigError(f"the picture {str(path)!r} is not the name of a PNG file; end it in .png")
    from matplotlib.figure import Figure  # without pyplot there is no display and no global state
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    names = [
        f"{label} ({run.variant})" if run.variant else label for run, label in zip(runs, labels(runs), strict=True)
    ]
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        _draw(axes, run, name if len(runs) > 1 else "training", color=COLORS[index % len(COLORS)])
    if any(run.validation for run in runs):
        axes.plot([], [], label="validation", color="white", **VALIDATION_MARKER)  # one legend entry for all runs
    axes.set_title(names[0] if len(runs) == 1 else "Training loss")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9 if len(runs) <= 4 else 8, loc="upper right")

    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, picture.getvalue())
    except OSError as error:
        raise ConfigError(f"the picture {path} cannot be written: {reason(error)}") from error
    return path


def _draw(axes, run: Run, label: str, color: str) -> None:
    steps = np.array([row["step"] for row in run.training])
    losses = np.array([row["loss"] for row in run.training], dtype=float)
    if run.first_nonfinite_step is not None:
        label += f" (not finite at step {run.first_nonfinite_step})"
    if len(losses) >= SMOOTH_FROM:
        axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(steps, moving_average(losses, half_width=len(losses) // 50), color=color, linewidth=1.6, label=label)
    else:
        axes.plot(steps, losses, color=color, linewidth=1.6, marker=".", markersize=5, label=label)
    if run.validation:
        axes.plot(
            [row["step"] for row in run.validation],
            [row["validation_loss"] for row in run.validation],
            color=color,
            **VALIDATION_MARKER,
        )


def moving_average(values: np.ndarray, half_width: int) -> np.ndarray:
    """Return the centred mean of up to ``2 * half_width + 1`` neighbours. Skips non-finite values, which become NaN.

    At the start the window shrinks on both sides: the loss falls fast there, and a one-sided window would lie below
    the curve. At the end the loss is flat, and the window shrinks on one side only.
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    low = np.maximum(index - half_width, 0)
    high = np.minimum(index + np.minimum(half_width, index), len(values) - 1) + 1
    with np.errstate(invalid="ignore"):
        mean = (sums[high] - sums[low]) / (counts[high] - counts[low])
    return np.where(finite, mean, np.nan)
