import math

import pytest
import torch

from mxtrain.diagnostics.casts import Matrix, MeasuredCast, cast_figures, cast_totals
from mxtrain.diagnostics.totals import combined, numbers
from mxtrain.formats import mx as casts
from mxtrain.formats.mxnorm import block_amax
from mxtrain.formats.nvfp4 import reference as nvfp4
from mxtrain.formats.parse import get_recipe

FLOOR, RCEIL, NVFP4 = get_recipe("mxfp8", scale_rounding="floor"), get_recipe("mxfp8"), get_recipe("nvfp4")


def totals_of(values, recipe, image, dim=1, **options):
    return numbers(cast_totals({"cast": MeasuredCast(Matrix(values), image, recipe, dim, **options)}))["cast"]


def test_a_block_by_hand():
    """FLOOR takes 2^0 as the scale of a block with maximum 511. E4M3 ends at 448 and begins at 2^-9."""
    values = torch.zeros(2, 32)
    values[0, :4] = torch.tensor([511.0, 448.0, -1.0, 2.0**-12])
    totals = totals_of(values, FLOOR, casts.image(values, FLOOR.format, "floor", 1, torch.float32))
    figures = cast_figures(totals)
    assert figures["saturated"] == 1 / 64
    assert figures["underflowed"] == 1 / 4
    assert (figures["scale_min_exponent"], figures["scale_max_exponent"]) == (0, 0)  # the second block is zero
    signal, noise = 511.0**2 + 448.0**2 + 1 + 2.0**-24, 63.0**2 + 2.0**-24
    assert figures["sqnr_db"] == pytest.approx(10 * math.log10(signal / noise))


@pytest.mark.parametrize("recipe", (RCEIL, FLOOR))
def test_mxfp8_scales_are_those_of_the_cast(recipe):
    torch.manual_seed(0)
    values = torch.randn(16, 128) * torch.logspace(-20, 20, 16).unsqueeze(1)
    scales, tops = recipe.ops.block_scales(block_amax(values, 32), recipe)
    assert torch.equal(scales, casts.cast(values, recipe.format, recipe.scale_rounding)[1].float())
    assert torch.equal(tops, scales * 448)
    assert (values.view(16, 4, 32).abs() <= tops.unsqueeze(-1)).all() == (recipe is RCEIL)


@pytest.mark.parametrize("tiles", (False, True))
def test_nvfp4_scales_are_those_of_the_cast(tiles):
    torch.manual_seed(0)
    values = torch.randn(24, 64) * torch.logspace(-3, 1, 24).unsqueeze(1)
    scale = nvfp4.power_of_two_tensor_scale(values)
    codes, expected = (nvfp4.cast_tiles if tiles else nvfp4.cast)(values, scale)
    image = nvfp4.dequantize(codes, expected, scale)
    cast = MeasuredCast(Matrix(values), image, NVFP4, 1, tiles)
    maxima = cast.block_maxima(cast.blocks(values.abs()))
    scales, tops = NVFP4.ops.block_scales(maxima, NVFP4, scale)
    assert torch.equal(scales, expected.float()) and torch.equal(tops, 6 * (scales * scale))
    totals = totals_of(values, NVFP4, image, tiles=tiles)
    assert totals == totals_of(values, NVFP4, image, tiles=tiles, tensor_scale=scale.item())
    assert totals == totals_of(values.t(), NVFP4, image.t(), 0, tiles=tiles)
    figures = cast_figures(totals)
    above = values.view(24, 4, 16).abs() > 6 * (scales * scale).unsqueeze(-1)
    assert figures["saturated"] == above.sum().item() / 1536 > 0
    assert 10 < figures["sqnr_db"] < 25 and figures["scale_max_exponent"] <= 8


def test_totals_of_two_parts_are_those_of_the_whole():
    torch.manual_seed(0)
    values = torch.randn(8, 64) * torch.logspace(-6, 0, 8).unsqueeze(1)
    image = casts.image(values, RCEIL.format, "rceil", 1, torch.float32)
    parts = combined(totals_of(values[:3], RCEIL, image[:3]), totals_of(values[3:], RCEIL, image[3:]))
    assert cast_figures(parts) == pytest.approx(cast_figures(totals_of(values, RCEIL, image)))


@pytest.mark.parametrize("recipes", [(RCEIL, RCEIL), (NVFP4, NVFP4), (RCEIL, NVFP4), (RCEIL, FLOOR)])
def test_casts_measured_together_have_the_totals_of_each(recipes):
    torch.manual_seed(0)
    a = Matrix(torch.randn(32, 64) * torch.logspace(-1, 1, 64))
    b = Matrix(100 * torch.randn(32, 96) * torch.logspace(-1, 1, 96))
    together = {
        f"{name} {dim}": MeasuredCast(matrix, matrix.values.bfloat16().where(matrix.values.abs() > 0.1, 0), recipe, dim)
        for name, matrix, recipe in (("a", a, recipes[0]), ("b", b, recipes[1]))
        for dim in (1, 0)
    }
    found = numbers(cast_totals(together))
    for name, cast in together.items():
        assert found[name] == totals_of(cast.matrix.values, cast.recipe, cast.image, cast.dim)
    assert len({totals.least["scale"] for totals in found.values()}) > 1


def test_zeros_a_nan_and_casts_without_noise():
    ones, zeros = torch.ones(1, 32), torch.zeros(1, 32)
    assert "sqnr_db" not in cast_figures(totals_of(ones, RCEIL, ones))
    assert cast_figures(totals_of(zeros, RCEIL, zeros)) == {"saturated": 0.0, "underflowed": 0.0}
    values = torch.zeros(1, 64)
    values[0, 0], values[0, 40] = math.nan, 448.0
    figures = cast_figures(totals_of(values, RCEIL, casts.image(values, RCEIL.format, "rceil", 1, torch.float32)))
    assert figures == {"saturated": 0, "underflowed": 0, "scale_min_exponent": 0, "scale_max_exponent": 0}
