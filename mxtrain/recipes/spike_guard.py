"""The guard's rule: when a loss is a spike, and which steps then have the other recipe.

A loss is a spike if the ``window`` losses before it are known and it is more than ``sigmas`` of their standard
deviations above their mean, or if it is not finite. The spike of step s changes the recipe of steps s + 2 to
s + 1 + ``steps``: a GPU's loss of step s is read while step s + 1 runs, so nothing waits for it. From the spike to the
last of these steps no loss is a spike. A spike empties the window; later finite losses fill it again.
"""

import json
import math
from collections import deque
from statistics import fmean, pstdev

DELAY = 2


class SpikeGuard:
    """Follows the rule above. The same losses lead to the same steps, on every rank and after a resume.

    Args:
        window, sigmas, steps: see the rule.

    Attributes:
        first, last: the steps with the other recipe after the latest spike; 0 and 0 before the first spike.
        reason: the latest spike in words.
    """

    def __init__(self, window: int, sigmas: float, steps: int):
        self.sigmas, self.steps = sigmas, steps
        self.first = self.last = 0
        self.reason = ""
        self._losses: deque[float] = deque(maxlen=window)

    def observe(self, step: int, loss: float) -> None:
        """Take the loss of a step. Steps come in order, each once."""
        if step > self.last and (reason := self._spike(loss)):
            self.first, self.last = step + DELAY, step + DELAY - 1 + self.steps
            self.reason = f"the loss of step {step} is {reason}"
            self._losses.clear()
        elif math.isfinite(loss):
            self._losses.append(loss)

    def falls_back(self, step: int) -> bool:
        """Whether the step has the other recipe. Known when the loss of the step before the last one is."""
        return self.first <= step <= self.last

    def state_dict(self) -> dict[str, str]:
        """Return what a resumed run needs, as one value."""
        names = ("first", "last", "reason")
        return {"guard": json.dumps({**{name: getattr(self, name) for name in names}, "losses": [*self._losses]})}

    def load_state_dict(self, state: dict[str, str]) -> None:
        values = json.loads(state["guard"])
        self._losses.clear()
        self._losses.extend(values.pop("losses"))
        for name, value in values.items():
            setattr(self, name, value)

    def _spike(self, loss: float) -> str:
        """Why a loss is a spike; empty if it is not."""
        if not math.isfinite(loss):
            return str(loss)
        if len(self._losses) < self._losses.maxlen:
            return ""
        mean, deviation = fmean(self._losses), pstdev(self._losses)
        if loss <= mean + self.sigmas * deviation:
            return ""
        return f"{loss:.4f}, above {mean:.4f} + {self.sigmas:g} x {deviation:.4f}"
