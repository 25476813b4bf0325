"""The figures that diagnostics write to ``metrics.jsonl``: their meaning, which values to look at, and their picture.

A row of a diagnostic step has keys "numerics/MODULE/FIGURE", such as
"numerics/layers.3.attention_norm/rms_ratio_mean", beside ``step`` and ``time``. The picture has one heat map per
figure that varies, modules of the model by steps. Figures of one kind have one color scale.
"""

import math
import os
import re
import textwrap
from dataclasses import dataclass
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

CASTS = {
    "fprop_input": "fprop: input",
    "fprop_weight": "fprop: weight",
    "dgrad_grad": "dgrad: output gradient",
    "dgrad_weight": "dgrad: weight",
    "wgrad_grad": "wgrad: output gradient",
    "wgrad_input": "wgrad: input",
}
"""Name of a cast in keys -> GEMM and operand"""

COLUMNS, PANEL_WIDTH = 6, 3
"""Panels beside each other, one per cast; inches"""
STEP_LABELS = 4
"""Largest number of steps that are named below a panel"""
FONT_SIZE, LABEL_HEIGHT, MARGIN = 9, 0.13, 1.5
"""Points; height of a module's name, and of a panel's title and steps, in inches"""
TITLE_LETTERS, LINE_LETTERS = 25, 215
"""Letters in a line of a panel's title, and of the picture's"""

SCALES = {
    "ratio": (0.5, 2), "spread": (0, 0.1), "share": (0, 1), "rare": (0, 0.01), "saturated": (0, 0.01),
    "underflowed": (0, 0.01), "error": (0, 0.1), "sqnr_db": (15, 35), "exponent": (-16, 0), "output": (0, 10),
    "noise": (0, 10),
}  # fmt: skip
"""Kind of figure -> what its color scale covers at least: 31.5 and 31.6 dB look alike"""
VARIES_FROM = 0.02
"""Figures that vary by less than this share of their color scale are not drawn"""

GEMMS = ("fprop", "dgrad", "wgrad")

Values = dict[str, "pd.DataFrame"]
"""
Figure -> its table: a row per module, in the order of the model, and a column per step. NaN was not measured; what was
measured as NaN is infinite
"""


@dataclass(frozen=True)
class Figure:
    """A figure: its name in keys, its title, and the values that deserve a look.

    Attributes:
        kind: figures of one kind have one color scale, see SCALES.
        low, high: values below ``low`` or above ``high`` deserve a look, as infinite ones do.
        only_above: a second figure and a value. Where the second figure of the same module and step is not above this
            value, the first one deserves no look; None for no such rule.
    """

    name: str
    title: str
    kind: str
    low: float = -math.inf
    high: float = math.inf
    only_above: tuple[str, float] | None = None

    @property
    def limit(self) -> str:
        """The limits in words; empty without any."""
        limits = (("below", self.low), ("above", self.high))
        words = " or ".join(f"{word} {limit:.3g}" for word, limit in limits if math.isfinite(limit))
        return f"{words} where {self.only_above[0]} is above {self.only_above[1]:.3g}" if self.only_above else words

    def noteworthy(self, values: Values) -> "pd.DataFrame":
        """Return a table of booleans: which values deserve a look."""
        table = values[self.name]
        found = np.isinf(table) | (table < self.low) | (table > self.high)
        if self.only_above and self.only_above[0] in values:
            found &= ~(values[self.only_above[0]].reindex_like(table) <= self.only_above[1])
        return found


FIGURES = (
    Figure("rms_ratio_mean", "estimated / true RMS: mean", "ratio", 0.8, 1.25),
    Figure("rms_ratio_min", "estimated / true RMS: least", "ratio", 0.5),
    Figure("rms_ratio_max", "estimated / true RMS: largest", "ratio", high=2.0),
    Figure("rms_ratio_std", "estimated / true RMS: standard deviation", "spread"),
    # Rows of nearly equal RMS have a low r² with any estimate: only a noisy one deserves a look.
    Figure("rms_r2", "r² of estimated and true RMS", "share", 0.95, only_above=("rms_ratio_std", 0.1)),
    Figure("output_max_over_bound", "largest |output| / its bound", "share", high=0.9),
    *(Figure(f"{gemm}_error", f"{gemm}: relative error of the result", "error") for gemm in GEMMS),
    Figure("grad_norm_to_noise", "weight gradient: norm / quantization noise", "noise", math.sqrt(3)),
    Figure("output_max", "largest |output| of the norm", "output"),
    Figure("outlier_rows", "share of rows with an element above 10 RMS", "rare"),
    *(
        Figure(f"{gemm}_error_worst_expert", f"{gemm}: relative error of the worst expert's result", "error")
        for gemm in GEMMS
    ),
    Figure("routing_agreement", "share of tokens with the experts of a norm and gate in fp64", "share", 0.9),
    Figure("busiest_expert", "share of the choices that fall on the busiest expert", "share"),
    Figure("experts_without_tokens", "share of experts without tokens", "share"),
)
"""Figures of norms, of products and of routers"""
_OF_CAST = {
    "sqnr_db": ("SQNR (dB)", "sqnr_db"),
    "sqnr_db_worst_expert": ("SQNR of the worst expert (dB)", "sqnr_db"),
    "saturated": ("share saturated", "saturated"),
    "underflowed": ("share rounded to zero", "underflowed"),
    "scale_min_exponent": ("least block scale, log2", "exponent"),
    "scale_max_exponent": ("largest block scale, log2", "exponent"),
}
CAST_FIGURES = tuple(
    Figure(f"{cast}_{name}", f"{of}: {title}", kind)
    for name, (title, kind) in _OF_CAST.items()
    for cast, of in CASTS.items()
)


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
    return {figure: own.reindex(sorted(own.index, key=_order), columns=steps) for figure, own in tables.items()}


