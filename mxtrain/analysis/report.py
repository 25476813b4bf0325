"""The report of a comparison: tables, notes and figures, written as Markdown and as HTML."""

from pathlib import Path

from mxtrain.analysis.comparison import Cell, Group
from mxtrain.analysis.estimates import CONFIDENCE, Estimate
from mxtrain.analysis.report_blocks import Block, Heading, Lines, Picture, Table, Text, html_page, markdown
from mxtrain.analysis.report_figures import curves_figure, rates_figure
from mxtrain.analysis.results import Result
from mxtrain.analysis.spikes import RULE
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
    f"{RULE}. Tokens per second are per device. Memory is the largest peak of a device."
)


def report(title: str, groups: list[Group], notes: list[str]) -> list[Block]:
    """Return the parts of a report.

    Args:
        notes: lines about input that could not be read.
    """
    blocks: list[Block] = [Heading(title, 1), Text(EXPLANATION)]
    if notes:
        blocks += [Heading("Not read"), Lines(notes)]
    for number, group in enumerate(groups, start=1):
        blocks += [Heading(group.title), Text(f"Baseline: {group.baseline}"), losses_table(group)]
        if group.notes:
            blocks.append(Lines(group.notes))
        suffix = "" if len(groups) == 1 else f"_{number}"
        if svg := rates_figure(group):
            blocks.append(Picture(f"learning_rates{suffix}", "Final loss against the learning rate, by variant", svg))
        if svg := curves_figure(group):
            blocks.append(Picture(f"curves{suffix}", "Training loss of every run that counts", svg))
        blocks += [Heading("Runs", 3), runs_table(group)]
    return blocks


def write_report(folder: Path, blocks: list[Block]) -> tuple[Path, Path]:
    """Write the report and its figures into ``folder``, and return the Markdown file and the HTML file.

    Raises ConfigError if a file cannot be written.
    """
    files = {f"{block.name}.svg": block.svg for block in blocks if isinstance(block, Picture)}
    files |= {MARKDOWN_FILE: markdown(blocks), HTML_FILE: html_page(blocks)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            replace_file(folder / name, text.encode())
    except OSError as error:
        raise ConfigError(f"the report in {str(folder)!r} cannot be written: {reason(error)}") from error
    return folder / MARKDOWN_FILE, folder / HTML_FILE


def losses_table(group: Group) -> Table:
    """Return a row per variant and learning rate: losses, differences to the baseline, spikes, speed and memory."""
    header = (
        "variant", "lr", "seeds", "validation", "difference", "last 10 %", "difference", "spikes", "tokens/s", "GiB",
    )  # fmt: skip
    return Table(header, [_loss_row(cell, cell.variant == group.baseline) for cell in group.cells])


def _loss_row(cell: Cell, is_baseline: bool) -> tuple[str, ...]:
    pairs = [(cell.validation, cell.validation_difference), (cell.tail, cell.tail_difference)]
    shown = ["-" if loss is None else "baseline" if is_baseline else _difference(d) for loss, d in pairs]
    return (
        cell.variant, _form(cell.lr, "g", "default"), str(cell.count), _loss(cell.validation), shown[0],
        _loss(cell.tail), shown[1], _form(cell.spikes, "d"), _form(cell.tokens_per_second, ",.0f"),
        _form(cell.memory_gib, ".2f"),
    )  # fmt: skip


def runs_table(group: Group) -> Table:
    """Return a row per run that counts."""
    header = ("run", "variant", "lr", "seed", "steps", "validation", "last 10 %", "spikes", "device")
    rows = [
        (
            r.name, r.variant, _form(r.lr, "g", "default"), _form(r.seed, "d", "none"), f"{r.steps:,}",
            _validation(r), f"{r.tail:.4f}", _form(r.spikes, "d"), r.device or "-",
        )
        for r in group.results
    ]  # fmt: skip
    return Table(header, rows)


def _validation(result: Result) -> str:
    after = "" if result.validation_step is None else f" (step {result.validation_step:,})"
    return "-" if result.validation is None else f"{result.validation:.4f}{after}"


def _loss(value: Estimate | None) -> str:
    if value is None:
        return "-"
    return f"{value.mean:.4f}" + ("" if value.error is None else f" ± {value.error:.4f}")


def _difference(value: Estimate | None) -> str:
    if value is None:
        return "no pair"
    if value.half_width is None:
        return f"{value.mean:+.4f} (one pair)"
    low, high = value.mean - value.half_width, value.mean + value.half_width
    return f"{value.mean:+.4f} [{low:+.4f}, {high:+.4f}] ({value.count} pairs)"


def _form(value: float | int | None, form: str, missing: str = "-") -> str:
    return missing if value is None else f"{value:{form}}"
