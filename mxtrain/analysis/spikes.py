"""Finds spikes in a training loss by a fixed rule."""

import math
import statistics
from collections.abc import Sequence

WINDOW = 20
"""Number of logged losses with which the next one is compared"""
DEVIATIONS = 6.0
"""Smallest height, in the window's standard deviations, which follow from its median absolute deviation"""
HEIGHT = 0.1
"""Smallest height in nats"""

RULE = (
    f"a spike is a logged loss more than {DEVIATIONS:g} standard deviations and {HEIGHT:g} nats above the median of "
    f"the {WINDOW} logged losses before it (deviations by 1.4826 times the median absolute deviation); neighbours "
    f"count as one, and the first {WINDOW} logged losses of a run cannot be spikes"
)


def spikes(losses: Sequence[float]) -> list[int]:
    """Return the positions in ``losses`` (nats) at which a spike begins; see RULE.

    The first ``WINDOW`` losses begin no spike. Losses that are not finite are none, and are left out of windows.
    """
    found, was_high = [], False
    for position in range(WINDOW, len(losses)):
        before = [loss for loss in losses[position - WINDOW : position] if math.isfinite(loss)]
        is_high = bool(before) and math.isfinite(losses[position]) and _is_high(losses[position], before)
        if is_high and not was_high:
            found.append(position)
        was_high = is_high
    return found


def _is_high(loss: float, before: list[float]) -> bool:
    median = statistics.median(before)
    deviation = 1.4826 * statistics.median(abs(value - median) for value in before)
    return loss - median > max(DEVIATIONS * deviation, HEIGHT)
