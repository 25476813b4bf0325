"""The figures that diagnostics write to ``metrics.jsonl``: which modules are worst, and a picture of all modules.

A row of a diagnostic step has keys "numerics/MODULE/FIGURE", such as
"numerics/layers.3.attention_norm/rms_ratio_mean", beside ``step`` and ``time``. train_configs/NUMERICS.md says what
each figure means.
"""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mxtrain.analysis.metrics_file import MERGED_SHARE, NUMERICS
from mxtrain.analysis.plots import PAGE, in_own_style, line_style, literal, save_picture
from mxtrain.analysis.runs import Run
from mxtrain.analysis.tables import aligned
from mxtrain.checkpoints.run_folder import MERGE_LIMIT, METRICS_FILE
from mxtrain.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

MODEL = "model"
"""Stands for a module in the keys of figures of the whole model"""


def over_twice_the_median(errors: "pd.DataFrame") -> "pd.DataFrame":
    """Return errors over twice their median. Errors below 0.002 are at most 1, however small the others are."""
    return errors / (2 * max(1e-3, errors[np.isfinite(errors)].median(axis=None)))


R2, SPREAD, NOISY = "rms_r2", "rms_ratio_std", 0.1
"""Rows of nearly equal RMS have a low r² with any estimate. It deserves a look where their spread is above NOISY"""
BADNESS = {
    "rms_ratio_mean": lambda values: np.maximum((1 - values) / 0.2, (values - 1) / 0.25),
    "rms_ratio_min": lambda values: (1 - values) / 0.5,
    "rms_ratio_max": lambda values: values - 1,
    R2: lambda values: (1 - values) / 0.05,
    "output_max_over_bound": lambda values: values / 0.9,
    "grad_norm_to_noise": lambda values: math.sqrt(3) / values,
    "routing_agreement": lambda values: (1 - values) / 0.1,
    SPREAD: over_twice_the_median,
    "busiest_expert": over_twice_the_median,
    "_error": over_twice_the_median,
    "_sqnr_db": lambda values: over_twice_the_median(10 ** (-values / 20)),
}
"""End of a figure's name -> how bad values are. Those above 1 deserve a look. Other figures are neither good nor bad"""
WORST = 5
"""Number of modules that are named"""
ROW, TALLEST, SMALLEST = 0.12, 6.8, 8
"""Inches: height of a module's name, and of the largest heat map. Points: its letters"""
LABEL, TICKS = "above 1 deserves a look", (0.5, 0.7, 1, 1.4, 2)
"""Of the color scale"""

Values = dict[str, "pd.DataFrame"]
"""Figure -> its table: a row per module, and a column per step. NaN was not measured; a measured NaN is infinite"""


def by_figure(rows: list[dict]) -> Values:
    """Return the figures in rows of diagnostic steps, as tables of all of these steps."""
    import pandas as pd

    cells = [
        (*key.removeprefix(NUMERICS).rpartition("/")[::2], row["step"], math.inf if math.isnan(value) else value)
        for row in rows
        for key, value in row.items()
        if key.startswith(NUMERICS) and value is not None
    ]
    found = pd.DataFrame(cells, columns=["module", "figure", "step", "value"]).groupby("figure", sort=False)
    tables = {figure: own.pivot_table("value", "module", "step", aggfunc="last") for figure, own in found}
    return {figure: own.reindex(columns=sorted({row["step"] for row in rows})) for figure, own in tables.items()}


