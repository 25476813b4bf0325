"""The operands of a linear layer's three GEMMs, one function per role. Each role is cast as its recipe's format says.

X is [T, D] (tokens, input features), W is [N, D], dY is [T, N]. Every operand is quantized along the axis that its
GEMM reduces over:

    fprop   Y  = X  W^T     X along D,           W along D
    dgrad   dX = dY W       dY along N,          W along N
    wgrad   dW = dY^T X     dY along tokens,     X along tokens

``mxtrain.ops.mxfp8`` (which also serves recipes without a cast) and ``mxtrain.ops.nvfp4`` hold the casts.
``_format_of`` is the only place that chooses between them.

Linears with the same X can be one GEMM: ``ws`` and ``dys`` are then several matrices, W and dY of one GEMM in parts.
Every part has the bits that it has alone.

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


def activation(x: torch.Tensor, recipe: Recipe, mode: str, group: str | None = None) -> Operand:
    """X as fprop's operand [T, D], where no MXNorm has made it."""
    return _format_of(recipe).cast([x], recipe, mode, (1,), group=group)[1]


def normalize(
    x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, mode: str, group: str | None = None, as_codes: bool = False
) -> tuple[Operand | Codes, torch.Tensor]:
    """x [T, D] -> xhat = x * rho as fprop's operand [T, D], and rho, fp32 [T]. By one kernel if the format has one.

    With ``as_codes`` codes and scales in every mode; ``group`` holds other rows of the same matrix.
    """
    return _format_of(recipe).normalize(x, estimate, recipe, mode, group, as_codes)


def activation_along_tokens(
    x: torch.Tensor,
    recipe: Recipe,
    mode: str,
    rho: torch.Tensor | None,
    signs: torch.Tensor | None,
    group: str | None = None,
    as_codes: bool = False,
) -> Operand | Codes:
    """X as wgrad's operand [D, T]; with ``rho`` [T], X diag(rho) row by row.

    Args:
        signs: packed signs of the Hadamard transform, int64 []; None if the recipe has no transform.
        as_codes: return codes and scales in every mode; T is then a multiple of the block size.
    """
    settings = dict(row_factor=rho, signs=signs, group=group, as_codes=as_codes)
    return _format_of(recipe).cast([x], recipe, mode, (0,), **settings)[0]


def from_codes(codes: Codes, recipe: Recipe, mode: str, dim: int) -> Operand:
    """The operand that the codes stand for, with the bits and the memory layout of the functions here.

    Args:
        dim: 1 for codes of X [T, D] along D, 0 for codes [D, T] along tokens.
    """
    return _format_of(recipe).from_codes(codes, recipe, mode, dim)


def joins(recipe: LinearRecipe, mode: str) -> bool:
    """Return whether ``weights`` and ``gradients`` take several matrices with this recipe in this mode.

    A GEMM in high precision needs no cast, so that joining its operands would be a copy. Native NVFP4 has one tensor
    scale for an operand, and the parts have one each.
    """
    return all(gemm.format is not None and not (gemm.is_nvfp4 and mode == "native") for gemm in recipe.gemms)


def weights(
    ws: Sequence[torch.Tensor],
    recipe: Recipe,
    mode: str,
    dim: int,
    gain: torch.Tensor | None,
    group: str | None = None,
) -> Operand:
    """Weights [N_i, D] as one operand of fprop (dim 1: [sum N_i, D]) or dgrad (dim 0: [D, sum N_i]).

    Args:
        gain: [D]; with it, W diag(gain).
    """
    return _cast_weights(ws, recipe, mode, (dim,), gain, group)[dim]


def weights_for_both(
    ws: Sequence[torch.Tensor], recipe: LinearRecipe, mode: str, gain: torch.Tensor | None, group: str | None = None
) -> tuple[Operand, Operand]:
    """Weights as the operands of fprop and dgrad, from one read of W if both have the same recipe."""
    if recipe.fprop == recipe.dgrad:
        operands = _cast_weights(ws, recipe.fprop, mode, (1, 0), gain, group)
        return operands[1], operands[0]
    return weights(ws, recipe.fprop, mode, 1, gain, group), weights(ws, recipe.dgrad, mode, 0, gain, group)


def _cast_weights(ws, recipe: Recipe, mode: str, dims: tuple[int, ...], gain, group) -> dict[int, Operand]:
    return _format_of(recipe).cast(ws, recipe, mode, dims, column_factor=gain, is_weight=True, group=group)


def gradients(
    dys: Sequence[torch.Tensor],
    recipe: LinearRecipe,
    mode: str,
    for_dgrad: bool,
    for_wgrad: bool,
    signs: torch.Tensor | None,
    draws: Sequence[torch.Tensor | None],
    group: str | None = None,
) -> tuple[Operand | None, Operand | None]:
    """Gradients [T, N_i] as one operand of dgrad [T, sum N_i] and one of wgrad [sum N_i, T]; None where not wanted.

    Two operands with the same recipe come from one read of dY.

    Args:
        signs: as for ``activation_along_tokens``.
        draws: for each part what stochastic rounding derives its random bits from
            (``mxtrain.rng.rounding.Draws``); None if the recipe rounds to nearest.
    """

    def cast(gemm: Recipe, dims: tuple[int, ...]) -> dict[int, Operand]:
        if not dims:
            return {}
        return _format_of(gemm).cast(dys, gemm, mode, dims, axis=1, signs=signs, draws=draws, group=group)

    along_rows, along_columns = (1,) * for_dgrad, (0,) * for_wgrad
    if recipe.dgrad == recipe.wgrad:
        operands = cast(recipe.dgrad, along_rows + along_columns)
    else:
        operands = cast(recipe.dgrad, along_rows) | cast(recipe.wgrad, along_columns)
    return operands.get(1), operands.get(0)
