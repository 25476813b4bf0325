"""Casts of a recipe, called as tests find them short."""

import torch

from mxtrain.formats.matrices import CastSpec


def cast(parts, recipe, mode, dims, **spec):
    """``FormatOps.cast`` with the fields of a ``CastSpec``."""
    return recipe.ops.cast(parts, recipe, mode, dims, CastSpec(**spec))


def weight_of_tiles(rows: int, columns: int) -> torch.Tensor:
    """fp32 [rows, columns] of small integers times a power of two that is smaller for every further tile of 32 x 32."""
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    numbers = (37 * i + 101 * j + 7 * i * j) % 251 - 125
    return numbers * 2.0 ** (-6.0 - 3 * (i // 32) - 5 * (j // 32))
