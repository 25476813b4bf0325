"""The figures of a report: paired differences, losses against learning rates, and curves as differences.

A difference is a run's loss minus the loss of the baseline's run with the same seed and learning rate.
"""

import io
import math
import textwrap
from collections.abc import Hashable, Iterable, Mapping

import numpy as np

from mxtrain.analysis.comparison import CONFIDENCE, Estimate, Group
from mxtrain.analysis.plots import COLORS, Curve, curve, in_own_style, line_style, literal, values_at, window

WIDTH, ROW_HEIGHT = 9, 0.4
"""Inches. A README shows this width in about 850 pixels, and a font size of 9 in 12 pixels"""
FONT_SIZE, SMALL = 10, 9
MARKERS = "osD^vPX"
OUTLIER = 5.0
"""A variant whose differences are so many times those of the next one leaves the scale, which the others would lose"""
LINEAR_BELOW = 0.01
"""Nats. The axis of differences against learning rates is linear up to here, and logarithmic beyond"""
SVG_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "mxtrain", "path.simplify_threshold": 0.5}
"""Text stays text, and equal drawings are equal files"""


def difference_text(value: Estimate | None) -> str:
    """Return a paired difference as text: "+0.0150 [-0.0485, +0.0785] (2 pairs)"."""
    if value is None:
        return "no pair"
    if value.error is None:
        return f"{value.mean:+.4f} (one pair)"
    return "{:+.4f} [{:+.4f}, {:+.4f}] ({} pairs)".format(value.mean, *value.interval, value.count)


