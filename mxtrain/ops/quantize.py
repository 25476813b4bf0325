"""The operands of a linear layer's three GEMMs, one function per role. Each role is cast as its recipe's format says.

X is [T, D] (tokens, input features), W is [N, D], dY is [T, N]. Every operand is quantized along the axis that its
GEMM reduces over:

    fprop   Y  = X  W^T     X along D,           W along D
    dgrad   dX = dY W       dY along N,          W along N
    wgrad   dW = dY^T X     dY along tokens,     X along tokens

``mxtrain.ops.mxfp8`` (which also serves recipes without a cast) and ``mxtrain.ops.nvfp4`` hold the casts.
``module_of`` is the only place that chooses between them.

Under tensor parallelism a process holds a part of some matrices. ``group`` is the name of the process group that holds
such a matrix together, None for a whole one. NVFP4 takes the scale of a matrix from its largest magnitude, wherever
that is; block scales and MXFP8 need no communication.
"""

from collections.abc import Callable, Sequence

import torch

from mxtrain.ops import mxfp8, nvfp4
from mxtrain.ops.codes import Codes
from mxtrain.ops.gemm import Operand
from mxtrain.recipes.recipe import LinearRecipe, Recipe


def module_of(recipe: Recipe):
    """Return the module that casts to the recipe's format."""
    return nvfp4 if recipe.is_nvfp4 else mxfp8


def activation(x: torch.Tensor, recipe: Recipe, mode: str, group: str | None = None) -> Operand:
    """X as fprop's operand [T, D], where no MXNorm has made it."""
    return module_of(recipe).activation(x, recipe, mode, group=group)


def activation_along_tokens(
    x: torch.Tensor,
    recipe: Recipe,
    mode: str,
    rho: torch.Tensor | None,
    signs: torch.Tensor | None,
    group: str | None = None,
) -> Operand:
    """X as wgrad's operand [D, T]; with ``rho`` [T], X diag(rho) row by row.

    Args:
        signs: packed signs of the Hadamard transform, int64 []; None if the recipe has no transform.
    """
    return module_of(recipe).activation_along_tokens(x, recipe, mode, rho, signs, group)


def codes_along_tokens(
    x: torch.Tensor,
    recipe: Recipe,
    mode: str,
    rho: torch.Tensor,
    signs: torch.Tensor | None,
    group: str | None = None,
) -> Codes:
    """X diag(rho), row by row, as codes [D, T] of wgrad's operand; ``group`` holds the other tokens.

    Args:
        x: [T, D], T a multiple of the block size.
        signs: as for ``activation_along_tokens``.
    """
    return module_of(recipe).codes_along_tokens(x, recipe, mode, rho, signs, group)


def from_codes(codes: Codes, recipe: Recipe, mode: str, dim: int) -> Operand:
    """The operand that the codes stand for, with the bits and the memory layout of the functions above.

    Args:
        dim: 1 for codes of X [T, D] along D, 0 for codes [D, T] along tokens.
    """
    return module_of(recipe).from_codes(codes, recipe, mode, dim)


def weight(
    w: torch.Tensor, recipe: Recipe, mode: str, dim: int, gain: torch.Tensor | None, group: str | None = None
) -> Operand:
    """W as the operand of fprop (dim 1: [N, D]) or dgrad (dim 0: [D, N]); with ``gain`` [D], W diag(gain)."""
    return module_of(recipe).weight(w, recipe, mode, dim, gain, group)


def weight_for_both(
    w: torch.Tensor, recipe: LinearRecipe, mode: str, gain: torch.Tensor | None, group: str | None = None
) -> tuple[Operand, Operand]:
    """W as the operands of fprop [N, D] and dgrad [D, N], from one read of W if both have the same recipe."""
    if recipe.fprop == recipe.dgrad:
        return module_of(recipe.fprop).weight_for_both(w, recipe.fprop, mode, gain, group)
    return weight(w, recipe.fprop, mode, 1, gain, group), weight(w, recipe.dgrad, mode, 0, gain, group)


def gradient(
    dy: torch.Tensor,
    recipe: LinearRecipe,
    mode: str,
    for_dgrad: bool,
    for_wgrad: bool,
    signs: torch.Tensor | None,
    draws: torch.Tensor | None,
    group: str | None = None,
) -> tuple[Operand | None, Operand | None]:
    """dY as dgrad's operand [T, N] and wgrad's operand [N, T]; None for an operand that is not wanted.

    Two operands with the same recipe come from one read of dY.

    Args:
        signs: as for ``activation_along_tokens``.
        draws: what stochastic rounding derives its random bits from (``mxtrain.rng.rounding_position.Draws``);
            None if the recipe rounds to nearest.
    """

    def cast(gemm: Recipe, dims: tuple[int, ...]) -> dict[int, Operand]:
        return module_of(gemm).gradient(dy, gemm, mode, dims, signs, draws, group)

    return _for_dgrad_and_wgrad(cast, recipe, for_dgrad, for_wgrad)


def joins(recipe: LinearRecipe, mode: str) -> bool:
    """Return whether ``weights`` and ``gradients`` take matrices with this recipe in this mode.

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

    Every part has the bits that ``weight`` gives it.
    """
    return module_of(recipe).weights(ws, recipe, mode, dim, gain, group)


def weights_for_both(
    ws: Sequence[torch.Tensor], recipe: LinearRecipe, mode: str, gain: torch.Tensor | None, group: str | None = None
) -> tuple[Operand, Operand]:
    """Weights as the operands of fprop and dgrad that ``weights`` makes, from one read if both have the same recipe."""
    if recipe.fprop == recipe.dgrad:
        return module_of(recipe.fprop).weights_for_both(ws, recipe.fprop, mode, gain, group)
    return weights(ws, recipe.fprop, mode, 1, gain, group), weights(ws, recipe.dgrad, mode, 0, gain, group)


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
    """Gradients [T, N_i] as one operand of dgrad [T, sum N_i] and one of wgrad [sum N_i, T].

    Every part has the bits that ``gradient`` gives it with its own draws.
    """

    def cast(gemm: Recipe, dims: tuple[int, ...]) -> dict[int, Operand]:
        return module_of(gemm).gradients(dys, gemm, mode, dims, signs, draws, group)

    return _for_dgrad_and_wgrad(cast, recipe, for_dgrad, for_wgrad)


def _for_dgrad_and_wgrad(
    cast: Callable[[Recipe, tuple[int, ...]], dict[int, Operand]],
    recipe: LinearRecipe,
    for_dgrad: bool,
    for_wgrad: bool,
) -> tuple[Operand | None, Operand | None]:
    """The wanted operands: both from one cast along both dimensions if dgrad and wgrad have the same recipe."""
    rows, columns = (1,) * for_dgrad, (0,) * for_wgrad
    if recipe.dgrad == recipe.wgrad:
        operands = cast(recipe.dgrad, rows + columns) if rows or columns else {}
    else:
        operands = cast(recipe.dgrad, rows) if rows else {}
        operands |= cast(recipe.wgrad, columns) if columns else {}
    return operands.get(1), operands.get(0)
