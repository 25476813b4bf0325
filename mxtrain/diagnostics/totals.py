"""What is kept of a measurement: values that can be combined over batches and processes without any error."""

import math
from typing import NamedTuple

import torch

from mxtrain.launch.pytorch import norm_of_each

Values = dict[str, torch.Tensor | float]


class Totals(NamedTuple):
    """Values by name. Numbers, or tensors [] in fp64 or fp32 while they are on a device."""

    sums: Values
    least: Values
    largest: Values
    norms: Values = {}
    """Roots of sums of squares"""


def combined(a: Totals, b: Totals) -> Totals:
    """Return the totals of two samples together. Both have the same names, and hold numbers."""
    return Totals(
        {name: value + b.sums[name] for name, value in a.sums.items()},
        {name: min(value, b.least[name]) for name, value in a.least.items()},
        {name: max(value, b.largest[name]) for name, value in a.largest.items()},
        {name: math.hypot(value, b.norms[name]) for name, value in a.norms.items()},
    )


def numbers(found: dict[tuple, Totals]) -> dict[tuple, Totals]:
    """Return the same totals with Python numbers. All tensors are read from their device at once."""
    values = [value for totals in found.values() for part in totals for value in part.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    read = dict(zip(map(id, tensors), torch.stack([t.double() for t in tensors]).tolist())) if tensors else {}

    def as_numbers(values: Values) -> Values:
        return {name: read.get(id(value), value) for name, value in values.items()}

    return {key: Totals(*(as_numbers(values) for values in totals)) for key, totals in found.items()}


def norm(x: torch.Tensor) -> torch.Tensor:
    """Return the square root of the sum of squares of an fp32 tensor, fp64 []. No square overflows or underflows.

    On a GPU, ``torch.linalg.vector_norm`` would copy the tensor to fp64 first.
    """
    return norm_of_each([x], 2, torch.float64)[0]


def count(mask: torch.Tensor) -> torch.Tensor:
    """Return how many elements of a mask are true, fp64 [], exact. ``torch.count_nonzero`` copies the mask to int64."""
    return norm_of_each([mask.float()], 1, torch.float64)[0]


def ratio(part: float, whole: float) -> float:
    """Return part / whole, and 0 for 0 / 0."""
    if whole == 0:
        return 0.0 if part == 0 else float("inf")
    return part / whole
