"""Draws the figures of diagnostics as a PNG: one heat map per figure, modules of the model by steps."""

import math
import os
from pathlib import Path

from mxtrain.analysis.metrics_file import metrics_of_run
from mxtrain.analysis.numerics import (
    CAST_FIGURES,
    NORM_FIGURES,
    PRODUCT_FIGURES,
    Figure,
    by_figure,
    noteworthy,
    numerics_rows,
)
from mxtrain.analysis.pictures import in_own_style, literal, save_picture
from mxtrain.analysis.runs import Run, load_run
from mxtrain.errors import ConfigError
from mxtrain.run_folder.files import METRICS_FILE

COLUMNS = 6
"""Panels beside each other: one per cast"""
COLORS = "viridis"
"""A color map that color-blind readers see as others do; dark is low, light is high"""
STEP_LABELS = 6
"""Largest number of steps that are named below a panel"""
LABEL_HEIGHT = 0.1
"""Of a module's name, in inches"""
MARGIN = 0.8
"""Height of a panel's title and steps, in inches"""


@in_own_style
def draw_numerics(folder: str | os.PathLike, path: str | os.PathLike) -> tuple[Path, list[str]]:
    """Draw all figures of a run. Values that deserve a look have a cross.

    Returns:
        path: of the picture.
        remarks: one line per figure with such values in the last diagnostic step.

    Raises ConfigError if the run has no figures, if ``path`` does not end in ".png", or if a file cannot be read or
    written.
    """
    folder, path = Path(folder), Path(path)
    if path.suffix.lower() != ".png":
        raise ConfigError(f"the picture {str(path)!r} is not the name of a PNG file; end it in .png")
    rows = numerics_rows(metrics_of_run(folder))
    if not rows:
        raise ConfigError(f"{folder / METRICS_FILE} has no figures: {_why_no_figures(load_run(folder))}")
    values, steps = by_figure(rows), sorted({row["step"] for row in rows})

    from matplotlib.figure import Figure as Picture  # without pyplot there is no display and no global state

    groups = [[figure for figure in group if figure.name in values] for group in _groups()]
    lines = [group for group in groups if group]
    modules = max(len(of_modules) for of_modules in values.values())
    height = min(6.0, max(2.6, MARGIN + LABEL_HEIGHT * modules))
    picture = Picture(figsize=(4.2 * COLUMNS, 1 + height * len(lines)), dpi=80, layout="constrained")
    picture.suptitle(
        f"{literal(folder.resolve().name)}: numerics by module (down, in the order of the model) and step (right). "
        "Dark is low, light is high; white was not measured; a cross marks values that deserve a look.",
        fontsize=14,
    )
    panels = picture.subplots(len(lines), COLUMNS, squeeze=False)
    for line, group in zip(panels, lines):
        for axes in line[len(group) :]:
            axes.set_visible(False)
        for axes, figure in zip(line, group):
            _draw(picture, axes, figure, values, steps)
            _label(axes, list(values[figure.name]), steps, height - MARGIN)
    save_picture(picture, path)
    return path, remarks(values, steps[-1])


def _why_no_figures(run: Run) -> str:
    diagnostics = run.setting("mxnorm", "diagnostics")
    every = diagnostics.get("every") if isinstance(diagnostics, dict) else None
    if not every:
        return "train with mxnorm.diagnostics.every = 50"
    if (last := run.training[-1]["step"]) < every:
        return f"mxnorm.diagnostics.every = {every}, and the run is at step {last}"
    return f"no step with mxnorm.diagnostics.every = {every} measured anything: MXNorms and casts are measured"


def remarks(values: dict[str, dict[str, dict[int, float]]], step: int) -> list[str]:
    """Return a line per figure that has values that deserve a look in ``step``: how many, and the worst."""
    lines = []
    for figure in (*NORM_FIGURES, *PRODUCT_FIGURES):
        found = [module for module, of_steps in values.get(figure.name, {}).items() if step in of_steps]
        worthy = {module: at[step] for module, at in noteworthy(figure, values).items() if step in at}
        if worthy:
            worst = max(worthy, key=lambda module: figure.distance(worthy[module]))
            lines.append(
                # Of a figure without limits, only NaN deserves a look.
                f"step {step}: {figure.title} is {figure.limit or 'NaN'} in {len(worthy)} of {len(found)} modules; "
                f"{worst}: {worthy[worst]:.4g}"
            )
    return lines


def _groups() -> list[tuple[Figure, ...]]:
    """The figures of each line of panels."""
    figures = (*NORM_FIGURES, *PRODUCT_FIGURES)
    lines = [figures[start : start + COLUMNS] for start in range(0, len(figures), COLUMNS)]
    return lines + [CAST_FIGURES[start : start + COLUMNS] for start in range(0, len(CAST_FIGURES), COLUMNS)]


def _draw(picture, axes, figure: Figure, values: dict[str, dict[str, dict[int, float]]], steps: list[int]) -> None:
    of_modules = values[figure.name]
    table = [[of_steps.get(step, math.nan) for step in steps] for of_steps in of_modules.values()]
    table = [[value if math.isfinite(value) else math.nan for value in row] for row in table]
    limits = {}
    if figure.is_share:
        # Zero is dark, also where all are zero.
        limits = {"vmin": 0, "vmax": max((value for row in table for value in row if value > 0), default=1)}
    image = axes.imshow(table, aspect="auto", cmap=COLORS, interpolation="nearest", **limits)
    picture.colorbar(image, ax=axes, shrink=0.9).formatter.set_useOffset(False)
    lines, worthy = {module: line for line, module in enumerate(of_modules)}, noteworthy(figure, values)
    marks = [(steps.index(step), lines[module]) for module, at in worthy.items() for step in at]
    if marks:
        axes.plot(*zip(*marks), linestyle="none", marker="x", markersize=4, color="black", markeredgewidth=2.5)
        axes.plot(*zip(*marks), linestyle="none", marker="x", markersize=4, color="white", markeredgewidth=1.2)
    axes.set_title(figure.title + (f"\n(look at: {figure.limit})" if figure.limit else ""), fontsize=9)


def _label(axes, modules: list[str], steps: list[int], inches: float) -> None:
    """Name as many modules as the panel's height has room for, and some steps."""
    shown = range(0, len(modules), math.ceil(len(modules) * LABEL_HEIGHT / inches))
    axes.set_yticks(shown, [modules[index] for index in shown], fontsize=6)
    shown = range(0, len(steps), math.ceil(len(steps) / STEP_LABELS))
    axes.set_xticks(shown, [str(steps[index]) for index in shown], fontsize=7)
    axes.set_xlabel("step", fontsize=7)
