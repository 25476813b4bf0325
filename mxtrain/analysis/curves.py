"""The loss curve of a run as arrays: over steps, tokens or time, smoothed, and as a difference to another run."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mxtrain.analysis.metrics_file import EVENT
from mxtrain.analysis.runs import Run
from mxtrain.errors import ConfigError

XAxis = Literal["step", "tokens", "time"]

SMOOTH_FROM = 50
"""Curves with at least this many points are smoothed unless a number of points is given"""


@dataclass(frozen=True)
class Curve:
    """Training and validation losses of a run. Losses (nats per token) may be ``nan`` or ``inf``."""

    x: np.ndarray
    """Steps, tokens, or seconds since the first logged step, pauses of a resumed run included; increasing"""
    loss: np.ndarray
    validation_x: np.ndarray
    validation_loss: np.ndarray

    def smoothed(self, points: int | None) -> "Curve":
        """Return this curve with the mean of so many neighbouring points; see ``window``."""
        loss = moving_average(self.loss, window(self, points) // 2)
        return Curve(self.x, loss, self.validation_x, self.validation_loss)

    def minus(self, other: "Curve") -> "Curve":
        """Return the difference of the losses where both curves are, by linear interpolation of ``other``."""
        return Curve(
            self.x,
            self.loss - _at(self.x, other.x, other.loss),
            self.validation_x,
            self.validation_loss - _at(self.validation_x, other.validation_x, other.validation_loss),
        )


def curve(run: Run, x: XAxis = "step") -> Curve:
    """Return a run's losses over ``x``.

    Raises ConfigError if the run has not logged ``x``.
    """
    steps = _column(run.training, "step")
    if x == "step":
        along = steps
    else:
        key = "tokens_seen" if x == "tokens" else "time"
        if any(row.get(key) is None for row in run.training):
            raise ConfigError(f"{run.folder}: metrics.jsonl has no {key!r} in some rows, which --x {x} needs")
        along = _column(run.training, key)
        if x == "time":  # a clock that is set back adds nothing
            along = np.concatenate([[0.0], np.cumsum(np.maximum(0.0, np.diff(along)))])
    validation_steps = _column(run.validation, "step")
    return Curve(
        along,
        _column(run.training, "loss"),
        _places(validation_steps, steps, along),  # a validation row has neither tokens nor a time of its own step
        _column(run.validation, "validation_loss"),
    )


def events(run: Run, x: XAxis = "step") -> list[tuple[float, str]]:
    """Return where on ``x`` the events of a run are, and their texts. ``x`` must be logged, as for ``curve``."""
    steps, along = _column(run.training, "step"), curve(run, x).x
    places = _places(_column(run.events, "step"), steps, along)
    return [(float(place), row[EVENT]) for place, row in zip(places, run.events, strict=True)]


def _places(wanted: np.ndarray, steps: np.ndarray, along: np.ndarray) -> np.ndarray:
    """Return where steps are on the x-axis: between the logged rows, or behind the last one at the rate before it."""
    places = np.interp(wanted, steps, along)
    if len(steps) > 1:
        rate = (along[-1] - along[-2]) / (steps[-1] - steps[-2])
        places = np.where(wanted > steps[-1], along[-1] + rate * (wanted - steps[-1]), places)
    return places


def window(curve: Curve, points: int | None) -> int:
    """Return over how many points the mean goes: an odd number; 1 is no smoothing.

    Args:
        points: the number, rounded up to an odd one. None: about 4 % of a long curve, 1 for a short one.
    """
    if points is None:
        return 2 * (len(curve.x) // 50) + 1 if len(curve.x) >= SMOOTH_FROM else 1
    return 2 * (points // 2) + 1


def notes(runs: list[Run], labels: list[str]) -> list[str]:
    """Return a line for each run with losses that are not finite, and for each run that ends before the others."""
    lines = []
    longest = max(run.training[-1]["step"] for run in runs)
    for run, label in zip(runs, labels, strict=True):
        missing = int((~np.isfinite(curve(run).loss)).sum())
        if missing:
            first = run.first_nonfinite_step
            lines.append(f"{label}: {missing} of {len(run.training)} losses are not finite, the first at step {first}")
        if (last := run.training[-1]["step"]) < longest:
            lines.append(f"{label}: ends at step {last}; the longest run ends at step {longest}")
    return lines


def moving_average(values: np.ndarray, half_width: int) -> np.ndarray:
    """Return the centred mean of up to ``2 * half_width + 1`` neighbours. Skips non-finite values, which become NaN.

    At the start the window shrinks on both sides: the loss falls fast there, and a one-sided window would lie below
    the curve. At the end the loss is flat, and the window shrinks on one side only.
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    low = np.maximum(index - half_width, 0)
    high = np.minimum(index + np.minimum(half_width, index), len(values) - 1) + 1
    with np.errstate(invalid="ignore"):
        mean = (sums[high] - sums[low]) / (counts[high] - counts[low])
    return np.where(finite, mean, np.nan)


def _at(x: np.ndarray, other_x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return ``values`` at ``x``; NaN where ``other_x`` ends, and beside a value that is not finite."""
    if not len(other_x):
        return np.full(len(x), np.nan)
    with np.errstate(invalid="ignore"):
        return np.interp(x, other_x, np.where(np.isfinite(values), values, np.nan), left=np.nan, right=np.nan)


def _column(rows: list[dict], key: str) -> np.ndarray:
    return np.array([row[key] for row in rows], dtype=float)
