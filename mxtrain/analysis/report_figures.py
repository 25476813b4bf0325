"""Draws a comparison as SVG: loss against learning rate, and training curves."""

import io
import math

from mxtrain.analysis.comparison import Group
from mxtrain.analysis.curves import curve, window
from mxtrain.analysis.pictures import in_own_style, literal
from mxtrain.analysis.plots import COLORS, LINE_STYLES

MARKERS = "osD^vPX"
SVG_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "mxtrain", "path.simplify_threshold": 0.5}
"""Text stays text, and equal drawings are equal files"""
PANELS_IN_A_ROW = 2


@in_own_style
def rates_figure(group: Group) -> str | None:
    """Return the final loss against the learning rate, a line per variant; None with fewer than two rates.

    Bars are standard errors over seeds. Validation, or the training loss if runs were not validated.
    """
    cells = [cell for cell in group.cells if cell.lr is not None]
    if len({cell.lr for cell in cells}) < 2:
        return None
    is_validated = all(cell.validation for cell in cells)
    figure, (axes,) = _figure(1)
    for name, style in _styles(group).items():
        points = [cell for cell in cells if cell.variant == name]
        losses = [cell.validation if is_validated else cell.tail for cell in points]
        errors = [loss.error or math.nan for loss in losses]
        means = [loss.mean for loss in losses]
        axes.errorbar([c.lr for c in points], means, errors, **style, capsize=3, markersize=5, label=literal(name))
    axes.set_xscale("log")
    rates = sorted({cell.lr for cell in cells})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set_xlabel("learning rate")
    axes.set_ylabel("validation loss (nats)" if is_validated else "training loss, last 10 % (nats)")
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure)


@in_own_style
def curves_figure(group: Group) -> str | None:
    """Return the training losses, a panel per learning rate, a line per run; None if the results have no curves."""
    results = [result for result in group.results if result.run is not None]
    if not results:
        return None
    from matplotlib.ticker import EngFormatter

    by_tokens = all(row.get("tokens_seen") is not None for result in results for row in result.run.training)
    rates = list(dict.fromkeys(cell.lr for cell in group.cells))
    figure, panels = _figure(len(rates))
    styles, is_named = _styles(group), set()
    for axes, rate in zip(panels, rates):
        for result in results:
            if result.lr != rate:
                continue
            one = curve(result.run, "tokens" if by_tokens else "step")
            one = one.smoothed(window(one, None))
            style = {key: value for key, value in styles[result.variant].items() if key != "marker"}
            label = None if result.variant in is_named else literal(result.variant)
            is_named.add(result.variant)
            axes.plot(one.x, one.loss, **style, alpha=0.8, label=label)
        axes.set_title("" if rate is None else f"learning rate {rate:g}", fontsize=10)
        axes.set_xlabel("tokens seen" if by_tokens else "step")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_ylabel("training loss (nats)")
    figure.legend(loc="outside upper center", frameon=False, fontsize=9, ncols=3)
    return _svg(figure)


def _styles(group: Group) -> dict[str, dict]:
    """Return a style per variant, the same in all figures of a group."""
    names = dict.fromkeys(cell.variant for cell in group.cells)
    return {
        name: {
            "color": COLORS[index % len(COLORS)],
            "linestyle": LINE_STYLES[index % len(LINE_STYLES)],
            "marker": MARKERS[index % len(MARKERS)],
            "linewidth": 1.4,
        }
        for index, name in enumerate(names)
    }


def _figure(count: int):
    """Return a figure and its panels."""
    from matplotlib.figure import Figure  # slow, and without pyplot there is no display

    columns = min(count, PANELS_IN_A_ROW)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(8 if columns == 1 else 10, 4.2 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels[:count]


def _svg(figure) -> str:
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context(SVG_SETTINGS):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
