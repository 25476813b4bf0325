"""The figures that diagnostics write to ``metrics.jsonl``: which values to look at, and their picture.

A row of a diagnostic step has keys "numerics/MODULE/FIGURE", such as
"numerics/layers.3.attention_norm/rms_ratio_mean", beside ``step`` and ``time``. train_configs/NUMERICS.md says what
each figure means. The picture has one heat map per figure, modules of the model by steps.
"""

import math
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mxtrain.analysis.metrics_file import NUMERICS
from mxtrain.analysis.plots import in_own_style, literal, picture_path, save_picture
from mxtrain.analysis.runs import Run
from mxtrain.checkpoints.run_folder import METRICS_FILE
from mxtrain.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

MODEL = "model"
"""Stands for a module in the keys of figures of the whole model"""
LIMITS = {
    "rms_ratio_mean": (0.8, 1.25),
    "rms_ratio_min": (0.5, math.inf),
    "rms_ratio_max": (-math.inf, 2.0),
    "rms_r2": (0.95, math.inf),
    "output_max_over_bound": (-math.inf, 0.9),
    "grad_norm_to_noise": (math.sqrt(3), math.inf),
    "routing_agreement": (0.9, math.inf),
}
"""Figure -> values below the first number or above the second one deserve a look. So do those that are not finite"""
R2, SPREAD, NOISY = "rms_r2", "rms_ratio_std", 0.1
"""Rows of nearly equal RMS have a low r² with any estimate. It deserves a look where their spread is above NOISY"""
SCALES = {"_error": (0, 0.1), "sqnr_db": (15, 35), "exponent": (-16, 0), "ratio_mean": (0.5, 2), "": (0, 0.01)}
"""End of a figure's name -> what its color scale covers at least: 31.5 and 31.6 dB look alike"""

COLUMNS, PANEL_WIDTH, MARGIN = 6, 3.6, 1.4
"""Panels beside each other; their width, and the height of a panel's title and steps, in inches"""
FONT_SIZE, LABEL_HEIGHT, STEP_LABELS = 9, 0.13, 4
"""Points; height of a module's name in inches; largest number of steps that are named below a panel"""

Values = dict[str, "pd.DataFrame"]
"""
Figure -> its table: a row per module, in the order of the model, and a column per step. NaN was not measured; what was
measured as NaN is infinite
"""


def by_figure(rows: list[dict]) -> Values:
    """Return the figures in rows of diagnostic steps, as tables of all of these steps."""
    import pandas as pd

    names = ["module", "figure", "step", "value"]
    cells = [
        (*key.removeprefix(NUMERICS).rpartition("/")[::2], row["step"], math.inf if math.isnan(value) else value)
        for row in rows
        for key, value in row.items()
        if key.startswith(NUMERICS) and value is not None
    ]
    found = pd.DataFrame(cells, columns=names).drop_duplicates(names[:3], keep="last")
    steps = sorted({row["step"] for row in rows})
    groups = found.groupby("figure")
    tables = {figure: own.pivot(index="module", columns="step", values="value") for figure, own in groups}
    return {figure: own.reindex(sorted(own.index, key=module_order), columns=steps) for figure, own in tables.items()}


def module_order(module: str) -> list[tuple[bool, int, str]]:
    return [(not word.isdecimal(), int(word) if word.isdecimal() else 0, word) for word in module.split(".")]


def noteworthy(figure: str, values: Values) -> "pd.DataFrame":
    """Return a table of booleans: which values deserve a look."""
    table, (low, high) = values[figure], LIMITS.get(figure, (-math.inf, math.inf))
    found = np.isinf(table) | (table < low) | (table > high)
    if figure == R2 and SPREAD in values:
        found &= ~(values[SPREAD].reindex_like(table) <= NOISY)
    return found


