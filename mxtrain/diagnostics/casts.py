"""How much casts to a block format change values: noise, saturation, underflow, and the range of block scales.

On a GPU, many small operations take longer than the few large ones. So the casts of several layers are measured
together: casts of the same matrix share what does not depend on the cast, block scales come from one calculation, and
each kind of sum from one call. A cast that has several names, or that several layers share, is measured once.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from mxtrain.diagnostics.totals import Totals, count_where, maxima, norms, ratio
from mxtrain.formats.collectives import largest
from mxtrain.formats.hadamard import pad
from mxtrain.formats.recipe import Recipe
from mxtrain.launch.pytorch import abs_of_each, neg_of_each, sub_of_each


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix before its casts.

    Attributes:
        values: [R, C], fp32.
        group: the name of the process group that holds the matrix together; None for a whole matrix.
    """

    values: torch.Tensor
    group: str | None = None


@dataclass(eq=False)
class MeasuredCast:
    """A cast of a matrix [R, C].

    Attributes:
        image: [R, C], the values that the cast's codes and scales stand for.
        recipe: of the cast; has a format.
        dim: the dimension along which blocks lie, 0 or 1: the axis that the GEMM reduces over.
        tiles: square tiles share a scale.
        tensor_scale: known before the cast; None if it comes from the values, or the format has none.
        totals: of this cast; None until ``cast_totals`` has measured it.
    """

    matrix: Matrix
    image: torch.Tensor
    recipe: Recipe
    dim: int
    tiles: bool = False
    tensor_scale: float | None = None
    totals: Totals | None = None

    def blocks(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """The matrix's magnitudes in blocks: dimension ``dim`` becomes two, of which the second is the block."""
        return magnitudes.unflatten(self.dim, (-1, self.recipe.block_size))

    def block_maxima(self, blocks: torch.Tensor) -> torch.Tensor:
        """[R, C / size] or [R / size, C]; blocks of the same tile have the maximum of the tile."""
        amax = blocks.amax(self.dim + 1)
        if not self.tiles:
            return amax
        across = 1 - self.dim
        tiles = pad(amax, across).unflatten(across, (-1, self.recipe.block_size))
        of_tiles = tiles.amax(across + 1, keepdim=True).expand_as(tiles).flatten(across, across + 1)
        return of_tiles.narrow(across, 0, amax.shape[across])


def cast_totals(casts: dict[Hashable, MeasuredCast]) -> dict[Hashable, Totals]:
    """Measure casts; by name. A cast that has its totals is not measured again."""
    together = defaultdict(list)
    for cast in dict.fromkeys(casts.values()):
        if cast.totals is None:
            together[cast.recipe.format, cast.recipe.scale_rounding].append(cast)
    for new in together.values():
        _measure(new)
    return {name: cast.totals for name, cast in casts.items()}


def _measure(casts: Sequence[MeasuredCast]) -> None:
    matrices = list(dict.fromkeys(cast.matrix for cast in casts))
    values = [matrix.values for matrix in matrices]
    pairs = [(cast.matrix.values, cast.image) for cast in casts]
    # Of the matrices first, then of the casts.
    roots = norms([*values, *sub_of_each(*zip(*pairs))])
    nonzero = count_where(torch.logical_and, [*zip(values, values), *pairs])
    of_matrix = dict(zip(matrices, zip(roots, nonzero)))
    of_casts = zip(roots[len(matrices) :], nonzero[len(matrices) :])
    magnitudes = dict(zip(matrices, abs_of_each(values)))
    blocks = [cast.blocks(magnitudes[cast.matrix]) for cast in casts]
    tops, least, greatest = _block_ranges(casts, blocks)
    saturated = count_where(torch.gt, list(zip(blocks, tops)))
    for cast, (noise, kept), low, high, above in zip(casts, of_casts, least, greatest, saturated):
        signal, nonzero = of_matrix[cast.matrix]
        cast.totals = Totals(
            {"elements": float(cast.image.numel()), "nonzero": nonzero, "saturated": above, "kept": kept},
            {"scale": low},
            {"scale": high},
            {"signal": signal, "noise": noise},
        )


def cast_figures(totals: Totals) -> dict[str, float]:
    """Return the figures of a cast by name. Exponents are those of the block scales of blocks that are not zero."""
    sums, least, largest, norms = totals
    figures = {
        "saturated": ratio(sums["saturated"], sums["elements"]),
        "underflowed": ratio(sums["nonzero"] - sums["kept"], sums["nonzero"]),
    }
    if norms["signal"] > 0 and norms["noise"] > 0:
        figures["sqnr_db"] = 20 * math.log10(norms["signal"] / norms["noise"])
    if math.isfinite(least["scale"]):
        figures |= {"scale_min_exponent": exponent(least["scale"]), "scale_max_exponent": exponent(largest["scale"])}
    return figures


def exponent(scale: float) -> float:
    """Return log2 of a positive number, rounded down."""
    return float(math.frexp(scale)[1] - 1)


def _block_ranges(
    casts: Sequence[MeasuredCast], blocks: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Return for every cast what elements above saturate to, and the least and the largest block scale.

    The first broadcasts with ``MeasuredCast.blocks``. Scales are those of blocks that are not zero, fp32 [], and
    infinite if all are zero.
    """
    block_maxima = [cast.block_maxima(of_cast) for cast, of_cast in zip(casts, blocks)]
    sizes = [amax.numel() for amax in block_maxima]
    amax = torch.cat([amax.flatten() for amax in block_maxima])
    recipe, tensor_scales = casts[0].recipe, None
    if recipe.tensor_scaled:
        of_casts = _tensor_scales(casts, amax.split(sizes))
        tensor_scales = torch.cat([scale.expand(size) for scale, size in zip(of_casts, sizes)])
    scales, tops = recipe.ops.block_scales(amax, recipe, tensor_scales)
    used = (amax > 0).repeat(2)  # a block of zeros has the smallest scale there is
    extremes = maxima(torch.where(used, torch.cat((scales, -scales)), -math.inf).split(sizes + sizes))
    of_casts = zip(casts, block_maxima, tops.split(sizes))
    tops = [part.view(amax.shape).unsqueeze(cast.dim + 1) for cast, amax, part in of_casts]
    return tops, neg_of_each(extremes[len(casts) :]), extremes[: len(casts)]


def _tensor_scales(casts: Sequence[MeasuredCast], block_maxima: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensor scale of every cast, fp32 []."""
    own = maxima(block_maxima)
    from_values = (
        casts[0]
        .recipe.ops.tensor_scales(torch.stack([largest(amax, cast.matrix.group) for cast, amax in zip(casts, own)]))
        .unbind()
    )
    return [
        scale if cast.tensor_scale is None else torch.full_like(scale, cast.tensor_scale)
        for cast, scale in zip(casts, from_values)
    ]