def _order(module: str) -> list[tuple[bool, int, str]]:
    return [(not word.isdecimal(), int(word) if word.isdecimal() else 0, word) for word in module.split(".")]


def wandb_key(key: str) -> str:
    """Return the key under which wandb shows a figure: wandb makes one section of charts per part before the first "/".

    "numerics/layers.3.attention.wq/fprop_error" -> "numerics layers.03/attention.wq fprop_error".
    """
    module, _, figure = key.removeprefix(NUMERICS).rpartition("/")
    block = re.match(r"(\w+)\.(\d+)\.(.+)", module)
    if block is None:
        return f"{NUMERICS}{module} {figure}"
    name, number, rest = block.groups()
    return f"{NUMERICS.removesuffix('/')} {name}.{int(number):02}/{rest} {figure}"


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
    import seaborn as sns
    from matplotlib.figure import Figure as Picture  # without pyplot there is no display and no global state

    values = by_figure(run.numerics)
    measured = [one for one in (*FIGURES, *CAST_FIGURES) if one.name in values]
    ends = {one: _ends(values[one.name]) for one in measured}
    scales = {
        kind: (np.nanmin([low, *(ends[one][0] for one in alike)]), np.nanmax([high, *(ends[one][1] for one in alike)]))
        for kind, (low, high) in SCALES.items()
        for alike in [[one for one in measured if one.kind == kind]]
    }
    constant = [
        one
        for one in measured
        if np.ptp(ends[one]) < VARIES_FROM * np.ptp(scales[one.kind]) and not one.noteworthy(values).any(axis=None)
    ]
    groups = [of[i : i + COLUMNS] for of in (FIGURES, CAST_FIGURES) for i in range(0, len(of), COLUMNS)]
    lines = [[one for one in group if one in measured and one not in constant] for group in groups]
    lines = [line for line in lines if line] or [[]]
    inches = [min(6.0, max([1.6, *(LABEL_HEIGHT * len(values[one.name]) for one in line)])) for line in lines]
    picture = Picture((PANEL_WIDTH * COLUMNS, 1.5 + sum(inches) + MARGIN * len(lines)), dpi=100, layout="constrained")
    texts = [
        f"{run.name}: numerics by module (down, in the order of the model) and step (right). Dark is low, light is "
        "high; white was not measured; a cross marks values that deserve a look."
    ]
    if constant:
        named = ", ".join(f"{one.title} ({_range(values[one.name])})" for one in constant)
        texts.append(f"Not drawn, because they vary by less than {100 * VARIES_FROM:g} % of the color scale: {named}.")
    picture.suptitle("\n".join(textwrap.fill(literal(text), LINE_LETTERS) for text in texts), fontsize=FONT_SIZE + 2)
    panels = picture.subplots(len(lines), COLUMNS, squeeze=False, height_ratios=[own + MARGIN for own in inches])
    for row, line, own in zip(panels, lines, inches):
        modules = None
        for place, (axes, figure) in enumerate(zip(row, line)):
            table = values[figure.name]
            # Neighbors share the names of modules, as many as the panel's height has room for, and a color bar.
            names = math.ceil(len(table) * LABEL_HEIGHT / own) if list(table.index) != modules else False
            modules, (low, high) = list(table.index), scales[figure.kind]
            sns.heatmap(
                table.replace([np.inf, -np.inf], np.nan), ax=axes, vmin=low, vmax=high,
                cmap="viridis",  # color-blind readers see it as others do
                cbar=figure.kind not in [one.kind for one in line[place + 1 :]],
                yticklabels=names, xticklabels=math.ceil(table.shape[1] / STEP_LABELS),
            )  # fmt: skip
            down, right = np.nonzero(figure.noteworthy(values).to_numpy())
            axes.plot(
                right + 0.5, down + 0.5, "X", color="white", markeredgecolor="black", markersize=7, markeredgewidth=0.7
            )
            title = [figure.title, _range(table)] + [f"look at: {figure.limit}"] * bool(figure.limit)
            axes.set_title("\n".join(textwrap.fill(words, TITLE_LETTERS) for words in title), fontsize=FONT_SIZE)
            axes.set(xlabel="step", ylabel="")
            axes.tick_params(labelsize=FONT_SIZE - 1, rotation=0)
        for axes in row[len(line) :]:
            axes.set_visible(False)
    save_picture(picture, path)
    return path, remarks(values)


def remarks(values: Values) -> list[str]:
    """Return a line per figure that has values that deserve a look in the last step: how many, and the worst."""
    lines = []
    for figure in FIGURES:
        if figure.name not in values:
            continue
        last = values[figure.name].iloc[:, -1]
        worthy = last[figure.noteworthy(values).iloc[:, -1]]
        if len(worthy):
            worst = np.maximum(figure.low - worthy, worthy - figure.high).fillna(math.inf).idxmax()
            lines.append(
                f"step {last.name}: {figure.title} is {figure.limit or 'not finite'} in {len(worthy)} of "
                f"{last.count()} modules; {worst}: {worthy[worst]:.4g}"
            )
    return lines


def _ends(table: "pd.DataFrame") -> tuple[float, float]:
    """Return the least and the largest finite value; NaN if there is none."""
    finite = table.to_numpy()[np.isfinite(table)]
    return (finite.min(), finite.max()) if finite.size else (math.nan, math.nan)


def _range(table: "pd.DataFrame") -> str:
    return " to ".join(dict.fromkeys(f"{value:.4g}" for value in _ends(table)))
