"""Casts by the format of a recipe: those of ``mxtrain.ops.nvfp4``, or of ``mxtrain.ops.mxfp8``, also without a format.

Linears with the same X can be one GEMM: ``parts`` are then several matrices, W or dY of one GEMM. Every part has the
bits that it has alone.

Under tensor parallelism a process holds a part of some matrices. ``group`` is the name of the process group that holds
such a matrix together, None for a whole one. NVFP4 takes the scale of a matrix from its largest magnitude, wherever
that is; block scales and MXFP8 need no communication.
"""

from collections.abc import Sequence

import torch

from mxtrain.ops import mxfp8, nvfp4
from mxtrain.ops.gemm import Codes, Operand
from mxtrain.recipes.recipe import LinearRecipe, Recipe, RMSEstimate


def _format_of(recipe: Recipe):
    """Return the module that casts to the recipe's format."""
    return nvfp4 if recipe.is_nvfp4 else mxfp8


def cast(
    parts: Sequence[torch.Tensor], recipe: Recipe, mode: str, dims: tuple[int, ...], **settings
) -> dict[int, Operand | Codes]:
    """Quantize X [R, C] along each dimension in ``dims``, from one read of X; return the operands by dimension.

    The settings are those of ``mxtrain.ops.mxfp8.cast`` and ``mxtrain.ops.nvfp4.cast``.
    """
    return _format_of(recipe).cast(parts, recipe, mode, dims, **settings)


def normalize(
    x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, mode: str, group: str | None = None, as_codes: bool = False
) -> tuple[Operand | Codes, torch.Tensor]:
    """x [T, D] -> xhat = x * rho as fprop's operand [T, D], and rho, fp32 [T]. By one kernel if the format has one.

    With ``as_codes`` codes and scales in every mode; ``group`` holds other rows of the same matrix.
    """
    return _format_of(recipe).normalize(x, estimate, recipe, mode, group, as_codes)


def from_codes(codes: Codes, recipe: Recipe, mode: str, dim: int) -> Operand:
    """The operand that the codes stand for, with the bits and the memory layout of ``cast`` along ``dim``."""
    return _format_of(recipe).from_codes(codes, recipe, mode, dim)


def joins(recipe: LinearRecipe, mode: str) -> bool:
    """Return whether ``cast`` takes several matrices with this recipe in this mode.

    A GEMM in high precision needs no cast, so that joining its operands would be a copy. Native NVFP4 has one tensor
    scale for an operand, and the parts have one each.
    """
    return all(gemm.format is not None and not (gemm.is_nvfp4 and mode == "native") for gemm in recipe.gemms)
