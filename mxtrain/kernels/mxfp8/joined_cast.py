"""MXFP8 casts of several matrices into one operand: each matrix is read and written once, and nothing is copied.

Weights that share their input lie one below the other, and their output gradients side by side. The operand has the
bits of a cast of the joined matrix, because every part is whole blocks: their scales need no other part.

Bytes per element: as ``mxfp8.cast``.
"""

from collections.abc import Sequence

import torch

from mxtrain.errors import require_one_of
from mxtrain.kernels.cast_results import FORMS, Cast, by_dim, flat
from mxtrain.kernels.checks import check_mxfp8, check_parts, check_whole_blocks, contiguous_factors
from mxtrain.kernels.launch import Launch, register_op
from mxtrain.kernels.mxfp8.arithmetic import BLOCK
from mxtrain.kernels.mxfp8.cast import DIMS, launch_cast, results_for
from mxtrain.recipes.recipe import Recipe
from mxtrain.untraced import untraced


def _implementation(
    x: torch.Tensor,
    others: list[torch.Tensor],
    axis: int,
    column_factor: torch.Tensor | None,
    along_rows: bool,
    along_columns: bool,
    scale_rounding: str,
    form: str,
) -> tuple[list[torch.Tensor], tuple[Launch, ...]]:
    parts, whole = [x, *others], list(x.shape)
    whole[axis] = sum(part.shape[axis] for part in parts)
    results = results_for(*whole, along_rows, along_columns, form, x.device)
    launches, before = [], [0, 0]
    for part in parts:
        place = (*before, *whole)
        launches.append(launch_cast(part, None, column_factor, False, *results, scale_rounding, form, place))
        before[axis] += part.shape[axis]
    return flat(*(t for result in results for t in result)), tuple(filter(None, launches))


_joined_cast = register_op(
    "joined_cast(Tensor x, Tensor[] others, int axis, Tensor? column_factor, bool along_rows, bool along_columns,"
    " str scale_rounding, str form) -> Tensor[]",
    _implementation,
)


def joined_cast(
    parts: Sequence[torch.Tensor],
    axis: int,
    recipe: Recipe,
    dims: tuple[int, ...],
    form: str = "blocked",
    column_factor: torch.Tensor | None = None,
) -> dict[int, Cast]:
    """Return ``mxfp8.cast.cast`` of ``torch.cat(parts, axis)``, which is never stored. One launch for each part.

    Args:
        parts: bf16 or fp32 matrices of one dtype; whole blocks of 32 along ``axis``, the last one too.
        axis: 0 for parts one below the other, 1 for parts side by side.
        recipe, dims, form: as for ``cast``.
        column_factor: bf16 or fp32, one for each column; for axis 0 only.

    Raises:
        ValueError: for another shape, dtype or device.
    """
    check_mxfp8(recipe)
    results = _checked_cast(list(parts), axis, column_factor, tuple(dims), recipe.scale_rounding, form)
    return by_dim(results, dims, form)


@untraced
def _checked_cast(parts, axis, column_factor, dims, scale_rounding, form):
    require_one_of("form", form, FORMS)
    require_one_of("dims", dims, DIMS)
    require_one_of("axis", axis, (0, 1) if column_factor is None else (0,))
    check_parts(parts, axis, BLOCK)
    if 1 in dims:  # with axis 0 all parts have this row length, with axis 1 all are checked
        check_whole_blocks("parts[0]", parts[0], BLOCK)
    _, column_factor = contiguous_factors(parts[0], None, column_factor)
    first, *others = (part.contiguous() for part in parts)
    return _joined_cast(first, others, axis, column_factor, 1 in dims, 0 in dims, scale_rounding, form)
