"""What is kept of a measurement: values that can be combined over batches and processes without any error."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from mxtrain.launch.pytorch import max_of_each, norm_of_each

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
    """Return the same totals with Python numbers. All tensors of a dtype are read from their device at once."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for totals in found.values():
        for values in totals:
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    by_dtype.setdefault(value.dtype, []).append(value)
    read = {}
    for tensors in by_dtype.values():
        read |= zip(map(id, tensors), torch.stack(tensors).tolist())

    def as_numbers(values: Values) -> Values:
        return {name: read.get(id(value), value) for name, value in values.items()}

    return {key: Totals(*(as_numbers(values) for values in totals)) for key, totals in found.items()}


def norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the square root of the sum of squares of every fp32 tensor, fp64 []. No square overflows or underflows.

    On a GPU, ``torch.linalg.vector_norm`` would copy every tensor to fp64 first. This function reads them as they are,
    in one launch.
    """
    return norm_of_each(tensors, 2, torch.float64)


def count_where(compare: Callable, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Return for how many elements ``compare`` (such as ``torch.gt``) holds, for every pair of tensors, fp64 [].

    Args:
        pairs: the first tensor is fp32, of the shape of the comparison.
    """
    # On a GPU, ``torch.count_nonzero`` takes three kernels a mask, and copies the mask to int64. This takes one a mask
    # and one launch for all sums. A sum of zeros and ones is exact in fp64.
    masks = [compare(a, b, out=torch.empty_like(a)) for a, b in pairs]
    return norm_of_each(masks, 1, torch.float64)


def maxima(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the largest element of every tensor, [], in one launch on a GPU. Tensors with a NaN give NaN."""
    return max_of_each(tensors)


def ratio(part: float, whole: float) -> float:
    """Return part / whole, and 0 for 0 / 0."""
    if whole == 0:
        return 0.0 if part == 0 else float("inf")
    return part / whole