def module_order(module: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts FQNs by the numbers of blocks, and by names within a block."""
    return [(not word.isdecimal(), int(word) if word.isdecimal() else 0, word) for word in module.split(".")]


def badness(values: Values, merge_limit: float = MERGE_LIMIT) -> "pd.DataFrame":
    """Return how bad values are, as modules by (figure, step). Above 1 deserves a look; not finite is infinite."""
    import pandas as pd

    found, measures = {}, BADNESS | {MERGED_SHARE: lambda share: share / max(merge_limit, 1e-9)}
    for figure, table in values.items():
        for end, measure in measures.items():
            if figure.removesuffix("_worst_expert").endswith(end):
                found[figure] = measure(table).where(~np.isinf(table), math.inf)
    if R2 in found and SPREAD in values:
        found[R2] = found[R2].mask(values[SPREAD].reindex_like(found[R2]) <= NOISY, 0)
    bad = pd.concat(found, axis=1)
    return bad.loc[sorted(bad.index, key=module_order)]


def worst_modules(values: Values, bad: "pd.DataFrame") -> list[tuple[str, str, float, float, str]]:
    """Return the worst modules of the last step: name, worst figure, its value now and at the start, and its trend."""
    rows, last = [], bad.xs(bad.columns[-1][1], axis=1, level=1)
    for module in last.max(axis=1).nlargest(WORST).index:
        figure = last.loc[module].idxmax()
        own = values[figure].loc[module].dropna()
        rows.append((module, figure, own.iloc[-1], own.iloc[0], trend(bad.loc[module, figure].dropna())))
    return rows


def trend(bad: "pd.Series") -> str:
    """Return "worse" or "better" if ranks rise or fall by over two standard errors, "steady", or "-" if not known."""
    if len(bad) < 3 or np.isinf(bad.iloc[-1]):
        return "-"
    with np.errstate(invalid="ignore"):
        r = np.corrcoef(bad.index, bad.rank())[0, 1]  # NaN of equal values
    return ("worse" if r > 0 else "better") if r**2 * (len(bad) - 2) > 4 * (1 - r**2) else "steady"


@in_own_style
def draw_numerics(run: Run, path: str | os.PathLike) -> tuple[Path, str]:
    """Draw the worst modules over steps, and heat maps of all modules: by steps, and by figures of the last step.

    Returns ``path`` and a table of the worst modules.
    """
    if not run.numerics:
        raise ConfigError(
            f"{run.folder / METRICS_FILE} has no figures up to step {run.training[-1]['step']}: MXNorms and casts are "
            "measured every mxnorm.diagnostics.every steps, such as 50"
        )
    from matplotlib.figure import Figure as Picture  # without pyplot there is no display and no global state

    values = by_figure(run.numerics)
    bad = badness(values, run.setting("mxnorm", "merge_limit", MERGE_LIMIT))
    worst = worst_modules(values, bad)
    step = bad.columns[-1][1]
    height = np.clip(ROW * len(bad), 1.5, TALLEST)
    picture = Picture((PAGE, height + 4.2))
    picture.suptitle(literal(f"{run.name}: numerics of its modules up to step {step}"))
    above, below = picture.subfigures(2, 1, height_ratios=(2.2, height + 2))
    axes = above.subplots()
    for index, (module, figure, now, start, word) in enumerate(worst):
        label = literal(f"{module}\n{figure} {now:.3g}, {start:.3g} at the start: {word}")
        style = line_style(index) | {"marker": "osD^v"[index], "markevery": 0.1}
        axes.plot(bad.loc[module, figure].dropna(), **style, label=label)
    axes.axhline(1, color="black", linewidth=1)
    axes.set(title="the worst modules", xlabel="step", ylabel=LABEL)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    by_step, by_name = panels = below.subplots(1, 2, sharey=True)
    _draw_map(by_step, bad.T.groupby(level=1).max().T, height)
    _draw_map(by_name, bad.xs(step, axis=1, level=1), height)
    by_step.set(title="each module's worst figure", xlabel="step")
    by_step.locator_params("x", nbins=6)
    by_name.set_title(f"all figures at step {step}")
    by_name.tick_params("x", rotation=90)
    below.colorbar(by_step.images[0], ax=panels, label=LABEL, extend="both", ticks=TICKS, format="%g").minorticks_off()
    below.legend(*by_step.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    rows = [(*names, f"{now:.4g}", f"{start:.4g}", word) for *names, now, start, word in worst]
    return save_picture(picture, path), aligned([("worst modules", "figure", "now", "at the start", "trend"), *rows])


def _draw_map(axes, bad: "pd.DataFrame", height: float) -> None:
    """Draw modules by columns, dark where they are bad."""
    from matplotlib.colors import LogNorm

    hatch = {"hatch": "/////", "facecolor": "0.95", "edgecolor": "0.6"}  # shows where there is no value
    axes.axvspan(-0.5, bad.shape[1] - 0.5, label="not measured", zorder=-1, **hatch)
    colors = {"cmap": "viridis_r", "norm": LogNorm(TICKS[0], TICKS[-1])}
    axes.imshow(bad.clip(TICKS[0], TICKS[-1]), aspect="auto", interpolation="none", **colors)
    down, right = np.nonzero(bad.to_numpy() > 1)
    cross = {"color": "white", "markeredgecolor": "black", "markersize": np.clip(60 * height / len(bad), 3, 6)}
    axes.plot(right, down, "X", label="deserves a look", **cross)
    axes.set_xticks(range(bad.shape[1]), bad.columns)
    names, shown = list(bad.index), list(range(len(bad)))
    if len(names) * ROW > height:  # only the first row of a block has a name
        names = [".".join(name.split(".")[:2]) for name in names]
        shown = [row for row in shown if names[row] not in names[:row]]
        shown = shown[:: math.ceil(len(shown) * ROW / height)]
    axes.set_yticks(shown, [names[row] for row in shown])
    axes.tick_params(labelsize=SMALLEST)
