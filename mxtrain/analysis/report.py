"""The report of a comparison: tables, notes and figures, as Markdown with SVG files and as one HTML page."""

import base64
from pathlib import Path

from mxtrain.analysis.comparison import CONFIDENCE, Cell, Estimate, Group
from mxtrain.analysis.report_figures import curves_svg, difference_text, differences_svg, rates_svg
from mxtrain.analysis.results import SPIKE_RULE
from mxtrain.analysis.tables import form
from mxtrain.files import os_errors_as, replace_file

MARKDOWN_FILE, HTML_FILE = "report.md", "report.html"

EXPLANATION = (
    "Losses are in nats per token: mean over seeds (standard error). “Last 10 %” is the mean training loss of the last "
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
<p><img alt="{{ value[1] }}" src="data:image/svg+xml;base64,{{ value[2] }}"></p>
{% else %}
<{{ kind }}>{{ value }}</{{ kind }}>
{% endif %}
{% endfor %}
</body></html>
"""
"""A figure is an image of its own: the ids inside of two inline pictures would be those of one document"""

FIGURES = {
    "differences": (differences_svg, "Paired differences of the loss by variant, with 95 % intervals"),
    "curves": (curves_svg, "Training loss of the baseline, and its paired differences over the run"),
    "learning_rates": (rates_svg, "Loss against the learning rate, and paired differences"),
}
"""File, in the order of a report -> function that draws a group, or returns nothing; alternative text"""


def report(title: str, groups: list[Group], notes: list[str]) -> dict[str, str]:
    """Return the files of a report, by name: Markdown, the figures beside it, and an HTML page that needs no other.

    Args:
        notes: lines about input that could not be read.
    """
    from jinja2 import Environment

    figures = {}
    blocks: list[tuple[str, object]] = [("h1", title)]  # the name of an HTML element and its content
    if notes:
        blocks += [("h2", "Not read"), ("ul", notes)]
    for number, group in enumerate(groups, start=1):
        suffix = "" if len(groups) == 1 else f"_{number}"
        drawn = {name: svg for name, (draw, _) in FIGURES.items() if (svg := draw(group))}
        blocks += [("h2", group.title), ("p", f"Baseline: {group.baseline}")]
        for name, svg in drawn.items():
            about = f"{FIGURES[name][1]}: {group.title}, baseline {group.baseline}"
            blocks.append(("img", (f"{name}{suffix}.svg", about, base64.b64encode(svg.encode()).decode())))
        blocks += [("table", losses_table(group))]
        blocks += [("ul", group.notes)] if group.notes else []
        blocks += [("h3", "Runs"), ("table", runs_table(group))]
        figures |= {f"{name}{suffix}.svg": svg for name, svg in drawn.items()}
    blocks += [("h2", "How to read this report"), ("p", EXPLANATION)]
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
        return f"![{value[1]}]({value[0]})"
    return value if kind == "p" else f"{'#' * int(kind[1])} {value}"


def write_report(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """Write the files of a report into ``folder``, and return the Markdown file and the HTML file.

    Raises ConfigError if a file cannot be written.
    """
    with os_errors_as(f"the report in {str(folder)!r} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            replace_file(folder / name, text.encode())
    return folder / MARKDOWN_FILE, folder / HTML_FILE


def losses_table(group: Group) -> list[tuple[str, ...]]:
    """Return a header, and a row per variant and learning rate: losses, differences, spikes, speed and memory."""
    header = (
        "variant", "lr", "seeds", "validation", "difference", "last 10 %", "difference", "spikes", "tokens/s", "GiB",
    )  # fmt: skip
    return [header, *(_loss_row(cell, cell.variant == group.baseline) for cell in group.cells)]


def _loss_row(cell: Cell, is_baseline: bool) -> tuple[str, ...]:
    pairs = [(cell.validation, cell.validation_difference), (cell.tail, cell.tail_difference)]
    shown = ["-" if loss is None else "baseline" if is_baseline else difference_text(d) for loss, d in pairs]
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
            form(r.validation) + ("" if r.validation_step is None else f" (step {r.validation_step:,})"), form(r.tail),
            form(r.spikes, "d"), r.device or "-",
        )
        for r in group.results
    ]  # fmt: skip
    return [header, *rows]


def _loss(value: Estimate | None) -> str:
    if value is None or value.error is None:
        return form(value and value.mean)
    return f"{value.mean:.4f} ({value.error:.4f})"
