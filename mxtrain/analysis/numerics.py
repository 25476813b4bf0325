"""The figures that diagnostics write to ``metrics.jsonl``: their keys, what they mean, and which values to look at.

A row of a diagnostic step has keys "numerics/MODULE/FIGURE", such as
"numerics/layers.3.attention_norm/rms_ratio_mean", beside ``step`` and ``time``.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

PREFIX = "numerics/"
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

    def is_noteworthy(self, value: float, second: float = math.nan) -> bool:
        """Whether a value deserves a look. ``second``: that of the figure in ``only_above``; NaN if there is none."""
        return self.distance(value) > 0 and not (self.only_above and second <= self.only_above[1])

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


NORM_FIGURES = (
    Figure("rms_ratio_mean", "estimated / true RMS: mean", 0.8, 1.25),
    Figure("rms_ratio_std", "estimated / true RMS: standard deviation"),
    Figure("rms_ratio_min", "estimated / true RMS: least", 0.5),
    Figure("rms_ratio_max", "estimated / true RMS: largest", None, 2.0),
    # Rows of nearly equal RMS have a low r² with any estimate: only a noisy one deserves a look.
    Figure("rms_r2", "r² of estimated and true RMS", 0.95, only_above=("rms_ratio_std", 0.1)),
    Figure("output_max", "largest |output| of the norm"),
    Figure("output_max_over_bound", "largest |output| / its bound", None, 0.9),
    Figure("outlier_rows", "share of rows with an element above 10 RMS", is_share=True),
)
_OF_CAST = (
    ("sqnr_db", "SQNR (dB)"),
    ("saturated", "share saturated"),
    ("underflowed", "share rounded to zero"),
    ("scale_min_exponent", "least block scale, log2"),
    ("scale_max_exponent", "largest block scale, log2"),
)
CAST_FIGURES = tuple(
    Figure(f"{cast}_{name}", f"{of}: {title}", is_share=title.startswith("share"))
    for name, title in _OF_CAST
    for cast, of in CASTS.items()
)
PRODUCT_FIGURES = (
    *(Figure(f"{gemm}_error", f"{gemm}: relative error of the result") for gemm in ("fprop", "dgrad", "wgrad")),
    Figure("grad_norm_to_noise", "weight gradient: norm / quantization noise", math.sqrt(3)),
)


def noteworthy(figure: Figure, values: dict[str, dict[str, dict[int, float]]]) -> dict[str, dict[int, float]]:
    """Return module -> step -> value of the values of a figure that deserve a look, among those of ``by_figure``."""
    seconds = values.get(figure.only_above[0], {}) if figure.only_above else {}
    found: dict[str, dict[int, float]] = {}
    for module, of_steps in values.get(figure.name, {}).items():
        for step, value in of_steps.items():
            if figure.is_noteworthy(value, seconds.get(module, {}).get(step, math.nan)):
                found.setdefault(module, {})[step] = value
    return found


def numerics_rows(rows: Iterable[dict]) -> list[dict]:
    """Return the rows of diagnostic steps among the rows of ``metrics.jsonl``."""
    return [row for row in rows if any(key.startswith(PREFIX) for key in row)]


def split_key(key: str) -> tuple[str, str]:
    """Return module and figure of a key: "numerics/layers.3.attention.wq/fprop_error"."""
    module, _, figure = key.removeprefix(PREFIX).rpartition("/")
    return module, figure


def by_figure(rows: list[dict]) -> dict[str, dict[str, dict[int, float]]]:
    """Return figure -> module -> step -> value. Modules are in the order of the model: layers by number."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith(PREFIX) and value is not None:
                module, figure = split_key(key)
                found.setdefault(figure, {}).setdefault(module, {})[row["step"]] = value
    return {
        figure: dict(sorted(modules.items(), key=lambda item: _order(item[0]))) for figure, modules in found.items()
    }


def _order(module: str) -> list[tuple[bool, int, str]]:
    return [(not word.isdecimal(), int(word) if word.isdecimal() else 0, word) for word in module.split(".")]


def wandb_key(key: str) -> str:
    """Return the key under which wandb shows a figure: wandb makes one section of charts per part before the first "/".

    "numerics/layers.3.attention.wq/fprop_error" -> "numerics layers.03/attention.wq fprop_error".
    """
    module, figure = split_key(key)
    block = re.match(r"(\w+)\.(\d+)\.(.+)", module)
    if block is None:
        return f"{PREFIX.removesuffix('/')}/{module} {figure}"
    name, number, rest = block.groups()
    return f"{PREFIX.removesuffix('/')} {name}.{int(number):02}/{rest} {figure}"
