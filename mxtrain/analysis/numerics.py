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

import numpy as np

from mxtrain.analysis.metrics_file import NUMERICS
from mxtrain.analysis.plots import in_own_style, literal, picture_path, save_picture
from mxtrain.analysis.runs import Run
from mxtrain.errors import ConfigError
from mxtrain.run_folder import METRICS_FILE

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

Values = dict[str, dict[str, dict[int, float]]]
"""Figure -> module -> step -> value"""


@dataclass(frozen=True)
class Figure:
    """A figure: its name in keys, its title, and the values that deserve a look.

    Attributes:
        kind: figures of one kind have one color scale, see SCALES.
        low, high: values below ``low`` or above ``high`` deserve a look; None for no limit.
        only_above: a second figure and a value. Where the second figure of the same module and step is not above this
            value, the first one deserves no look; None for no such rule.
    """

    name: str
    title: str
    kind: str
    low: float | None = None
    high: float | None = None
    only_above: tuple[str, float] | None = None

    def distance(self, value: float) -> float:
        """Return how far a value is beyond a limit; infinite for NaN."""
        if math.isnan(value):
            return math.inf
        low = -math.inf if self.low is None else self.low - value
        high = -math.inf if self.high is None else value - self.high
        return max(low, high)

    @property
    def limit(self) -> str:
        """The limits in words; empty without any."""
        limits = (("below", self.low), ("above", self.high))
        words = " or ".join(f"{word} {limit:.3g}" for word, limit in limits if limit is not None)
        return f"{words} where {self.only_above[0]} is above {self.only_above[1]:.3g}" if self.only_above else words

    def noteworthy(self, values: Values) -> dict[str, dict[int, float]]:
        """Return module -> step -> value of the values that deserve a look."""
        seconds = values.get(self.only_above[0], {}) if self.only_above else {}
        found: dict[str, dict[int, float]] = {}
        for module, of_steps in values.get(self.name, {}).items():
            for step, value in of_steps.items():
                second = seconds.get(module, {}).get(step, math.nan)
                if self.distance(value) > 0 and not (self.only_above and second <= self.only_above[1]):
                    found.setdefault(module, {})[step] = value
        return found


