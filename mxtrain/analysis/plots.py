"""Draws loss curves of one or more runs: over steps, tokens or time, smoothed, and as differences.

Size, style and colors are those of all pictures. In the column of a paper, 3.3 inches wide, letters have 6 points.
"""

import functools
import io
import math
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from mxtrain.analysis.metrics_file import EVENT
from mxtrain.analysis.runs import Run, labels
from mxtrain.errors import ConfigError, raised_as
from mxtrain.files import os_errors_as, replace_file

if TYPE_CHECKING:
    import pandas as pd

XAxis = Literal["step", "tokens", "time"]
KEYS = {"step": "step", "tokens": "tokens_seen", "time": "time"}
"""x-axis -> key in the rows of metrics.jsonl"""
X_LABELS = {"step": "step", "tokens": "tokens seen", "time": "hours since the first logged step"}

WIDTH, PAGE = 5.0, 7.5
"""Inches: width of a picture, and of a picture that fills a page"""
STYLE = {
    "font.size": 9, "axes.titlesize": 9, "figure.titlesize": 9, "figure.labelsize": 9, "legend.frameon": False,
    "figure.constrained_layout.use": True, "savefig.dpi": 200,
    "svg.fonttype": "none", "svg.hashsalt": "mxtrain", "pdf.fonttype": 42,
}  # fmt: skip
"""Matplotlib's settings. Text of an SVG or a PDF stays text, and equal drawings are equal SVGs"""
COLORS = ("#0072b2", "#e69f00", "#882255", "#44aa99", "#cc3311", "#785ef0", "#ca9161", "#33bbee")
"""Dark enough for white paper. With deuteranopia and protanopia, too, any two differ by more than 25 in CIELAB"""
LINE_STYLES = ("-", "--", ":", "-.")
"""A later curve leaves gaps, in which an equal one below it can be seen"""


def curves(run: Run, x: XAxis = "step") -> "tuple[pd.Series, pd.Series, pd.Series]":
    """Return a run's losses, validation losses and events over steps, tokens, or hours since the first logged step.

    Hours include the pauses of a resumed run. Validations and events have no tokens, and no time of their own step, so
    their places come from the training rows around them.

    Raises ConfigError if the run has not logged ``x``.
    """
    import pandas as pd

    key = KEYS[x]
    if any(row.get(key) is None for row in run.training):
        raise ConfigError(f"{run.folder}: metrics.jsonl has no {key!r} in some rows, which --x {x} needs")
    steps, along = (np.array([row[name] for row in run.training], float) for name in ("step", key))
    if x == "time":
        along = (along - along[0]) / 3600

    def series(rows: list[dict], name: str) -> "pd.Series":
        own = [row["step"] for row in rows]
        places = own if x == "step" else np.interp(own, steps, along)
        return pd.Series([row[name] for row in rows], places, dtype=None if rows else float)

    return series(run.training, "loss"), series(run.validation, "validation_loss"), series(run.events, EVENT)


