"""Draws loss curves of one or more runs as a PNG: over steps, tokens or time, smoothed, and as differences."""

import functools
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from mxtrain.analysis.metrics_file import EVENT
from mxtrain.analysis.runs import Run, labels
from mxtrain.errors import ConfigError
from mxtrain.files import os_errors_as, replace_file

if TYPE_CHECKING:
    import pandas as pd

XAxis = Literal["step", "tokens", "time"]

SMOOTH_FROM = 50
"""Curves with at least this many points are smoothed unless a number of points is given"""

LINE_STYLES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
"""
Solid, dashed, dotted, dash-dotted. A later curve leaves gaps, in which an equal one below it can be seen
"""
VALIDATION_MARKER = {"linestyle": "none", "marker": "D", "markersize": 5, "markeredgecolor": "black"}
LEGEND_INSIDE = 4
"""Largest number of runs whose legend is inside the plot"""
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
"""Unit of time -> seconds"""


def curves(run: Run, x: XAxis = "step") -> "tuple[pd.Series, pd.Series, pd.Series]":
    """Return a run's losses, validation losses and events over steps, tokens, or seconds since the first logged step.

    Time includes the pauses of a resumed run. Validations and events, which have neither tokens nor a time of their
    own step, are between the training rows, or behind the last one at the rate before it.

    Raises ConfigError if the run has not logged ``x``.
    """
    import pandas as pd

    key = {"step": "step", "tokens": "tokens_seen", "time": "time"}[x]
    if any(row.get(key) is None for row in run.training):
        raise ConfigError(f"{run.folder}: metrics.jsonl has no {key!r} in some rows, which --x {x} needs")
    steps, along = (np.array([row[name] for row in run.training], float) for name in ("step", key))
    if x == "time":  # a clock that is set back adds nothing
        along = np.concatenate([[0.0], np.cumsum(np.maximum(0.0, np.diff(along)))])

    def series(rows: list[dict], name: str) -> "pd.Series":
        wanted = np.array([row["step"] for row in rows], float)
        places = np.interp(wanted, steps, along)
        if len(steps) > 1:
            rate = (along[-1] - along[-2]) / (steps[-1] - steps[-2])
            places += rate * np.maximum(0.0, wanted - steps[-1])
        return pd.Series([row[name] for row in rows], places, dtype=None if rows else float)

    return series(run.training, "loss"), series(run.validation, "validation_loss"), series(run.events, EVENT)