@in_own_style
def differences_svg(group: Group) -> str:
    """Draw the paired differences: a panel per learning rate, a row per variant; empty without a pair."""
    name, loss = _compared_loss(group)
    rows: dict[float | None, list[tuple[str, Estimate]]] = {}
    for cell in group.cells:
        if found := getattr(cell, f"{name}_difference"):
            rows.setdefault(cell.lr, []).append((cell.variant, found))
    if not rows:
        return ""
    heights = [len(own) + 1 for own in rows.values()]
    figure = _figure(ROW_HEIGHT * sum(heights) + 1.5)
    panels = figure.subplots(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    seeds = sorted({seed for own in rows.values() for _, found in own for seed in found.by_seed})
    for axes, (rate, own) in zip(panels, rows.items()):
        _draw_differences(axes, sorted(own, key=lambda row: row[1].mean), seeds)
        axes.set_title("" if rate is None else f"learning rate {rate:g}", fontsize=FONT_SIZE, loc="left")
    panels[-1].set_xlabel("difference (nats per token); left of zero is better than the baseline")
    order = f"seeds {', '.join(map(str, seeds))} from top to bottom" if len(seeds) > 1 else f"seed {seeds[0]}"
    _title(
        figure,
        f"{loss} minus that of {group.baseline}: {group.title}",
        f"Circles: pairs of runs, {order}. Diamonds and lines: mean and {100 * CONFIDENCE:g} % interval of "
        "Student's t,\nin numbers on the right. Arrows: beyond the scale.",
    )
    return _svg(figure)


def _draw_differences(axes, rows: list[tuple[str, Estimate]], seeds: list) -> None:
    """Draw a row per variant. The scale is that of the circles; intervals and variants far beyond it become arrows."""
    reach = 1.6 * scale(max(map(abs, found.by_seed.values())) for _, found in rows)
    low, high = _limits([(*found.interval, *found.by_seed.values()) for _, found in rows], reach, 0.06)
    axes.axvline(0, color="black", linewidth=1)
    axes.hlines(np.arange(0.5, len(rows) - 1), low, high, color="0.9", linewidth=0.8)
    for row, (_, found) in enumerate(rows):
        place, ends = row + 0.2, found.interval  # below the circles
        if found.error is not None:
            axes.plot(np.clip(ends, low, high), [place, place], color="black", linewidth=1.6)
            axes.plot(found.mean, place, "D", color="black", markersize=6)
        for edge, marker, is_beyond in ((low, "<", ends[0] < low), (high, ">", ends[1] > high)):
            if is_beyond:
                axes.plot(edge, place, marker, color="black", markersize=7, clip_on=False)
        for seed, value in found.by_seed.items():
            height = row - 0.35 + 0.35 * (seeds.index(seed) + 0.5) / len(seeds)
            axes.plot(value, height, "o", color=COLORS[1], markersize=5.5, markeredgecolor="white", markeredgewidth=0.6)
        axes.annotate(difference_text(found), (1.03, row), xycoords=axes.get_yaxis_transform(), va="center", size=SMALL)
    axes.set(xlim=(low, high), ylim=(len(rows) - 0.5, -0.5))
    axes.locator_params("x", nbins=5)
    axes.set_yticks(range(len(rows)), [literal(variant) for variant, _ in rows])
    axes.tick_params("y", length=0, pad=9)  # room for an arrow
    axes.spines["left"].set_visible(False)


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
    room = margin * np.ptp(inside) or 1e-4
    return inside.min() - room, inside.max() + room


@in_own_style
def rates_svg(group: Group) -> str:
    """Draw the final loss, and its paired difference, against the learning rate; empty with fewer than two rates."""
    cells = [cell for cell in group.cells if cell.lr is not None]
    rates, variants = sorted({cell.lr for cell in cells}), list(dict.fromkeys(cell.variant for cell in cells))
    if len(rates) < 2:
        return ""
    name, loss = _compared_loss(group)
    # Means over different seeds differ by what the seeds do. Their pairs do not.
    base = {cell.lr: getattr(cell, name).mean for cell in cells if cell.variant == group.baseline}
    figure = _figure(8)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for index, variant in enumerate(variants):
        # Hollow markers, gaps and falling widths show what is below.
        style = {**line_style(index, len(variants)), "marker": MARKERS[index % 7], "markerfacecolor": "white"}
        # Side by side, so that no bar hides another: together a fifth of the distance between rates.
        factor = min(2.0, *(b / a for a, b in zip(rates, rates[1:]))) ** (0.2 * ((index + 0.5) / len(variants) - 0.5))
        points, pairs = [], []
        for cell in (cell for cell in cells if cell.variant == variant):
            found = getattr(cell, f"{name}_difference")
            points.append((factor * cell.lr, base[cell.lr] + found.mean if found else getattr(cell, name).mean))
            pairs += [(factor * cell.lr, found.mean, found.error or math.nan)] if found else []
        upper.plot(*zip(*points), **style, label=literal(variant))
        if pairs:
            lower.errorbar(*zip(*pairs), **style, capsize=3, elinewidth=1.2)
    lower.axhline(0, color="black", linewidth=1)
    lower.set(xscale="log", xlabel="learning rate", ylabel=f"minus that of {literal(group.baseline)}")
    lower.set_yscale("symlog", linthresh=LINEAR_BELOW)
    lower.yaxis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")
    lower.set_xticks(rates, [f"{rate:g}" for rate in rates])
    lower.minorticks_off()
    upper.set_ylabel("nats per token")
    upper.legend(loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False, fontsize=SMALL, handlelength=4, ncols=2)
    _title(
        figure,
        f"{loss} against the learning rate: {group.title}",
        "Above: the baseline's mean, and this plus the mean of a variant's paired differences. Below: these means,\n"
        f"their standard errors, on an axis that is logarithmic beyond ±{LINEAR_BELOW:g}. Points of a rate are apart.",
    )
    return _svg(figure)


@in_own_style
def curves_svg(group: Group) -> str:
    """Draw the curves of every learning rate, see ``draw_curves``; empty if the results have no curves."""
    results = [result for result in group.results if result.run is not None]
    has_tokens = all(row.get("tokens_seen") is not None for result in results for row in result.run.training)
    by_rate: dict[float | None, dict[str, dict]] = {cell.lr: {} for cell in group.cells}
    for result in results:
        # A run without a seed has no pair.
        seed = str(result.run.folder) if result.seed is None else result.seed
        by_rate[result.lr].setdefault(result.variant, {})[seed] = curve(result.run, "tokens" if has_tokens else "step")
    by_rate = {rate: own for rate, own in by_rate.items() if group.baseline in own}
    if not by_rate:
        return ""
    rows = [math.ceil(len(own) / columns_of(len(own))) for own in by_rate.values()]
    figure = _figure(2.6 * sum(rows) + 0.5 * len(rows) + 0.8)
    parts = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0]
    for part, (rate, own) in zip(parts, by_rate.items()):
        title = group.title + ("" if rate is None else f", learning rate {rate:g}")
        draw_curves(part, own, group.baseline, title, "tokens seen" if has_tokens else "step")
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
    drawn: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name in sorted(curves, key=lambda name: name != baseline):
        pairs = [(one, of_baseline[seed]) for seed, one in curves[name].items() if seed in of_baseline]
        own = [(one if name == baseline else one.minus(base)).smoothed(points) for one, base in pairs]
        if own:
            x = max((one.x for one in own), key=lambda x: x[-1])
            drawn[name] = x, np.array([values_at(x, one.x, one.loss) for one in own])  # NaN where a curve has ended
    ends = {name: np.nanquantile(losses, (0.01, 0.99)) for name, (_, losses) in drawn.items() if name != baseline}
    reach = scale(np.abs(own).max() for own in ends.values()) if ends else 1.0
    limits, columns = _limits(ends.values(), reach, 0.15), columns_of(len(drawn))
    panels = figure.subplots(math.ceil(len(drawn) / columns), columns, squeeze=False).flatten()
    for axes in panels[len(drawn) :]:
        axes.set_visible(False)
    for axes, (name, (x, losses)) in zip(panels, drawn.items()):
        color = "black" if name == baseline else COLORS[0]
        axes.plot(x, losses.T, color=color, alpha=0.35, linewidth=0.7)
        axes.fill_between(x, losses.min(axis=0), losses.max(axis=0), color=color, alpha=0.2, linewidth=0)
        axes.plot(x, losses.mean(axis=0), color=color, linewidth=1.6)
        axes.set_title(literal(textwrap.fill(name, 34)), fontsize=FONT_SIZE)
        axes.set(xlabel=x_label, ylabel=f"{'loss' if name == baseline else 'difference'} (nats per token)")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.locator_params("x", nbins=6)
        axes.set_xlim(0, max(one[-1] for one, _ in drawn.values()))
        axes.grid(alpha=0.25)
        if name != baseline:
            axes.axhline(0, color="black", linewidth=1)
            axes.set_ylim(limits)
            if np.abs(ends[name]).max() > reach:
                beyond = "beyond the scale: from {:+.2g} to {:+.2g}".format(*ends[name])
                axes.text(0.5, 0.5, beyond, transform=axes.transAxes, ha="center", fontsize=SMALL)
    note = "Lines: mean over seeds, where all of them are. Bands: from the lowest to the highest seed."
    note += f"\nAll are means of {points} logged steps." * (points > 1)
    _title(figure, f"Training loss of {baseline}, and paired differences to it: {title}", note)


def columns_of(count: int) -> int:
    """Return how many of so many panels are beside each other."""
    return min(3, math.isqrt(count - 1) + 1)


def _compared_loss(group: Group) -> tuple[str, str]:
    """Return the field of a Cell, and the name, of the loss that figures show: validation, if all have it."""
    is_validated = all(cell.validation for cell in group.cells)
    return ("validation", "Validation loss") if is_validated else ("tail", "Training loss of the last 10 %")


def _title(figure, title: str, note: str) -> None:
    figure.suptitle(literal(textwrap.fill(title, 90)), fontsize=11)
    figure.supxlabel(note, fontsize=SMALL, color="0.3")


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
