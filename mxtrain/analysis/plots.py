"""Draws loss curves of one or more runs as a PNG."""

import os
from itertools import cycle
from pathlib import Path

from mxtrain.analysis.curves import Curve, XAxis, curve, events, window
from mxtrain.analysis.labels import labels
from mxtrain.analysis.pictures import in_own_style, literal, save_picture
from mxtrain.analysis.runs import Run
from mxtrain.errors import ConfigError

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
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ConfigError(f"the picture {str(path)!r} is not the name of a PNG file; end it in .png")
    curves = [curve(run, x) for run in runs]
    scale, x_label = _x_label(x, max((c.x[-1] for c in curves), default=0.0))
    curves = [Curve(c.x / scale, c.loss, c.validation_x / scale, c.validation_loss) for c in curves]
    names = labels(runs)

    from matplotlib.figure import Figure  # without pyplot there is no display and no global state

    figure = Figure(figsize=(9, 5.5 if baseline is None else 8), dpi=120, layout="constrained")
    ratios = [1] if baseline is None else [3, 2]
    panels = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": ratios})[:, 0]
    styles = _styles(len(runs))
    for run, name, one, style in zip(runs, names, curves, styles):
        if run.first_nonfinite_step is not None:
            name += f" (not finite at step {run.first_nonfinite_step})"
        _draw(panels[0], one, window(one, smooth), style, literal(name) if len(runs) > 1 else "training")
    for run, style in zip(runs, styles):
        _mark(panels, [(place / scale, text) for place, text in events(run, x)], style["color"])
    if any(run.validation for run in runs):
        panels[0].plot([], [], label="validation", color="white", **VALIDATION_MARKER)  # one entry for all runs
    panels[0].set_title(literal(names[0]) if len(runs) == 1 else "Training loss")
    panels[0].set_ylabel("loss (nats per token)")
    if baseline is not None:
        place = next(index for index, run in enumerate(runs) if run is baseline)
        panels[1].axhline(0, **{**styles[place], "linewidth": 1.2})
        for index, (one, style) in enumerate(zip(curves, styles)):
            if index != place:
                _draw(panels[1], one.minus(curves[place]), window(one, smooth), style)
        panels[1].set_ylabel(f"loss minus that of\n{literal(_short(baseline.name))}")
    _finish(figure, panels, x, x_label, [window(one, smooth) for one in curves])

    save_picture(figure, path)
    return path


def _styles(count: int) -> list[dict]:
    """Return the style of each curve. Of equal curves the first is the widest, and shows beside the others."""
    widths = [1.6 + 0.7 * max(0, min(count, 4) - 1 - index) for index in range(count)]
    return [
        {"color": color, "linestyle": style, "linewidth": width}
        for color, style, width in zip(cycle(COLORS), cycle(LINE_STYLES), widths)
    ]


def _draw(axes, one: Curve, points: int, style: dict, label: str | None = None) -> None:
    """Draw all points, the mean over ``points`` of them if that is more than one, and the validation losses."""
    if points > 1:
        axes.plot(one.x, one.loss, color=style["color"], alpha=0.25, linewidth=0.8)
        axes.plot(one.x, one.smoothed(points).loss, **style, label=label)
    else:
        axes.plot(one.x, one.loss, **style, marker=".", markersize=5, label=label)
    if len(one.validation_x):
        axes.plot(one.validation_x, one.validation_loss, color=style["color"], **VALIDATION_MARKER)


def _mark(panels, marks: list[tuple[float, str]], color: str) -> None:
    """Draw a vertical line where something changes in a run, with a label in the first panel."""
    texts: dict[float, list[str]] = {}
    for place, text in marks:
        texts.setdefault(place, []).append(_short(text))
    for place, lines in texts.items():
        for axes in panels:
            axes.axvline(place, color=color, linestyle=":", linewidth=1, alpha=0.8)
        # Half-way up: a loss curve begins above, ends below, and the legend is above.
        transform = panels[0].get_xaxis_transform()
        panels[0].text(
            place,
            0.5,
            "\n".join(lines),
            transform=transform,
            rotation=90,
            ha="right",
            va="center",
            fontsize=7,
            color=color,
        )


def _finish(figure, panels, x: XAxis, x_label: str, windows: list[int]) -> None:
    """Label the axes, and place the legend and the line about smoothing."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(x_label)
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