def window(losses: "pd.Series", points: int | None) -> int:
    """Return over how many points the mean goes: an odd number; 1 is no smoothing.

    Args:
        points: the number, rounded up to an odd one. None: about 4 % of a long curve, 1 for a short one.
    """
    if points is None:
        return 2 * (len(losses) // 50) + 1 if len(losses) >= SMOOTH_FROM else 1
    return 2 * (points // 2) + 1


def moving_average(losses: "pd.Series", points: int) -> "pd.Series":
    """Return the centred mean of up to ``points`` neighbours, an odd number. Non-finite values are skipped, and NaN.

    At the start the window shrinks on both sides: the loss falls fast there, and a one-sided window would lie below
    the curve. At the end the loss is flat, and the window shrinks on one side only.
    """
    finite = losses.where(np.isfinite(losses))
    mean = finite.rolling(points, center=True, min_periods=1).mean()
    start = finite[:points].expanding().mean()[::2]  # of the first 1, 3, 5, ... points
    mean.iloc[: len(start)] = start
    return mean.where(np.isfinite(losses))


def minus(losses: "pd.Series", others: "pd.Series") -> "pd.Series":
    """Return the difference where both curves are, by linear interpolation of ``others``; NaN beside a NaN of them."""
    if others.empty:
        return losses * np.nan
    values = others.where(np.isfinite(others))
    with np.errstate(invalid="ignore"):
        return losses - np.interp(losses.index, others.index, values, left=np.nan, right=np.nan)


def in_own_style(draw: Callable) -> Callable:
    """Let a function draw in Matplotlib's own style, whatever the user's matplotlibrc says: it may want LaTeX.

    The function raises ConfigError if Matplotlib cannot be imported, as with an unknown MPLBACKEND.
    """

    @functools.wraps(draw)
    def drawn(*args, **kwargs):
        try:
            from matplotlib import style
        except ValueError as error:
            raise ConfigError(f"Matplotlib cannot start: {error}") from error
        with style.context("default"):
            return draw(*args, **kwargs)

    return drawn


def literal(name: str) -> str:
    """Return a label that Matplotlib draws as ``name``: it reads $...$ as math, and hides labels that begin with _.

    Bytes of a folder's name that are no UTF-8 are question marks.
    """
    name = name.encode("utf-8", "replace").decode()
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def picture_path(path: str | os.PathLike) -> Path:
    """Return ``path``. Raises ConfigError if it does not end in ".png"."""
    if Path(path).suffix.lower() != ".png":
        raise ConfigError(f"the picture {str(path)!r} is not the name of a PNG file; end it in .png")
    return Path(path)


def save_picture(figure, path: Path) -> None:
    """Write ``figure`` to ``path`` at once, or leave the file as it was. Raises ConfigError if it cannot be written."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    with os_errors_as(f"the picture {path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content.getvalue())


@in_own_style
def plot(
    runs: list[Run],
    path: str | os.PathLike,
    baseline: Run | None = None,
    smooth: int | None = None,
    x: XAxis = "step",
) -> Path:
    """Draw training loss, one line per run, validation losses as diamonds, and events as vertical lines.

    Losses that are not finite leave gaps, and the run's label names the first such step. Creates the folder of
    ``path`` if needed. Returns ``path``.

    Args:
        baseline: one of ``runs``. A second panel shows the losses of the others minus its losses.
        smooth: number of neighbouring points in a mean, rounded up to an odd number; 1 draws none. None takes about 4 %
            of the curve. The plot states it.
        x: the x-axis.

    Raises ConfigError if ``path`` does not end in ".png" or cannot be written, or if a run has not logged ``x``.
    """
    path = picture_path(path)
    found = [curves(run, x) for run in runs]
    unit = next((u for u in ("h", "min") if found and max(one[0].index[-1] for one in found) >= 2 * UNITS[u]), "s")
    if x == "time":
        found = [tuple(series.set_axis(series.index / UNITS[unit]) for series in one) for one in found]
    windows = [window(losses, smooth) for losses, *_ in found]

    import seaborn as sns
    from matplotlib.figure import Figure  # without pyplot there is no display and no global state

    figure = Figure(figsize=(9, 5.5 if baseline is None else 8), dpi=120, layout="constrained")
    ratios = [1] if baseline is None else [3, 2]
    panels = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": ratios})[:, 0]
    colors, place = sns.color_palette("colorblind", len(runs)), None
    if baseline is not None:
        place = next(index for index, run in enumerate(runs) if run is baseline)
        panels[1].axhline(0, color=colors[place], linewidth=1.2)
        panels[1].set_ylabel(f"loss minus that of\n{literal(_short(baseline.name))}")
    for index, (run, name, (losses, validation, events)) in enumerate(zip(runs, labels(runs), found)):
        if run.first_nonfinite_step is not None:
            name += f" (not finite at step {run.first_nonfinite_step})"
        # Of equal curves the first is the widest, and shows beside the others.
        own = {"color": colors[index], "linestyle": LINE_STYLES[index % 4]}
        own["linewidth"] = 1.6 + 0.7 * max(0, min(len(runs), 4) - 1 - index)
        _draw(panels[0], losses, validation, windows[index], own, literal(name) if len(runs) > 1 else "training")
        if place is not None and index != place:
            differences = minus(losses, found[place][0]), minus(validation, found[place][1])
            _draw(panels[1], *differences, windows[index], own, None)
        for at, texts in events.groupby(level=0):
            for axes in panels:
                axes.axvline(at, color=colors[index], linestyle=":", linewidth=1, alpha=0.8)
            # Half-way up: a loss curve begins above, ends below, and the legend is above.
            style = {"rotation": 90, "ha": "right", "va": "center", "fontsize": 7, "color": colors[index]}
            panels[0].text(at, 0.5, "\n".join(map(_short, texts)), transform=panels[0].get_xaxis_transform(), **style)
    if any(run.validation for run in runs):
        panels[0].plot([], [], label="validation", color="white", **VALIDATION_MARKER)  # one entry for all runs
    panels[0].set_title(literal(labels(runs)[0]) if len(runs) == 1 else "Training loss")
    panels[0].set_ylabel("loss (nats per token)")
    names = {"step": "step", "tokens": "tokens seen", "time": f"time since the first logged step ({unit})"}
    panels[-1].set_xlabel(names[x])
    _finish(figure, panels, x, windows)
    save_picture(figure, path)
    return path


def _draw(axes, losses: "pd.Series", validation: "pd.Series", points: int, own: dict, label: str | None) -> None:
    """Draw all points, the mean over ``points`` of them if that is more than one, and the validation losses."""
    if points > 1:
        axes.plot(losses, color=own["color"], alpha=0.25, linewidth=0.8)
        axes.plot(moving_average(losses, points), **own, label=label)
    else:
        axes.plot(losses, **own, marker=".", markersize=5, label=label)
    if len(validation):
        axes.plot(validation, color=own["color"], **VALIDATION_MARKER)


def _finish(figure, panels, x: XAxis, windows: list[int]) -> None:
    """Place the grid, ticks, the legend and the line about smoothing."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=x != "time", steps=[1, 2, 5, 10], min_n_ticks=1))
    if x == "tokens":
        panels[-1].xaxis.set_major_formatter(EngFormatter(sep=""))
    if max(windows) > 1:
        number = " to ".join(dict.fromkeys(map(str, (min(windows), max(windows)))))
        figure.supxlabel(f"faint: every logged step; strong: mean of {number} logged steps", fontsize=8, color="0.4")
    options = {"frameon": False, "handlelength": 3.5}
    if len(windows) <= LEGEND_INSIDE:
        panels[0].legend(loc="upper right", fontsize=9, **options)
    else:
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=2, fontsize=8, **options)


def _short(name: str) -> str:
    return name if len(name) <= 30 else f"{name[:29]}…"