def limit(figure: str) -> str:
    """Return the limits of a figure in words; empty without any."""
    ends = zip(("below", "above"), LIMITS.get(figure, ()))
    words = " or ".join(f"{word} {end:.3g}" for word, end in ends if math.isfinite(end))
    return f"{words} where {SPREAD} is above {NOISY}" if figure == R2 else words


@in_own_style
def draw_numerics(run: Run, path: str | os.PathLike) -> tuple[Path, list[str]]:
    """Draw all figures of a run as a PNG. Values that deserve a look have a cross.

    Returns:
        path: of the picture.
        remarks: one line per figure with such values in the last diagnostic step.

    Raises ConfigError if the run has no figures, if ``path`` does not end in ".png", or if it cannot be written.
    """
    path = picture_path(path)
    if not run.numerics:
        raise ConfigError(
            f"{run.folder / METRICS_FILE} has no figures up to step {run.training[-1]['step']}: MXNorms and casts are "
            "measured every mxnorm.diagnostics.every steps, such as 50"
        )
    from matplotlib.figure import Figure as Picture  # without pyplot there is no display and no global state

    values = by_figure(run.numerics)
    rows = math.ceil(len(values) / COLUMNS)
    height = min(6.0, max(1.6, LABEL_HEIGHT * max(map(len, values.values()))))
    picture = Picture((PANEL_WIDTH * COLUMNS, 1 + rows * (height + MARGIN)), dpi=100, layout="constrained")
    text = (
        f"{run.name}: numerics by module (down, in the order of the model) and step (right). Dark is low, light is "
        "high; white was not measured; a cross marks values that deserve a look."
    )
    picture.suptitle(literal(text), fontsize=FONT_SIZE + 2)
    panels = picture.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axes, (figure, table) in zip(panels, values.items()):
        finite = table.replace([np.inf, -np.inf], np.nan)
        least, largest = finite.min(axis=None), finite.max(axis=None)
        low, high = next(scale for end, scale in SCALES.items() if figure.endswith(end))
        ends = {"vmin": np.nanmin([low, least]), "vmax": np.nanmax([high, largest])}
        # Not seaborn's heatmap, which makes a renderer of the whole picture for every label. Color-blind readers see
        # viridis as others do.
        picture.colorbar(axes.imshow(finite, cmap="viridis", aspect="auto", interpolation="none", **ends), ax=axes)
        by = math.ceil(len(table) * LABEL_HEIGHT / height), math.ceil(table.shape[1] / STEP_LABELS)
        axes.set_yticks(range(0, len(table), by[0]), table.index[:: by[0]])
        axes.set_xticks(range(0, table.shape[1], by[1]), table.columns[:: by[1]])
        down, right = np.nonzero(noteworthy(figure, values).to_numpy())
        cross = {"color": "white", "markeredgecolor": "black", "markersize": 7, "markeredgewidth": 0.7}
        axes.plot(right, down, "X", **cross)
        title = [figure, f"{least:.4g} to {largest:.4g}"] + [f"look at: {limit(figure)}"] * (figure in LIMITS)
        axes.set_title("\n".join(textwrap.fill(line, 32) for line in title), fontsize=FONT_SIZE)
        axes.set_xlabel("step")
        axes.tick_params(labelsize=FONT_SIZE - 1)
    for axes in panels[len(values) :]:
        axes.set_visible(False)
    save_picture(picture, path)
    return path, remarks(values)


def remarks(values: Values) -> list[str]:
    """Return a line per figure that has values that deserve a look in the last step: how many, and the worst."""
    lines = []
    for figure, table in values.items():
        last = table.iloc[:, -1]
        worthy = last[noteworthy(figure, values).iloc[:, -1]]
        if len(worthy):
            low, high = LIMITS.get(figure, (-math.inf, math.inf))
            worst = np.maximum(low - worthy, worthy - high).fillna(math.inf).idxmax()
            lines.append(
                f"step {last.name}: {figure} is {limit(figure) or 'not finite'} in {len(worthy)} of {last.count()} "
                f"modules; {worst}: {worthy[worst]:.4g}"
            )
    return lines
