"""A comparison as a Markdown table, and as a figure of paired differences."""

import math
import textwrap
from collections.abc import Iterable
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from mxtrain.analysis.comparison import CONFIDENCE, LOSSES, Estimate, Group, estimate
from mxtrain.analysis.plots import COLORS, WIDTH, in_own_style, literal, rendered

if TYPE_CHECKING:
    import pandas as pd

ROW_HEIGHT, NAME_WIDTH, TITLE_WIDTH = 0.4, 24, 66
"""Inches; letters in a line of a variant's name, and in a line of the title"""
BELOW = 0.3
"""Distance of the mean from the middle of a row; pairs are between this and as much above"""
OUTLIER = 5.0
"""A variant whose differences are so many times those of the next one leaves the scale, which the others would lose"""


def markdown(group: Group) -> str:
    """Return the table of a group: losses, differences, speed and memory by learning rate and variant."""
    rows = [
        ("variant", "lr", "seeds", "validation", "difference", "last 10 %", "difference", "tokens/s", "GiB"),
        ("---", *["---:"] * 8),
    ]
    for cell in group.cells.to_dict("records"):
        row = [cell["variant"].replace("|", r"\|"), f"{cell['lr']:g}", str(cell["count"])]
        for loss in LOSSES:
            difference = (
                "baseline" if cell["variant"] == group.baseline else difference_text(cell[f"{loss}_difference"])
            )
            mean = cell[loss] and f"{cell[loss].mean:.4f}" + f" ± {cell[loss].error:.4f}" * (cell[loss].count > 1)
            row += [mean or "-", difference if mean else "-"]
        row += [f"{cell['tokens_per_second']:,.0f}", f"{cell['memory_gib']:.2f}"]
        rows.append([row[0], *("-" if word == "nan" else word for word in row[1:])])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = (
        " | ".join(f"{c:{'<' if i == 0 else '>'}{w}}" for i, (c, w) in enumerate(zip(row, widths))) for row in rows
    )
    return "\n".join(f"| {line} |" for line in lines)


def difference_text(found: Estimate | None) -> str:
    """Return a paired difference as text: "+0.0150 [-0.0485, +0.0785] (2 pairs)"."""
    if found is None:
        return "no pair"
    if found.count == 1:
        return f"{found.mean:+.4f} (one pair)"
    return f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}] ({found.count} pairs)"


@in_own_style
def differences_svg(group: Group) -> str:
    """Draw the paired differences: a panel per learning rate, a row per variant; empty without a pair."""
    from matplotlib.figure import Figure  # slow, and without pyplot there is no display

    pairs = group.results.rename(columns={f"{group.loss}_difference": "x"}).dropna(subset="x")
    if pairs.empty:
        return ""
    seeds = sorted(pairs.seed.unique())
    panels = [
        (rate, dict(sorted(own.groupby("variant", observed=True), key=lambda row: row[1].x.mean())))
        for rate, own in pairs.groupby("lr", dropna=False)
    ]
    heights = [len(rows) + 1 for _, rows in panels]
    figure = Figure(figsize=(WIDTH, ROW_HEIGHT * sum(heights) + 1.5))
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for own, (rate, rows) in zip(axes, panels):
        _draw_differences(own, rows, seeds)
        own.set_title("" if math.isnan(rate) else f"learning rate {rate:g}", loc="left")
        own.spines[["top", "right", "left"]].set_visible(False)
    axes[-1].set_xlabel("nats per token; left of zero is better\n(arrows: beyond the scale)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, columnspacing=1)
    name = "Validation loss" if group.loss == "validation" else "Training loss of the last 10 %"
    title = (f"{name} minus that of {group.baseline}:", group.title)
    figure.suptitle(literal("\n".join(textwrap.fill(line, TITLE_WIDTH) for line in title)))
    return rendered(figure, "svg").decode()


def _draw_differences(axes, rows: "dict[str, pd.DataFrame]", seeds: list) -> None:
    """Draw a row per variant. The scale is that of the pairs; intervals and variants far beyond it become arrows."""
    found = [estimate(own.x) for own in rows.values()]
    *places, below = np.linspace(-BELOW, BELOW, len(seeds) + 1)
    for place, seed, color in zip(places, seeds, cycle(COLORS)):
        points = [(x, row + place) for row, own in enumerate(rows.values()) for x in own.x[own.seed == seed]]
        axes.plot(*np.reshape(points, (-1, 2)).T, "o", color=color, markersize=5, label=f"seed {seed}")
    centers = [(one.low + one.high) / 2 for one in found]  # NaN of one pair, which has no interval
    style = {"fmt": "kD", "markersize": 5, "label": f"mean, {100 * CONFIDENCE:g} % interval"}
    axes.errorbar(centers, np.arange(len(rows)) + below, xerr=[one.high - one.mean for one in found], **style)
    ends = [[*own.x, *(() if one.count == 1 else one[2:4])] for own, one in zip(rows.values(), found)]
    low, high = limits(ends, 1.6 * scale(own.x.abs().max() for own in rows.values()))
    for row, (own, one) in enumerate(zip(ends, found)):
        for edge, marker, is_beyond in ((low, "<", min(own) < low), (high, ">", max(own) > high)):
            if is_beyond:
                axes.plot(edge, row + below, marker, color="black", markersize=7, clip_on=False)
        text = difference_text(one).partition(" (")[0].replace(" [", "\n[")  # the circles show how many pairs there are
        axes.annotate(text, (1.05, row), xycoords=axes.get_yaxis_transform(), va="center")
    axes.axvline(0, color="black", linewidth=1)
    axes.hlines(np.arange(0.5, len(rows) - 1), low, high, color="0.9", linewidth=0.8)
    axes.set(xlim=(low, high), ylim=(len(rows) - 0.5, -0.5), xlabel="", ylabel="")
    axes.set_yticks(range(len(rows)), [literal(textwrap.fill(name, NAME_WIDTH)) for name in rows])
    axes.locator_params("x", nbins=4)
    axes.tick_params("y", length=0, pad=9)  # room for an arrow


def scale(extents: Iterable[float]) -> float:
    """Return how far a scale reaches: the largest extent, or the last one before a jump by more than OUTLIER."""
    extents = sorted(extents)
    reach = extents[len(extents) // 2]
    for extent in extents[len(extents) // 2 + 1 :]:
        if extent > OUTLIER * reach > 0:
            break
        reach = extent
    return reach


def limits(values: Iterable[Iterable[float]], reach: float, margin: float = 0.06) -> tuple[float, float]:
    """Return the limits of an axis with zero and all ``values``, but for those beyond ``reach``."""
    inside = np.clip([0.0, *(value for own in values for value in own)], -reach, reach)
    room = margin * np.ptp(inside) or 1e-4
    return inside.min() - room, inside.max() + room