def window(losses: "pd.Series", points: int | None) -> int:
    """Return over how many points the mean goes, an odd number. None: about 4 % of a curve of 50 or more, else 1."""
    return 2 * (len(losses) // 50 if points is None else points // 2) + 1


def moving_average(losses: "pd.Series", points: int) -> "pd.Series":
    """Return the centered mean of up to ``points`` neighbors, an odd number. Non-finite values are skipped, and NaN.

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
    """Let a function draw in STYLE, whatever the user's matplotlibrc says: it may want LaTeX."""

    @functools.wraps(draw)
    def drawn(*args, **kwargs):
        with raised_as("Matplotlib cannot start"):  # as with an unknown MPLBACKEND
            from matplotlib import style
        with style.context(["default", STYLE]):
            return draw(*args, **kwargs)

    return drawn


def literal(name: str) -> str:
    """Return a label that Matplotlib draws as ``name``: it reads $...$ as math, and hides labels that begin with _.

    Bytes of a folder's name that are no UTF-8 are question marks.
    """
    name = name.encode("utf-8", "replace").decode()
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def line_style(index: int) -> dict:
    """Return color and dashes of a line. No two of the first 32 look the same."""
    return {"color": COLORS[index % 8], "linestyle": LINE_STYLES[(index + index // 8) % 4]}


def rendered(figure, form: str) -> bytes:
    """Return a figure as "png", "svg" or "pdf"."""
    content = io.BytesIO()
    figure.savefig(content, format=form, metadata={"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form))
    return content.getvalue()


def save_picture(figure, path: str | os.PathLike) -> Path:
    """Write ``figure`` to ``path`` at once, or leave the file as it was, and return ``path``."""
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"the picture {str(path)!r} is not a PNG, SVG or PDF; end its name in .png, .svg or .pdf")
    content = rendered(figure, path.suffix[1:].lower())
    with os_errors_as(f"the picture {path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    return path


@in_own_style
def plot(
    runs: list[Run], path: str | os.PathLike, differences: bool = False, smooth: int | None = None, x: XAxis = "step"
) -> Path:
    """Draw training loss, one line per run, validation losses as diamonds, and events as vertical lines.

    Losses that are not finite leave gaps, and the run's label names the first such step. Creates the folder of
    ``path`` if needed. Returns ``path``.

    Args:
        differences: a second panel shows the losses of the other runs minus those of the first one.
        smooth: number of neighboring points in a mean, rounded up to an odd number; 1 draws none. None takes about 4 %
            of the longest curve. The plot states it.
        x: the x-axis.
    """
    found = [curves(run, x) for run in runs]
    points = window(max((losses for losses, *_ in found), key=len), smooth)

    from matplotlib.figure import Figure  # without pyplot there is no display and no global state

    steps = [run.first_nonfinite_step for run in runs]
    names = [name + f" (not finite at step {step})" * (step is not None) for name, step in zip(labels(runs), steps)]
    columns = 1 if max(map(len, names)) > 34 else 2
    figure = Figure((WIDTH, 3.2 + 2 * differences + 0.18 * math.ceil(len(runs) / columns)))
    panels = figure.subplots(1 + differences, 1, sharex=True, squeeze=False)[:, 0]
    base = found[0]
    for index, (name, (losses, validation, events)) in enumerate(zip(names, found)):
        style = line_style(index)
        _draw(panels[0], losses, validation, points, style, literal(name))
        if differences and index > 0:
            _draw(panels[1], minus(losses, base[0]), minus(validation, base[1]), points, style, None)
        for place, texts in events.groupby(level=0):
            for axes in panels:
                axes.axvline(place, color=style["color"], linestyle=":", linewidth=1)
            # Half-way up: a loss curve begins above and ends below.
            text = literal("\n".join(textwrap.fill(each, 24, max_lines=2, placeholder=" ...") for each in texts))
            where = {"rotation": 90, "ha": "right", "va": "center", "transform": panels[0].get_xaxis_transform()}
            panels[0].text(place, 0.5, text, color=style["color"], **where)
    smoothed = f"\nstrong: mean of {points} logged steps" if points > 1 else ""
    panels[0].set(title=f"Training loss; diamonds: validation{smoothed}", ylabel="loss (nats per token)")
    if differences:
        panels[1].axhline(0, color="black", linewidth=1)
        panels[1].set_ylabel(f"loss minus that of\n{literal(runs[0].name)}")
    panels[-1].set_xlabel(X_LABELS[x])
    for axes in panels:
        axes.grid(alpha=0.25)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns)
    return save_picture(figure, path)


def _draw(axes, losses: "pd.Series", validation: "pd.Series", points: int, style: dict, label: str | None) -> None:
    """Draw all points, the mean over ``points`` of them if that is more than one, and the validation losses."""
    if points > 1:
        axes.plot(losses, color=style["color"], alpha=0.25, linewidth=0.8)
        axes.plot(moving_average(losses, points), **style, label=label)
    else:
        axes.plot(losses, **style, marker=".", markersize=5, label=label)
    axes.plot(validation, "D", color=style["color"], markersize=5, markeredgecolor="black")
