"""The figures that diagnostics write to ``metrics.jsonl``: their meaning, which values to look at, and their picture.

A row of a diagnostic step has keys "numerics/MODULE/FIGURE", such as
"numerics/layers.3.attention_norm/rms_ratio_mean", beside ``step`` and ``time``. The picture has one heat map per
figure, modules of the model by steps.
"""

import math
import os
import re
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
STEP_LABELS = 6
"""Largest number of steps that are named below a panel"""
LABEL_HEIGHT, MARGIN = 0.1, 0.8
"""Height of a module's name, and of a panel's title and steps, in inches"""

Values = dict[str, dict[str, dict[int, float]]]
"""Figure -> module -> step -> value"""


@dataclass(frozen=True)
class Figure:
    """A figure: its name in keys, its title, and the values that deserve a look.

    Attributes:
        low, high: values below ``low`` or above ``high`` deserve a look; None for no limit.
        only_above: a second figure and a value. Where the second figure of the same module and step is not above this
            value, the first one deserves no look; None for no such rule.
        is_share: whether the values are shares, from 0 to 1.
    """

    name: str
    title: str
    low: float | None = None
    high: float | None = None
    only_above: tuple[str, float] | None = None
    is_share: bool = False

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
    Figure("rms_ratio_mean", "estimated / true RMS: mean", 0.8, 1.25),
    Figure("rms_ratio_std", "estimated / true RMS: standard deviation"),
    Figure("rms_ratio_min", "estimated / true RMS: least", 0.5),
    Figure("rms_ratio_max", "estimated / true RMS: largest", None, 2.0),
    # Rows of nearly equal RMS have a low r² with any estimate: only a noisy one deserves a look.
    Figure("rms_r2", "r² of estimated and true RMS", 0.95, only_above=("rms_ratio_std", 0.1)),
    Figure("output_max", "largest |output| of the norm"),
    Figure("output_max_over_bound", "largest |output| / its bound", None, 0.9),
    Figure("outlier_rows", "share of rows with an element above 10 RMS", is_share=True),
    *(Figure(f"{gemm}_error", f"{gemm}: relative error of the result") for gemm in ("fprop", "dgrad", "wgrad")),
    Figure("grad_norm_to_noise", "weight gradient: norm / quantization noise", math.sqrt(3)),
    *(
        Figure(f"{gemm}_error_worst_expert", f"{gemm}: relative error of the worst expert's result")
        for gemm in ("fprop", "dgrad", "wgrad")
    ),
    Figure("routing_agreement", "share of tokens with the experts of a norm and gate in fp64", 0.9, is_share=True),
    Figure("busiest_expert", "share of the choices that fall on the busiest expert", is_share=True),
    Figure("experts_without_tokens", "share of experts without tokens", is_share=True),
)
"""Figures of norms, of products and of routers"""
_OF_CAST = {
    "sqnr_db": "SQNR (dB)",
    "sqnr_db_worst_expert": "SQNR of the worst expert (dB)",
    "saturated": "share saturated",
    "underflowed": "share rounded to zero",
    "scale_min_exponent": "least block scale, log2",
    "scale_max_exponent": "largest block scale, log2",
}
CAST_FIGURES = tuple(
    Figure(f"{cast}_{name}", f"{of}: {title}", is_share=title.startswith("share"))
    for name, title in _OF_CAST.items()
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

    from matplotlib.figure import Figure as Picture  # without pyplot there is no display and no global state

    lines = []
    for figures in (FIGURES, CAST_FIGURES):
        groups = [figures[start : start + COLUMNS] for start in range(0, len(figures), COLUMNS)]
        lines += filter(None, [[figure for figure in group if figure.name in values] for group in groups])
    modules = max(map(len, values.values()))
    height = min(6.0, max(2.6, MARGIN + LABEL_HEIGHT * modules))
    picture = Picture(figsize=(4.2 * COLUMNS, 1 + height * len(lines)), dpi=80, layout="constrained")
    picture.suptitle(
        f"{literal(run.name)}: numerics by module (down, in the order of the model) and step (right). "
        "Dark is low, light is high; white was not measured; a cross marks values that deserve a look.",
        fontsize=14,
    )
    panels = picture.subplots(len(lines), COLUMNS, squeeze=False)
    for line, figures in zip(panels, lines):
        for axes in line[len(figures) :]:
            axes.set_visible(False)
        for axes, figure in zip(line, figures):
            _draw(axes, figure, values, steps)
            _label(axes, list(values[figure.name]), steps, height - MARGIN)
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


def _draw(axes, figure: Figure, values: Values, steps: list[int]) -> None:
    of_modules = values[figure.name]
    table = [[of_steps.get(step, math.nan) for step in steps] for of_steps in of_modules.values()]
    table = [[value if math.isfinite(value) else math.nan for value in row] for row in table]
    limits = {}
    if figure.is_share:  # zero is dark, also where all are zero
        limits = {"vmin": 0, "vmax": max((value for row in table for value in row if value > 0), default=1)}
    # Color-blind readers see this color map as others do.
    image = axes.imshow(table, aspect="auto", cmap="viridis", interpolation="nearest", **limits)
    axes.figure.colorbar(image, ax=axes, shrink=0.9).formatter.set_useOffset(False)
    lines = {module: line for line, module in enumerate(of_modules)}
    marks = [(steps.index(step), lines[module]) for module, at in figure.noteworthy(values).items() for step in at]
    if marks:
        for color, width in (("black", 2.5), ("white", 1.2)):
            style = {"linestyle": "none", "marker": "x", "markersize": 4, "markeredgewidth": width}
            axes.plot(*zip(*marks), color=color, **style)
    axes.set_title(figure.title + (f"\n(look at: {figure.limit})" if figure.limit else ""), fontsize=9)


def _label(axes, modules: list[str], steps: list[int], inches: float) -> None:
    """Name as many modules as the panel's height has room for, and some steps."""
    shown = range(0, len(modules), math.ceil(len(modules) * LABEL_HEIGHT / inches))
    axes.set_yticks(shown, [modules[index] for index in shown], fontsize=6)
    shown = range(0, len(steps), math.ceil(len(steps) / STEP_LABELS))
    axes.set_xticks(shown, [str(steps[index]) for index in shown], fontsize=7)
    axes.set_xlabel("step", fontsize=7)
