"""Casts of a recipe, called as tests find them short."""

from mxtrain.formats.matrices import CastSpec


def cast(parts, recipe, mode, dims, **spec):
    """``FormatOps.cast`` with the fields of a ``CastSpec``."""
    return recipe.ops.cast(parts, recipe, mode, dims, CastSpec(**spec))
