"""Formats runs as text: a table of several runs, and the summary printed after a run."""

import math
import os
import statistics
from itertools import pairwise
from textwrap import indent

from mxtrain.analysis.metrics_file import MERGED_SHARE, NUMERICS
from mxtrain.analysis.plots import plot
from mxtrain.analysis.runs import Run, load_run, names
from mxtrain.checkpoints.run_folder import PICTURE_FILE
from mxtrain.errors import ConfigError


def table(runs: list[Run]) -> str:
    """Return one line per run: losses, tokens per second per device, peak memory. A dash marks a missing value."""
    header = ("run", "variant", "steps", "first loss", "last loss", "last 10 %", "validation", "tokens/s", "GiB")
    rows = [header] + [
        (
            label,
            run.variant or "-",
            str(run.training[-1]["step"]),
            *(form(loss) for loss in (run.first_loss, run.last_loss, run.tail_loss, run.validation_loss)),
            form(run.tokens_per_second, ",.0f"),
            form(run.peak_memory_gib, ".2f"),
        )
        for label, run in zip(names(runs), runs, strict=True)
    ]
    return aligned(rows)


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Return a table of cells, one line per row: two columns of words, aligned left, then numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{cell:{'<' if i < 2 else '>'}{width}}" for i, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def titled(title: str, rows: list[tuple[str, ...]]) -> str:
    """Return a title, and below it, indented, the table of ``aligned``."""
    return f"{title}\n{indent(aligned(rows), '  ')}"


def summary(folder: str | os.PathLike) -> str:
    """Draw ``folder/loss.png`` and return a few lines on how the run went."""
    run = load_run(folder)
    variant, mode = run.variant, run.facts.get("mode") or ""
    details = variant if mode in variant else f"{variant}, {mode}".removeprefix(", ")
    lines = [("run", f"{run.name} ({details})" if details else run.name)]
    lines.append(("loss", f"{form(run.first_loss)} -> {form(run.last_loss)}, {_verdict(run)}"))
    if run.validation:
        row = run.validation[-1]
        lines.append(("validation", f"{form(row['validation_loss'])} at step {row['step']}"))
    devices, rate = run.facts.get("world_size") or 1, run.tokens_per_second
    of_all = "" if devices == 1 or rate is None else f" per device, {devices * rate:,.0f} on {devices}"
    lines.append(("tokens/s", f"{form(rate, ',.0f')}{of_all}"))
    lines.append(("memory", f"{form(run.peak_memory_gib, '.2f')} GiB peak"))
    merged = [(share, key) for row in run.numerics for key, share in row.items() if key.endswith(MERGED_SHARE)]
    if merged:
        share, key = max(merged)
        text = f"at most {share:.2g} of a cast's codes changed ({key.removeprefix(NUMERICS)})"
        above = f"; layers that exceeded mxnorm.merge_limit: {run.image_layers}"
        lines.append(("merged", f"{text}{above if run.image_layers else ''}"))
    lines.append(("folder", str(run.folder)))
    lines.append(("loss curve", _picture(run)))
    wandb = run.facts.get("wandb") or {}
    if wandb.get("mode") == "offline":
        lines.append(("wandb", f"offline; upload with: {wandb.get('sync')}"))
    elif wandb.get("mode") == "online":
        lines.append(("wandb", wandb.get("url") or str(wandb.get("dir"))))
    return aligned(lines)


def closing_summary(folder: str | os.PathLike) -> str:
    """Return ``summary(folder)``, or one line that says why there is no summary."""
    try:
        return summary(folder)
    except ConfigError as error:
        return f"mxtrain: no summary: {error}"


def _verdict(run: Run) -> str:
    if problem := run.nonfinite_loss:
        return problem.removeprefix("its ").replace("not finite", "NOT FINITE")
    steps = run.training[-1]["step"]
    if len(run.training) < 3:
        return f"{len(run.training)} of {steps} steps logged"
    # The noise is the standard deviation of one loss. It is estimated from neighbors among the last 10 % of the losses,
    # or the last three: the difference of two neighbors has twice the variance, and hardly any trend.
    losses = [row["loss"] for row in run.training[-max(3, round(0.1 * len(run.training))) :]]
    noise = math.sqrt(statistics.fmean((b - a) ** 2 for a, b in pairwise(losses)) / 2)
    change = run.tail_loss - run.first_loss
    moved = "unchanged" if abs(change) <= 2 * noise else "fell" if change < 0 else "rose"
    return f"{moved} over {steps} steps (mean of the last 10 %: {form(run.tail_loss)})"


def _picture(run: Run) -> str:
    """Draw the loss curve, and return the path of the picture, or why there is none."""
    try:
        return str(plot([run], run.folder / PICTURE_FILE))
    except Exception as error:  # a run that has ended well does not fail for its picture
        return f"not drawn: {' '.join(str(error).split())}"


def form(value: float | int | None, spec: str = ".4f") -> str:
    """Return a number as text, a loss unless ``spec`` is another format; a dash for None."""
    return "-" if value is None else f"{value:{spec}}"
