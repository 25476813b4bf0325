"""Means over seeds with their standard errors, and paired differences with confidence intervals."""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from mxtrain.analysis.student_t import t_quantile

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
