"""The report of a comparison: tables, notes and figures, as Markdown with SVG files and as one HTML page."""

import base64
import io
import math
from pathlib import Path
from typing import NamedTuple

from mxtrain.analysis.comparison import CONFIDENCE, Cell, Estimate, Group
from mxtrain.analysis.plots import curve, in_own_style, line_style, literal, window
from mxtrain.analysis.results import SPIKE_RULE
from mxtrain.analysis.tables import form
from mxtrain.errors import ConfigError
from mxtrain.files import reason, replace_file

MARKDOWN_FILE, HTML_FILE = "report.md", "report.html"

EXPLANATION = (
    "Losses are in nats per token: mean over seeds ± standard error. “Last 10 %” is the mean training loss of the last "
    "10 % of the logged steps. A difference is the mean, over seeds, of a run's loss minus the loss of the baseline's "
    "run with the same seed and learning rate. The range behind it is the "
    f"{100 * CONFIDENCE:g} % confidence interval of Student's t; one pair gives none. Intervals are not corrected for "
    "the number of variants: with many, some exclude zero by chance. Differences are at equal learning rates, not "
    "between each variant's best. Spikes are those of all runs: "
    f"{SPIKE_RULE}. Tokens per second are per device. Memory is the largest peak of a device."
)

HTML = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ blocks[0][1] }}</title><style>
body { font-family: sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; line-height: 1.45 }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { border: 1px solid #ccc; padding: .25em .6em; text-align: right; white-space: nowrap }
td:nth-child(-n+2), th:nth-child(-n+2) { text-align: left }
img { max-width: 100% }
</style></head>
<body>
{% for kind, value in blocks %}
{% if kind == "table" %}
<table>
{% for row in value %}
{% set tag = "th" if loop.first else "td" %}
<tr>{% for cell in row %}<{{ tag }}>{{ cell }}</{{ tag }}>{% endfor %}</tr>
{% endfor %}
</table>
{% elif kind == "ul" %}
<ul>{% for line in value %}<li>{{ line }}</li>{% endfor %}</ul>
{% elif kind == "img" %}
<p><img alt="{{ value.description }}" src="data:image/svg+xml;base64,{{ value.encoded }}"></p>
{% else %}
<{{ kind }}>{{ value }}</{{ kind }}>
{% endif %}
{% endfor %}
</body></html>
"""
"""A figure is an image of its own: the ids inside of two inline pictures would be those of one document"""

MARKERS = "osD^vPX"
SVG_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "mxtrain", "path.simplify_threshold": 0.5}
"""Text stays text, and equal drawings are equal files"""
PANELS_IN_A_ROW = 2


class Figure(NamedTuple):
    file: str
    description: str
    svg: str

    @property
    def encoded(self) -> str:
        return base64.b64encode(self.svg.encode()).decode()


def report(title: str, groups: list[Group], notes: list[str]) -> dict[str, str]:
    """Return the files of a report, by name: Markdown, the figures beside it, and an HTML page that needs no other.

    Args:
        notes: lines about input that could not be read.
    """
    from jinja2 import Environment

    figures = {}
    blocks: list[tuple[str, object]] = [
        ("h1", title),
        ("p", EXPLANATION),
    ]  # the name of an HTML element and its content
    if notes:
        blocks += [("h2", "Not read"), ("ul", notes)]
    for number, group in enumerate(groups, start=1):
        suffix = "" if len(groups) == 1 else f"_{number}"
        drawn = (
            Figure(f"learning_rates{suffix}.svg", "Final loss against the learning rate, by variant", rates_svg(group)),
            Figure(f"curves{suffix}.svg", "Training loss of every run that counts", curves_svg(group)),
        )
        blocks += [("h2", group.title), ("p", f"Baseline: {group.baseline}"), ("table", losses_table(group))]
        blocks += [("ul", group.notes)] if group.notes else []
        blocks += [("img", figure) for figure in drawn if figure.svg]
        blocks += [("h3", "Runs"), ("table", runs_table(group))]
        figures |= {figure.file: figure.svg for figure in drawn if figure.svg}
    markdown = "\n\n".join(_markdown(kind, value) for kind, value in blocks)
    template = Environment(trim_blocks=True, autoescape=True).from_string(HTML)
    return figures | {MARKDOWN_FILE: f"{markdown}\n", HTML_FILE: template.render(blocks=blocks)}


def _markdown(kind: str, value) -> str:
    if kind == "table":
        rows = [" | ".join(cell.replace("|", r"\|") for cell in row) for row in value]
        rows.insert(1, "--- | ---" + " | ---:" * (len(value[0]) - 2))
        return "\n".join(f"| {row} |" for row in rows)
    if kind == "ul":
        return "\n".join(f"- {line}" for line in value)
    if kind == "img":
        return f"![{value.description}]({value.file})"
    return value if kind == "p" else f"{'#' * int(kind[1])} {value}"


def write_report(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """Write the files of a report into ``folder``, and return the Markdown file and the HTML file.

    Raises ConfigError if a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            replace_file(folder / name, text.encode())
    except OSError as error:
        raise ConfigError(f"the report in {str(folder)!r} cannot be written: {reason(error)}") from error
    return folder / MARKDOWN_FILE, folder / HTML_FILE


def losses_table(group: Group) -> list[tuple[str, ...]]:
    """Return a header, and a row per variant and learning rate: losses, differences, spikes, speed and memory."""
    header = (
        "variant", "lr", "seeds", "validation", "difference", "last 10 %", "difference", "spikes", "tokens/s", "GiB",
    )  # fmt: skip
    return [header, *(_loss_row(cell, cell.variant == group.baseline) for cell in group.cells)]


def _loss_row(cell: Cell, is_baseline: bool) -> tuple[str, ...]:
    pairs = [(cell.validation, cell.validation_difference), (cell.tail, cell.tail_difference)]
    shown = ["-" if loss is None else "baseline" if is_baseline else _difference(d) for loss, d in pairs]
    return (
        cell.variant, form(cell.lr, "g", "default"), str(cell.count), _loss(cell.validation), shown[0],
        _loss(cell.tail), shown[1], form(cell.spikes, "d"), form(cell.tokens_per_second, ",.0f"),
        form(cell.memory_gib, ".2f"),
    )  # fmt: skip


def runs_table(group: Group) -> list[tuple[str, ...]]:
    """Return a header, and a row per run that counts."""
    header = ("run", "variant", "lr", "seed", "steps", "validation", "last 10 %", "spikes", "device")
    rows = [
        (
            r.name, r.variant, form(r.lr, "g", "default"), form(r.seed, "d", "none"), f"{r.steps:,}",
            form(r.validation) + _at_step(r.validation_step), form(r.tail),
            form(r.spikes, "d"), r.device or "-",
        )
        for r in group.results
    ]  # fmt: skip
    return [header, *rows]


def _at_step(step: int | None) -> str:
    return "" if step is None else f" (step {step:,})"


def _loss(value: Estimate | None) -> str:
    if value is None or value.error is None:
        return form(value and value.mean)
    return f"{value.mean:.4f} ± {value.error:.4f}"


def _difference(value: Estimate | None) -> str:
    if value is None:
        return "no pair"
    if value.half_width is None:
        return f"{value.mean:+.4f} (one pair)"
    low, high = value.mean - value.half_width, value.mean + value.half_width
    return f"{value.mean:+.4f} [{low:+.4f}, {high:+.4f}] ({value.count} pairs)"


@in_own_style
def rates_svg(group: Group) -> str:
    """Draw the final loss against the learning rate, a line per variant; empty with fewer than two rates.

    Bars are standard errors over seeds. Validation, or the training loss if runs were not validated.
    """
    cells = [cell for cell in group.cells if cell.lr is not None]
    rates = sorted({cell.lr for cell in cells})
    if len(rates) < 2:
        return ""
    is_validated = all(cell.validation for cell in cells)
    figure, (axes,) = _figure(1)
    for name, style in _styles(group).items():
        points = [cell for cell in cells if cell.variant == name]
        losses = [cell.validation if is_validated else cell.tail for cell in points]
        errors = [loss.error or math.nan for loss in losses]
        means = [loss.mean for loss in losses]
        axes.errorbar([c.lr for c in points], means, errors, **style, capsize=3, markersize=5, label=literal(name))
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set_xlabel("learning rate")
    axes.set_ylabel("validation loss (nats)" if is_validated else "training loss, last 10 % (nats)")
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure)


@in_own_style
def curves_svg(group: Group) -> str:
    """Draw the training losses, a panel per learning rate, a line per run; empty if the results have no curves."""
    results = [result for result in group.results if result.run is not None]
    if not results:
        return ""
    from matplotlib.ticker import EngFormatter

    by_tokens = all(row.get("tokens_seen") is not None for result in results for row in result.run.training)
    rates = list(dict.fromkeys(cell.lr for cell in group.cells))
    figure, panels = _figure(len(rates))
    styles, is_named = _styles(group), set()
    for axes, rate in zip(panels, rates):
        for result in [result for result in results if result.lr == rate]:
            one = curve(result.run, "tokens" if by_tokens else "step")
            one = one.smoothed(window(one, None))
            label = None if result.variant in is_named else literal(result.variant)
            is_named.add(result.variant)
            axes.plot(one.x, one.loss, **{**styles[result.variant], "marker": None}, alpha=0.8, label=label)
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
        name: {**line_style(i), "marker": MARKERS[i % len(MARKERS)], "linewidth": 1.4} for i, name in enumerate(names)
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
