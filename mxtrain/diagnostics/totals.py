"""What is kept of a measurement: values that can be combined over batches and processes without any error."""

from typing import NamedTuple

import torch

Values = dict[str, torch.Tensor | float]


class Totals(NamedTuple):
    """Values by name. Numbers, or fp64 tensors [] while they are on a device."""

    sums: Values
    least: Values
    largest: Values


def combined(a: Totals, b: Totals) -> Totals:
    """Return the totals of two samples together. Both have the same names, and hold numbers."""
    return Totals(
        {name: value + b.sums[name] for name, value in a.sums.items()},
        {name: min(value, b.least[name]) for name, value in a.least.items()},
        {name: max(value, b.largest[name]) for name, value in a.largest.items()},
    )


def numbers(found: dict[tuple, Totals]) -> dict[tuple, Totals]:
    """Return the same totals with Python numbers. All tensors are read from their device at once."""
    tensors = [
        value
        for totals in found.values()
        for values in totals
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    read = iter(torch.stack([tensor.double() for tensor in tensors]).tolist() if tensors else [])

    def as_numbers(values: Values) -> Values:
        return {name: next(read) if isinstance(value, torch.Tensor) else value for name, value in values.items()}

    return {key: Totals(*(as_numbers(values) for values in totals)) for key, totals in found.items()}


def ratio(part: float, whole: float) -> float:
    """Return part / whole, and 0 for 0 / 0."""
    if whole == 0:
        return 0.0 if part == 0 else float("inf")
    return part / whole
