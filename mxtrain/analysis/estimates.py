"""Means over seeds with their standard errors, and paired differences with confidence intervals of Student's t."""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """The mean of independent values, and how well they determine it."""

    mean: float
    count: int
    error: float | None
    """Standard error of the mean: the sample's standard deviation / sqrt(count). None for one value"""

    @property
    def half_width(self) -> float | None:
        """Half the width of the confidence interval of Student's t around the mean. None for one value."""
        return None if self.error is None else t_quantile(CONFIDENCE, self.count - 1) * self.error


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean of ``values`` and its standard error; None if there are no values."""
    if not values:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(statistics.fmean(values), len(values), error)


def paired_difference(values: Mapping[Hashable, float], baseline: Mapping[Hashable, float]) -> Estimate | None:
    """Return the mean of ``values[seed] - baseline[seed]`` over the seeds in both; None if they share none.

    What a seed does to both runs of a pair cancels, so the difference is known better than each mean.
    """
    return estimate([value - baseline[seed] for seed, value in values.items() if seed in baseline])


def t_quantile(confidence: float, degrees: int) -> float:
    """Return the t for which [-t, t] holds the share ``confidence`` of the distribution: 4.303 for 0.95 and 2 degrees.

    Raises ValueError unless 0 < confidence < 1 and degrees >= 1.
    """
    if not 0 < confidence < 1 or degrees < 1:
        raise ValueError(f"confidence = {confidence} is not in (0, 1), or degrees = {degrees} is below 1")
    low, high = 0.0, math.pi / 2  # the angle whose tangent is t / sqrt(degrees)
    for _ in range(100):  # halving: more often than a float has bits
        middle = (low + high) / 2
        if central_probability(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def central_probability(angle: float, degrees: int) -> float:
    """Return the probability that Student's t lies in [-t, t], t = sqrt(degrees) * tan(angle), without SciPy.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):  # the series ends at cosine to the power of degrees - 2
        term *= (k - 1) / k * cosine**2
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
