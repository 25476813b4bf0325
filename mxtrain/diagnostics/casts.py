"""How much a cast to a block format changes values: noise, saturation, underflow, and the range of its block scales.

Values and images are matrices [R, K] in blocks along K, the axis that the GEMM reduces over.
"""

import math
from dataclasses import replace

import torch

from mxtrain.diagnostics.totals import Totals, ratio
from mxtrain.recipes.recipe import Recipe
from mxtrain.reference import casts, nvfp4
from mxtrain.reference.mxnorm import block_amax


def block_scales(
    values: torch.Tensor, recipe: Recipe, tensor_scale: torch.Tensor | None = None, tiles: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block scales that the recipe's cast gives ``values`` [R, K], and the largest magnitude below each.

    Args:
        tensor_scale: NVFP4: fp32 [].
        tiles: NVFP4: tiles of 16 x 16 share a scale.

    Returns:
        scales: fp32 [R, K / B], as stored: without the tensor scale.
        tops: fp32 [R, K / B], what elements above saturate to.
    """
    amax = block_amax(values, recipe.block_size)
    fmt = recipe.format
    if recipe.is_nvfp4:
        if tiles:
            amax = _amax_of_tiles(amax, fmt.block_size)
        scales = nvfp4.block_scales(amax, tensor_scale).float()
        return scales, scales * tensor_scale * fmt.element_max
    # Each maximum is cast as a block of one element.
    scales = casts.cast(amax.unsqueeze(-1), replace(fmt, block_size=1), recipe.scale_rounding)[1].squeeze(-1).float()
    return scales, scales * fmt.element_max


def _amax_of_tiles(amax: torch.Tensor, tile: int) -> torch.Tensor:
    """[R, K / B] -> [R, K / B], equal in all rows of a tile. Zeros pad the last tile."""
    rows = amax.shape[0]
    padded = torch.nn.functional.pad(amax, (0, 0, 0, -rows % tile))
    return padded.reshape(-1, tile, amax.shape[1]).amax(1).repeat_interleave(tile, 0)[:rows]


def cast_totals(values: torch.Tensor, image: torch.Tensor, scales: torch.Tensor, tops: torch.Tensor) -> Totals:
    """Measure a cast.

    Args:
        values: [R, K], fp32, before the cast.
        image: [R, K], the values that the cast's codes and scales stand for.
        scales, tops: of ``block_scales``.
    """
    blocks = casts.split_blocks(values, values.shape[-1] // scales.shape[-1]).abs()
    used = blocks.amax(-1) > 0  # a block of zeros has the smallest scale there is
    exponents = torch.frexp(scales).exponent.double() - 1
    return Totals(
        {
            "elements": float(values.numel()),
            "nonzero": torch.count_nonzero(values).double(),
            "signal": energy(values),
            "noise": energy(values - image),
            "saturated": (blocks > tops.unsqueeze(-1)).sum().double(),
            "underflowed": ((values != 0) & (image == 0)).sum().double(),
        },
        {"exponent": torch.where(used, exponents, math.inf).amin()},
        {"exponent": torch.where(used, exponents, -math.inf).amax()},
    )


def cast_figures(totals: Totals) -> dict[str, float]:
    """Return the figures of a cast by name. Exponents are those of the block scales of blocks that are not zero."""
    sums, least, largest = totals
    figures = {
        "saturated": ratio(sums["saturated"], sums["elements"]),
        "underflowed": ratio(sums["underflowed"], sums["nonzero"]),
    }
    if sums["signal"] > 0 and sums["noise"] > 0:
        figures["sqnr_db"] = 10 * math.log10(sums["signal"] / sums["noise"])
    if math.isfinite(least["exponent"]):
        figures |= {"scale_min_exponent": least["exponent"], "scale_max_exponent": largest["exponent"]}
    return figures


def energy(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares, fp64 []. No square of an fp32 number overflows or underflows."""
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()
