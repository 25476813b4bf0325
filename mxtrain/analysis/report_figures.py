"""The figures of a report: paired differences, losses against learning rates, and curves as differences.

A difference is a run's loss minus the loss of the baseline's run with the same seed and learning rate.
"""

import io
import math
import textwrap
from collections.abc import Hashable, Iterable, Mapping

import numpy as np

from mxtrain.analysis.comparison import CONFIDENCE, Estimate, Group, PairedDifference
from mxtrain.analysis.plots import COLORS, Curve, curve, in_own_style, line_style, literal, values_at, window

WIDTH = 9
"""Inches. A README shows this width in about 850 pixels, and a font size of 9 in 12 pixels"""
TITLE, FONT_SIZE, SMALL = 11, 10, 9
ROW_HEIGHT = 0.4
COLUMNS = 3
"""Panels of curves beside each other"""
MARKERS = "osD^vPX"
OUTLIER = 3.0
"""A variant whose differences are so many times those of the next one leaves the scale, which the others would lose"""
LINEAR_BELOW = 0.01
"""Nats. The axis of differences against learning rates is linear up to here, and logarithmic beyond"""
SVG_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "mxtrain", "path.simplify_threshold": 0.5}
"""Text stays text, and equal drawings are equal files"""


def difference_text(value: Estimate | None) -> str:
    """Return a paired difference as text: "+0.0150 [-0.0485, +0.0785] (2 pairs)"."""
    if value is None:
        return "no pair"
    if value.half_width is None:
        return f"{value.mean:+.4f} (one pair)"
    low, high = value.mean - value.half_width, value.mean + value.half_width
    return f"{value.mean:+.4f} [{low:+.4f}, {high:+.4f}] ({value.count} pairs)"


