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

from mxtrain.analysis.metrics_file import NUMERICS
from mxtrain.analysis.plots import in_own_style, literal, picture_path, save_picture
from mxtrain.analysis.runs import Run
from mxtrain.errors import ConfigError
from mxtrain.run_folder.files import METRICS_FILE

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

COLUMNS = 6
"""Panels beside each other: one per cast"""
PANEL_WIDTH = 3
STEP_LABELS = 4
"""Largest number of steps that are named below a panel"""
FONT_SIZE, LABEL_HEIGHT, MARGIN = 9, 0.13, 1.5
"""Points; height of a module's name, and of a panel's title and steps, in inches"""
TITLE_LETTERS, LINE_LETTERS = 25, 190
"""Letters in a line of a panel's title, and of a text over the whole picture"""

SCALES = {
    "ratio": (0.5, 2.0),
    "spread": (0.0, 0.1),
    "share": (0.0, 1.0),
    "rare": (0.0, 0.01),
    "saturated": (0.0, 0.01),
    "underflowed": (0.0, 0.01),
    "error": (0.0, 0.1),
    "sqnr_db": (15.0, 35.0),
    "exponent": (-16.0, 0.0),
    "output": (0.0, 10.0),
    "noise": (0.0, 10.0),
}
"""
Kind of figure -> what its color scale covers at least: values that differ little, as 31.5 and 31.6 dB, look alike
"""
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
    constant = [figure for figure in (*FIGURES, *CAST_FIGURES) if _is_constant(figure, values)]
    lines = []
    for figures in (FIGURES, CAST_FIGURES):
        groups = [figures[start : start + COLUMNS] for start in range(0, len(figures), COLUMNS)]
        lines += [[one for one in group if one.name in values and one not in constant] for group in groups]
    lines = [line for line in lines if line]
    inches = [min(6.0, max(1.6, LABEL_HEIGHT * max(len(values[one.name]) for one in line))) for line in lines]

    from matplotlib.figure import Figure as Picture  # without pyplot there is no display and no global state

    height = sum(inches) + MARGIN * len(lines) + 1.5
    picture = Picture(figsize=(PANEL_WIDTH * COLUMNS, height), dpi=100, layout="constrained")
    text = (
        f"{run.name}: numerics by module (down, in the order of the model) and step (right). Dark is low, light is "
        "high; white was not measured; a cross marks values that deserve a look."
    )
    picture.suptitle(literal(textwrap.fill(text, LINE_LETTERS)), fontsize=FONT_SIZE + 2)
    parts = picture.subfigures(len(lines) + 1, 1, squeeze=False, height_ratios=[0.8, *(own + MARGIN for own in inches)])
    for part, figures, own in zip(parts[1:, 0], lines, inches):
        _draw_line(part.subplots(1, COLUMNS), figures, values, steps, own)
    if constant:
        named = ", ".join(f"{one.title} ({_shown_range(_all(values, one.name))})" for one in constant)
        text = f"Not drawn, because they vary by less than {VARIES_FROM:.0%} of the color scale: {named}."
        parts[0, 0].suptitle(textwrap.fill(text, LINE_LETTERS), fontsize=FONT_SIZE + 1, y=0.9, va="top")
    save_picture(picture, path)
    return path, remarks(values, steps[-1])


def _is_constant(figure: Figure, values: Values) -> bool:
    """Return whether a figure was measured, and looks the same everywhere."""
    own = _all(values, figure.name)
    (low, high), (least, largest) = _scale(figure, values), _range(own)
    is_same = all(map(math.isfinite, own)) and largest - least < VARIES_FROM * (high - low)
    return bool(own) and is_same and not figure.noteworthy(values)


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


def _draw_line(row, figures: list[Figure], values: Values, steps: list[int], inches: float) -> None:
    """Draw panels beside each other. Neighbors of one kind share a color bar, and of equal modules their names."""
    for axes in row[len(figures) :]:
        axes.set_visible(False)
    for index, (axes, figure) in enumerate(zip(row, figures)):
        image = _draw(axes, figure, values, steps)
        modules = list(values[figure.name])
        is_named = index == 0 or modules != list(values[figures[index - 1].name])
        _label(axes, modules if is_named else [], steps, inches)
        if index + 1 == len(figures) or figures[index + 1].kind != figure.kind:
            alike = [axes for axes, one in zip(row, figures) if one.kind == figure.kind]
            axes.figure.colorbar(image, ax=alike, aspect=30, pad=0.01).ax.tick_params(labelsize=FONT_SIZE - 1)


def _draw(axes, figure: Figure, values: Values, steps: list[int]):
    of_modules = values[figure.name]
    table = [[of_steps.get(step, math.nan) for step in steps] for of_steps in of_modules.values()]
    low, high = _scale(figure, values)
    table = [[value if math.isfinite(value) else math.nan for value in row] for row in table]
    # Color-blind readers see this color map as others do.
    image = axes.imshow(table, aspect="auto", cmap="viridis", interpolation="nearest", vmin=low, vmax=high)
    lines = {module: line for line, module in enumerate(of_modules)}
    marks = [(steps.index(step), lines[module]) for module, at in figure.noteworthy(values).items() for step in at]
    if marks:
        for color, width in (("black", 2.5), ("white", 1.2)):
            style = {"linestyle": "none", "marker": "x", "markersize": 4, "markeredgewidth": width}
            axes.plot(*zip(*marks), color=color, **style)
    title = [figure.title, _shown_range(_all(values, figure.name))]
    title += [f"look at: {figure.limit}"] if figure.limit else []
    axes.set_title("\n".join(textwrap.fill(line, TITLE_LETTERS) for line in title), fontsize=FONT_SIZE)
    return image


def _scale(figure: Figure, values: Values) -> tuple[float, float]:
    """Return the ends of the color scale of a figure's kind."""
    alike = [one.name for one in (*FIGURES, *CAST_FIGURES) if one.kind == figure.kind]
    return _range([*SCALES[figure.kind], *(value for name in alike for value in _all(values, name))])


def _all(values: Values, name: str) -> list[float]:
    return [value for of_steps in values.get(name, {}).values() for value in of_steps.values()]


def _range(values: list[float]) -> tuple[float, float]:
    """Return the least and the largest finite value; NaN if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return min(finite, default=math.nan), max(finite, default=math.nan)


def _shown_range(values: list[float]) -> str:
    low, high = (f"{value:.4g}" for value in _range(values))
    return low if low == high else f"{low} to {high}"


def _label(axes, modules: list[str], steps: list[int], inches: float) -> None:
    """Name as many modules as the panel's height has room for, and some steps."""
    shown = range(0, len(modules), math.ceil(len(modules) * LABEL_HEIGHT / inches) or 1)
    axes.set_yticks(shown, [modules[index] for index in shown], fontsize=FONT_SIZE - 1)
    shown = range(0, len(steps), math.ceil(len(steps) / STEP_LABELS))
    axes.set_xticks(shown, [str(steps[index]) for index in shown], fontsize=FONT_SIZE - 1)
    axes.set_xlabel("step", fontsize=FONT_SIZE - 1)
