"""Draws loss curves of one or more runs as a PNG: over steps, tokens or time, smoothed, and as differences."""

import functools
import io
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from mxtrain.analysis.metrics_file import EVENT
from mxtrain.analysis.runs import Run, labels
from mxtrain.errors import ConfigError
from mxtrain.files import os_errors_as, replace_file

XAxis = Literal["step", "tokens", "time"]

SMOOTH_FROM = 50
"""Curves with at least this many points are smoothed unless a number of points is given"""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The palette of Okabe and Ito, which color-blind readers can tell apart, without its yellow, too faint on white"""

LINE_STYLES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
"""
Solid, dashed, dotted, dash-dotted. A later curve leaves gaps, in which an equal one below it can be seen. Seven colors
and four styles make 28 different lines
"""

VALIDATION_MARKER = {"linestyle": "none", "marker": "D", "markersize": 5, "markeredgecolor": "black"}
LEGEND_INSIDE = 4
"""Largest number of runs whose legend is inside the plot"""


@dataclass(frozen=True)
class Curve:
    """Training and validation losses of a run. Losses (nats per token) may be ``nan`` or ``inf``."""

    x: np.ndarray
    """Steps, tokens, or seconds since the first logged step, pauses of a resumed run included; increasing"""
    loss: np.ndarray
    validation_x: np.ndarray
    validation_loss: np.ndarray

    def smoothed(self, points: int) -> "Curve":
        """Return this curve with the mean of so many neighbouring points, an odd number."""
        return replace(self, loss=moving_average(self.loss, points // 2))

    def minus(self, other: "Curve") -> "Curve":
        """Return the difference of the losses where both curves are, by linear interpolation of ``other``."""
        validation = values_at(self.validation_x, other.validation_x, other.validation_loss)
        return replace(
            self,
            loss=self.loss - values_at(self.x, other.x, other.loss),
            validation_loss=self.validation_loss - validation,
        )


def curve(run: Run, x: XAxis = "step") -> Curve:
    """Return a run's losses over ``x``.

    Raises ConfigError if the run has not logged ``x``.
    """
    along = _column(run.training, "step")
    if x != "step":
        key = "tokens_seen" if x == "tokens" else "time"
        if any(row.get(key) is None for row in run.training):
            raise ConfigError(f"{run.folder}: metrics.jsonl has no {key!r} in some rows, which --x {x} needs")
        along = _column(run.training, key)
        if x == "time":  # a clock that is set back adds nothing
            along = np.concatenate([[0.0], np.cumsum(np.maximum(0.0, np.diff(along)))])
    # A validation row has neither tokens nor a time of its own step.
    validation_x = _places(run, run.validation, along)
    return Curve(along, _column(run.training, "loss"), validation_x, _column(run.validation, "validation_loss"))


def _places(run: Run, rows: list[dict], along: np.ndarray) -> np.ndarray:
    """Return where rows are on the x-axis: between the training rows, or behind the last one at the rate before it."""
    steps, wanted = _column(run.training, "step"), _column(rows, "step")
    places = np.interp(wanted, steps, along)
    if len(steps) > 1:
        rate = (along[-1] - along[-2]) / (steps[-1] - steps[-2])
        places = np.where(wanted > steps[-1], along[-1] + rate * (wanted - steps[-1]), places)
    return places


def window(curve: Curve, points: int | None) -> int:
    """Return over how many points the mean goes: an odd number; 1 is no smoothing.

    Args:
        points: the number, rounded up to an odd one. None: about 4 % of a long curve, 1 for a short one.
    """
    if points is None:
        return 2 * (len(curve.x) // 50) + 1 if len(curve.x) >= SMOOTH_FROM else 1
    return 2 * (points // 2) + 1


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


def values_at(x: np.ndarray, other_x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return ``values`` at ``x``; NaN where ``other_x`` ends, and beside a value that is not finite."""
    if not len(other_x):
        return np.full(len(x), np.nan)
    with np.errstate(invalid="ignore"):
        return np.interp(x, other_x, np.where(np.isfinite(values), values, np.nan), left=np.nan, right=np.nan)