@in_own_style
def differences_svg(group: Group) -> str:
    """Draw the paired differences: a panel per learning rate, a row per variant; empty without a pair."""
    name, loss = _compared_loss(group)
    rows: dict[float | None, list[tuple[str, PairedDifference]]] = {}
    for cell in group.cells:
        if found := getattr(cell, f"{name}_difference"):
            rows.setdefault(cell.lr, []).append((cell.variant, found))
    if not rows:
        return ""
    heights = [len(own) + 1 for own in rows.values()]
    figure = _figure(ROW_HEIGHT * sum(heights) + 1.5)
    panels = figure.subplots(len(rows), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    seeds = sorted({seed for own in rows.values() for _, found in own for seed in found.by_seed})
    for axes, (rate, own) in zip(panels, rows.items()):
        _draw_differences(axes, sorted(own, key=lambda row: row[1].mean), seeds)
        if rate is not None:
            axes.set_title(f"learning rate {rate:g}", fontsize=FONT_SIZE, loc="left")
    panels[-1].set_xlabel("difference (nats per token); left of zero is better than the baseline")
    figure.suptitle(_wrapped(f"{loss.capitalize()} minus that of {group.baseline}: {group.title}"), fontsize=TITLE)
    order = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" + " from top to bottom" * (len(seeds) > 1)
    _note(
        figure,
        f"Circles: pairs of runs, {order}. Diamonds and lines: mean and {100 * CONFIDENCE:g} % interval of "
        "Student's t,\nin numbers on the right. Arrows: beyond the scale.",
    )
    return _svg(figure)


def _draw_differences(axes, rows: list[tuple[str, PairedDifference]], seeds: list) -> None:
    """Draw a row per variant. The scale is that of the circles; intervals and variants far beyond it become arrows."""
    from matplotlib.ticker import MaxNLocator

    reach = 1.6 * scale([max(map(abs, found.by_seed.values())) for _, found in rows])
    intervals = [(found.mean - (found.half_width or 0), found.mean + (found.half_width or 0)) for _, found in rows]
    low, high = _limits([*intervals, *(list(found.by_seed.values()) for _, found in rows)], reach, 0.06)
    axes.axvline(0, color="black", linewidth=1)
    axes.hlines(np.arange(0.5, len(rows) - 1), low, high, color="0.9", linewidth=0.8)
    for row, ((_, found), (left, right)) in enumerate(zip(rows, intervals)):
        place = row + 0.2  # below the circles
        if found.error is not None:
            axes.plot(np.clip([left, right], low, high), [place, place], color="black", linewidth=1.6)
            axes.plot(found.mean, place, "D", color="black", markersize=6)
        for edge, marker, is_beyond in ((low, "<", left < low), (high, ">", right > high)):
            if is_beyond:
                axes.plot(edge, place, marker, color="black", markersize=7, clip_on=False)
        for seed, value in found.by_seed.items():
            height = row - 0.35 + 0.35 * (seeds.index(seed) + 0.5) / len(seeds)
            axes.plot(value, height, "o", color=COLORS[1], markersize=5.5, markeredgecolor="white", markeredgewidth=0.6)
    axes.set_xlim(low, high)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_yticks(range(len(rows)), [literal(variant) for variant, _ in rows])
    numbers = axes.secondary_yaxis("right")
    numbers.set_yticks(range(len(rows)), [difference_text(found) for _, found in rows], fontsize=SMALL)
    for one in (axes, numbers):
        one.tick_params(axis="y", length=0, pad=9)  # room for an arrow
        one.spines[["left", "right"] if one is axes else ["right"]].set_visible(False)


def scale(extents: Iterable[float]) -> float:
    """Return how far a scale reaches: the largest extent, or the last one before a jump by more than OUTLIER."""
    extents = sorted(extents)
    reach = extents[len(extents) // 2]
    for extent in extents[len(extents) // 2 + 1 :]:
        if extent > OUTLIER * reach > 0:
            break
        reach = extent
    return reach


def _limits(values: Iterable[Iterable[float]], reach: float, margin: float) -> tuple[float, float]:
    """Return the limits of an axis with zero and all ``values``, but for those beyond ``reach``."""
    inside = np.clip([0.0, *(value for own in values for value in own)], -reach, reach)
    room = margin * (inside.max() - inside.min()) or 1e-4
    return inside.min() - room, inside.max() + room


@in_own_style
def rates_svg(group: Group) -> str:
    """Draw the final loss, and its paired difference, against the learning rate; empty with fewer than two rates."""
    cells = [cell for cell in group.cells if cell.lr is not None]
    rates = sorted({cell.lr for cell in cells})
    if len(rates) < 2:
        return ""
    name, loss = _compared_loss(group)
    figure = _figure(8)
    upper, lower = figure.subplots(2, 1, sharex=True)
    styles = _styles(group)
    for index, (variant, style) in enumerate(styles.items()):
        # Side by side, so that no bar hides another: together a fifth of the distance between rates.
        factor = min(b / a for a, b in zip(rates, rates[1:])) ** (0.2 * ((index + 0.5) / len(styles) - 0.5))
        own = [cell for cell in cells if cell.variant == variant]
        means = [getattr(cell, name).mean for cell in own]
        upper.plot([factor * cell.lr for cell in own], means, **style, label=literal(variant))
        paired = [(cell.lr, found) for cell in own if (found := getattr(cell, f"{name}_difference"))]
        if paired:
            x, y = [factor * lr for lr, _ in paired], [found.mean for _, found in paired]
            errors = [found.error or math.nan for _, found in paired]
            lower.errorbar(x, y, errors, **style, capsize=3, elinewidth=1.2)
    lower.axhline(0, color="black", linewidth=1)
    lower.set_yscale("symlog", linthresh=LINEAR_BELOW)
    lower.yaxis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")
    lower.set_xscale("log")
    lower.set_xticks(rates, [f"{rate:g}" for rate in rates])
    lower.minorticks_off()
    lower.set_xlabel("learning rate")
    upper.set_ylabel(f"{loss} (nats per token)")
    lower.set_ylabel(f"minus that of {literal(group.baseline)}")
    upper.set_title(_wrapped(f"{loss.capitalize()} against the learning rate: {group.title}"), fontsize=TITLE)
    _note(
        figure,
        "Below: mean and standard error of the paired differences, on an axis that is logarithmic beyond "
        f"±{LINEAR_BELOW:g}.\nPoints of one rate are side by side.",
    )
    figure.legend(loc="outside upper center", frameon=False, fontsize=SMALL, handlelength=4, ncols=2)
    return _svg(figure)


@in_own_style
def curves_svg(group: Group) -> str:
    """Draw the curves of every learning rate, see ``draw_curves``; empty if the results have no curves."""
    results = [result for result in group.results if result.run is not None]
    if not results:
        return ""
    axis = "tokens" if all(r.get("tokens_seen") is not None for one in results for r in one.run.training) else "step"
    by_rate: dict[float | None, dict[str, dict]] = {cell.lr: {} for cell in group.cells}
    for result in results:
        # A run without a seed has no pair.
        seed = str(result.run.folder) if result.seed is None else result.seed
        by_rate[result.lr].setdefault(result.variant, {})[seed] = curve(result.run, axis)
    by_rate = {rate: own for rate, own in by_rate.items() if group.baseline in own}
    rows = [math.ceil(len(own) / columns_of(len(own))) for own in by_rate.values()]
    figure = _figure(2.6 * sum(rows) + 0.5 * len(rows) + 0.8)
    parts = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0]
    for part, (rate, own) in zip(parts, by_rate.items()):
        title = group.title + ("" if rate is None else f", learning rate {rate:g}")
        draw_curves(part, own, group.baseline, title, "tokens seen" if axis == "tokens" else "step")
    return _svg(figure)


def draw_curves(
    figure, curves: Mapping[str, Mapping[Hashable, Curve]], baseline: str, title: str, x_label: str = "step"
) -> None:
    """Draw the baseline's training loss, and in a panel per other variant the paired differences to it.

    Args:
        curves: variant -> seed -> curve. Seeds that the baseline lacks have no difference.
    """
    from matplotlib.ticker import EngFormatter

    of_baseline = curves[baseline]
    points = window(next(iter(of_baseline.values())), None)
    shown = {baseline: of_baseline}
    for name, own in curves.items():
        pairs = {seed: one.minus(of_baseline[seed]) for seed, one in own.items() if seed in of_baseline}
        if name != baseline and pairs:
            shown[name] = pairs
    drawn = {name: _on_one_axis([one.smoothed(points) for one in own.values()]) for name, own in shown.items()}
    ends = {name: np.nanquantile(values, (0.01, 0.99)) for name, (_, values) in drawn.items() if name != baseline}
    reach = scale(np.abs(own).max() for own in ends.values()) if ends else 1.0
    limits = _limits(ends.values(), reach, 0.15)
    columns = columns_of(len(drawn))
    panels = figure.subplots(math.ceil(len(drawn) / columns), columns, squeeze=False).flatten()
    for axes in panels[len(drawn) :]:
        axes.set_visible(False)
    for axes, (name, (x, values)) in zip(panels, drawn.items()):
        color = "black" if name == baseline else COLORS[0]
        axes.plot(x, values.T, color=color, alpha=0.35, linewidth=0.7)
        axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
        axes.plot(x, values.mean(axis=0), color=color, linewidth=1.6)
        axes.set_title(literal(textwrap.fill(name, 34)), fontsize=FONT_SIZE)
        axes.set_xlabel(x_label, fontsize=SMALL)
        axes.set_ylabel("training loss (nats)" if name == baseline else "difference (nats)", fontsize=SMALL)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.tick_params(labelsize=SMALL)
        axes.grid(alpha=0.25)
        if name != baseline:
            axes.axhline(0, color="black", linewidth=1)
            axes.set_ylim(limits)
            if np.abs(ends[name]).max() > reach:
                beyond = "beyond the scale: from {:+.2g} to {:+.2g}".format(*ends[name])
                axes.text(0.5, 0.5, beyond, transform=axes.transAxes, ha="center", fontsize=SMALL)
    figure.suptitle(_wrapped(f"Training loss of {baseline}, and paired differences to it: {title}"), fontsize=TITLE)
    _note(
        figure,
        "Lines: mean over seeds, where all of them are. Bands: from the lowest to the highest seed."
        + (f"\nAll are means of {points} logged steps." if points > 1 else ""),
    )


def columns_of(count: int) -> int:
    """Return how many of so many panels are beside each other."""
    return {1: 1, 2: 2, 4: 2}.get(count, COLUMNS)


def _on_one_axis(curves: list[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Return the x of the longest curve, and all losses there [curves, points]; NaN where a curve has none."""
    x = max((one.x for one in curves), key=lambda x: x[-1])
    return x, np.array([values_at(x, one.x, one.loss) for one in curves])


def _compared_loss(group: Group) -> tuple[str, str]:
    """Return the field of a Cell, and the name, of the loss that figures show: validation, if all have it."""
    is_validated = all(cell.validation for cell in group.cells)
    return ("validation", "validation loss") if is_validated else ("tail", "training loss of the last 10 %")


def _styles(group: Group) -> dict[str, dict]:
    """Return a style per variant. Hollow markers, gaps and falling widths show what is below."""
    names = dict.fromkeys(cell.variant for cell in group.cells)
    hollow = {"markerfacecolor": "white", "markersize": 6}
    return {
        name: {**line_style(i, len(names)), "marker": MARKERS[i % len(MARKERS)], **hollow}
        for i, name in enumerate(names)
    }


def _note(figure, text: str) -> None:
    figure.supxlabel(text, fontsize=SMALL, color="0.3")


def _wrapped(title: str) -> str:
    return literal(textwrap.fill(title, 90))


def _figure(height: float):
    from matplotlib.figure import Figure  # slow, and without pyplot there is no display

    return Figure(figsize=(WIDTH, height), layout="constrained")


def _svg(figure) -> str:
    from matplotlib import rc_context

    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    text = io.StringIO()
    with rc_context(SVG_SETTINGS):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