FIGURES = (
    Figure("rms_ratio_mean", "estimated / true RMS: mean", "ratio", 0.8, 1.25),
    Figure("rms_ratio_min", "estimated / true RMS: least", "ratio", 0.5),
    Figure("rms_ratio_max", "estimated / true RMS: largest", "ratio", None, 2.0),
    Figure("rms_ratio_std", "estimated / true RMS: standard deviation", "spread"),
    # Rows of nearly equal RMS have a low r² with any estimate: only a noisy one deserves a look.
    Figure("rms_r2", "r² of estimated and true RMS", "share", 0.95, only_above=("rms_ratio_std", 0.1)),
    Figure("output_max_over_bound", "largest |output| / its bound", "share", None, 0.9),
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
    """Return the figures in rows of diagnostic steps. Modules are in the order of the model: layers by number."""
    found: Values = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith(NUMERICS) and value is not None:
                module, _, figure = key.removeprefix(NUMERICS).rpartition("/")
                found.setdefault(figure, {}).setdefault(module, {})[row["step"]] = value
    return {figure: {module: of[module] for module in sorted(of, key=_order)} for figure, of in found.items()}


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
    values, steps = by_figure(run.numerics), sorted({row["step"] for row in run.numerics})
    tables = {
        one: np.array([[of_steps.get(step, np.nan) for step in steps] for of_steps in values[one.name].values()])
        for one in (*FIGURES, *CAST_FIGURES)
        if one.name in values
    }
    scales = {
        kind: _ends(np.concatenate([ends, *(table.ravel() for one, table in tables.items() if one.kind == kind)]))
        for kind, ends in SCALES.items()
    }
    constant = [
        one
        for one, table in tables.items()
        if np.ptp(_ends(table)) < VARIES_FROM * np.ptp(scales[one.kind]) and not np.isinf(table).any()
        if not one.noteworthy(values)
    ]
    groups = [of[i : i + COLUMNS] for of in (FIGURES, CAST_FIGURES) for i in range(0, len(of), COLUMNS)]
    lines = [[one for one in group if one in tables and one not in constant] for group in groups]
    lines = [line for line in lines if line]
    inches = [min(6.0, max(1.6, LABEL_HEIGHT * max(len(tables[one]) for one in line))) for line in lines]

    from matplotlib.figure import Figure as Picture  # without pyplot there is no display and no global state

    size = (PANEL_WIDTH * COLUMNS, 1.5 + sum(inches) + MARGIN * len(lines))
    picture = Picture(figsize=size, dpi=100, layout="constrained")
    texts = [
        f"{run.name}: numerics by module (down, in the order of the model) and step (right). Dark is low, light is "
        "high; white was not measured; a cross marks values that deserve a look."
    ]
    if constant:
        named = ", ".join(f"{one.title} ({_range(tables[one])})" for one in constant)
        texts.append(f"Not drawn, because they vary by less than {100 * VARIES_FROM:g} % of the color scale: {named}.")
    picture.suptitle("\n".join(textwrap.fill(literal(text), LINE_LETTERS) for text in texts), fontsize=FONT_SIZE + 2)
    parts = picture.subfigures(
        max(1, len(lines)), 1, squeeze=False, height_ratios=[own + MARGIN for own in inches] or None
    )
    for part, line, own in zip(parts[:, 0], lines, inches):
        row = part.subplots(1, COLUMNS)
        for index, (axes, figure) in enumerate(zip(row, line)):
            image = _draw(axes, figure, tables[figure], scales[figure.kind], values, steps)
            modules = list(values[figure.name])
            # Neighbors of one kind share a color bar, and those of equal modules the modules' names.
            _label(axes, modules if index == 0 or modules != list(values[line[index - 1].name]) else [], steps, own)
            if figure.kind not in [one.kind for one in line[index + 1 :]]:
                alike = [axes for axes, one in zip(row, line) if one.kind == figure.kind]
                part.colorbar(image, ax=alike, aspect=30, pad=0.01).ax.tick_params(labelsize=FONT_SIZE - 1)
        for axes in row[len(line) :]:
            axes.set_visible(False)
    save_picture(picture, path)
    return path, remarks(values, steps[-1])


def remarks(values: Values, step: int) -> list[str]:
    """Return a line per figure that has values that deserve a look in ``step``: how many, and the worst."""
    lines = []
    for figure in FIGURES:
        count = sum(step in of_steps for of_steps in values.get(figure.name, {}).values())
        worthy = {module: at[step] for module, at in figure.noteworthy(values).items() if step in at}
        if worthy:
            worst = max(worthy, key=lambda module: figure.distance(worthy[module]))
            lines.append(
                # Of a figure without limits, only NaN deserves a look.
                f"step {step}: {figure.title} is {figure.limit or 'NaN'} in {len(worthy)} of {count} modules; "
                f"{worst}: {worthy[worst]:.4g}"
            )
    return lines


def _draw(axes, figure: Figure, table: np.ndarray, scale: tuple[float, float], values: Values, steps: list[int]):
    # Color-blind readers see this color map as others do.
    style = {"aspect": "auto", "cmap": "viridis", "interpolation": "nearest"}
    image = axes.imshow(np.where(np.isfinite(table), table, np.nan), vmin=scale[0], vmax=scale[1], **style)
    lines = {module: line for line, module in enumerate(values[figure.name])}
    marks = [(steps.index(step), lines[module]) for module, at in figure.noteworthy(values).items() for step in at]
    if marks:
        for color, width in (("black", 2.5), ("white", 1.2)):
            style = {"linestyle": "none", "marker": "x", "markersize": 4, "markeredgewidth": width}
            axes.plot(*zip(*marks), color=color, **style)
    title = [figure.title, _range(table)] + [f"look at: {figure.limit}"] * bool(figure.limit)
    axes.set_title("\n".join(textwrap.fill(line, TITLE_LETTERS) for line in title), fontsize=FONT_SIZE)
    return image


def _ends(values: np.ndarray) -> tuple[float, float]:
    """Return the least and the largest finite value; NaN if there is none."""
    finite = values[np.isfinite(values)]
    return (finite.min(), finite.max()) if finite.size else (np.nan, np.nan)


def _range(values: np.ndarray) -> str:
    return " to ".join(dict.fromkeys(f"{value:.4g}" for value in _ends(values)))


def _label(axes, modules: list[str], steps: list[int], inches: float) -> None:
    """Name as many modules as the panel's height has room for, and some steps."""
    shown = range(0, len(modules), math.ceil(len(modules) * LABEL_HEIGHT / inches) or 1)
    axes.set_yticks(shown, [modules[index] for index in shown], fontsize=FONT_SIZE - 1)
    shown = range(0, len(steps), math.ceil(len(steps) / STEP_LABELS))
    axes.set_xticks(shown, [str(steps[index]) for index in shown], fontsize=FONT_SIZE - 1)
    axes.set_xlabel("step", fontsize=FONT_SIZE - 1)