def _column(rows: list[dict], key: str) -> np.ndarray:
    return np.array([row[key] for row in rows], dtype=float)


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
        baseline: one of ``runs``; a second panel shows the other runs' losses minus its losses.
        smooth: number of logged points in the mean of a smoothed curve; 1 for no smoothing, None for a number that
            follows from the length of the curve. The plot states it.
        x: the x-axis.

    Raises ConfigError if ``path`` does not end in ".png" or cannot be written, or if a run has not logged ``x``.
    """
    path = picture_path(path)
    curves = [curve(run, x) for run in runs]
    scale, x_label = _x_label(x, max((c.x[-1] for c in curves), default=0.0))
    marks = [_places(run, run.events, one.x) / scale for run, one in zip(runs, curves)]
    curves = [replace(one, x=one.x / scale, validation_x=one.validation_x / scale) for one in curves]
    windows = [window(one, smooth) for one in curves]
    names = labels(runs)

    from matplotlib.figure import Figure  # without pyplot there is no display and no global state

    figure = Figure(figsize=(9, 5.5 if baseline is None else 8), dpi=120, layout="constrained")
    ratios = [1] if baseline is None else [3, 2]
    panels = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": ratios})[:, 0]
    styles = [line_style(index, len(runs)) for index in range(len(runs))]
    for run, name, one, points, own in zip(runs, names, curves, windows, styles):
        if run.first_nonfinite_step is not None:
            name += f" (not finite at step {run.first_nonfinite_step})"
        _draw(panels[0], one, points, own, literal(name) if len(runs) > 1 else "training")
    for run, places, own in zip(runs, marks, styles):
        _mark(panels, places, [row[EVENT] for row in run.events], own["color"])
    if any(run.validation for run in runs):
        panels[0].plot([], [], label="validation", color="white", **VALIDATION_MARKER)  # one entry for all runs
    panels[0].set_title(literal(names[0]) if len(runs) == 1 else "Training loss")
    panels[0].set_ylabel("loss (nats per token)")
    if baseline is not None:
        place = next(index for index, run in enumerate(runs) if run is baseline)
        panels[1].axhline(0, **{**styles[place], "linewidth": 1.2})
        for index, (one, points, own) in enumerate(zip(curves, windows, styles)):
            if index != place:
                _draw(panels[1], one.minus(curves[place]), points, own)
        panels[1].set_ylabel(f"loss minus that of\n{literal(_short(baseline.name))}")
    panels[-1].set_xlabel(x_label)
    _finish(figure, panels, x, windows)
    save_picture(figure, path)
    return path


def line_style(index: int, count: int = 1) -> dict:
    """Return the style of a curve. Of equal curves the first is the widest, and shows beside the others."""
    width = 1.6 + 0.7 * max(0, min(count, 4) - 1 - index)
    return {"color": COLORS[index % 7], "linestyle": LINE_STYLES[index % 4], "linewidth": width}


def _draw(axes, one: Curve, points: int, own: dict, label: str | None = None) -> None:
    """Draw all points, the mean over ``points`` of them if that is more than one, and the validation losses."""
    if points > 1:
        axes.plot(one.x, one.loss, color=own["color"], alpha=0.25, linewidth=0.8)
        axes.plot(one.x, one.smoothed(points).loss, **own, label=label)
    else:
        axes.plot(one.x, one.loss, **own, marker=".", markersize=5, label=label)
    if len(one.validation_x):
        axes.plot(one.validation_x, one.validation_loss, color=own["color"], **VALIDATION_MARKER)


def _mark(panels, places: np.ndarray, texts: list[str], color: str) -> None:
    """Draw a vertical line where something changes in a run, with a label in the first panel."""
    lines: dict[float, list[str]] = {}
    for place, text in zip(places.tolist(), texts):
        lines.setdefault(place, []).append(_short(text))
    for place, words in lines.items():
        for axes in panels:
            axes.axvline(place, color=color, linestyle=":", linewidth=1, alpha=0.8)
        # Half-way up: a loss curve begins above, ends below, and the legend is above.
        style = {"rotation": 90, "ha": "right", "va": "center", "fontsize": 7, "color": color}
        panels[0].text(place, 0.5, "\n".join(words), transform=panels[0].get_xaxis_transform(), **style)


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
        few, many = min(windows), max(windows)
        number = str(many) if few == many else f"{few} to {many}"
        figure.supxlabel(f"faint: every logged step; strong: mean of {number} logged steps", fontsize=8, color="0.4")
    handles, names = panels[0].get_legend_handles_labels()
    options = {"frameon": False, "handlelength": 3.5}
    if len(windows) <= LEGEND_INSIDE:
        panels[0].legend(handles, names, loc="upper right", fontsize=9, **options)
    else:
        figure.legend(handles, names, loc="outside upper center", ncols=2, fontsize=8, **options)


def _x_label(x: XAxis, last: float) -> tuple[float, str]:
    """Return by what to divide the values on the x-axis, whose last one is ``last``, and the label of the axis."""
    if x != "time":
        return 1.0, {"step": "step", "tokens": "tokens seen"}[x]
    unit, seconds = next(((u, s) for u, s in (("h", 3600.0), ("min", 60.0)) if last >= 2 * s), ("s", 1.0))
    return seconds, f"time since the first logged step ({unit})"


def _short(name: str) -> str:
    return name if len(name) <= 30 else f"{name[:29]}…"
