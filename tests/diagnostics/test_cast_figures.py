import math

import pytest
import torch

from mxtrain.diagnostics.casts import block_scales, cast_figures, cast_totals, energy
from mxtrain.diagnostics.totals import combined, numbers
from mxtrain.recipes.parse import get_recipe
from mxtrain.reference import casts, nvfp4

FLOOR, RCEIL, NVFP4 = get_recipe("mxfp8", "floor"), get_recipe("mxfp8"), get_recipe("nvfp4")


def totals_of(values, recipe, image, *tensor_scale):
    return numbers({"cast": cast_totals(values, image, *block_scales(values, recipe, *tensor_scale))})["cast"]


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
    scales, tops = block_scales(values, recipe)
    assert torch.equal(scales, casts.cast(values, recipe.format, recipe.scale_rounding)[1].float())
    assert torch.equal(tops, scales * 448)
    assert (values.view(16, 4, 32).abs() <= tops.unsqueeze(-1)).all() == (recipe is RCEIL)


@pytest.mark.parametrize("tiles", (False, True))
def test_nvfp4_scales_are_those_of_the_cast(tiles):
    torch.manual_seed(0)
    values = torch.randn(24, 64) * torch.logspace(-3, 1, 24).unsqueeze(1)
    scale = nvfp4.power_of_two_tensor_scale(values)
    codes, expected = (nvfp4.cast_tiles if tiles else nvfp4.cast)(values, scale)
    scales, tops = block_scales(values, NVFP4, scale, tiles)
    assert torch.equal(scales, expected.float())
    figures = cast_figures(totals_of(values, NVFP4, nvfp4.dequantize(codes, expected, scale), scale, tiles))
    above = values.view(24, 4, 16).abs() > 6 * (scales * scale).unsqueeze(-1)
    assert figures["saturated"] == above.sum().item() / 1536 > 0
    assert 10 < figures["sqnr_db"] < 25 and figures["scale_max_exponent"] <= 8


def test_totals_of_two_parts_are_those_of_the_whole():
    torch.manual_seed(0)
    values = torch.randn(8, 64) * torch.logspace(-6, 0, 8).unsqueeze(1)
    image = casts.image(values, RCEIL.format, "rceil", 1, torch.float32)
    parts = combined(totals_of(values[:3], RCEIL, image[:3]), totals_of(values[3:], RCEIL, image[3:]))
    assert cast_figures(parts) == pytest.approx(cast_figures(totals_of(values, RCEIL, image)))


def test_squares_of_small_gradients_count():
    assert energy(torch.full((4,), 1e-30)).item() == pytest.approx(4e-60)


def test_a_cast_without_noise_or_values_has_fewer_figures():
    ones, zeros = torch.ones(1, 32), torch.zeros(1, 32)
    assert "sqnr_db" not in cast_figures(totals_of(ones, RCEIL, ones))
    assert cast_figures(totals_of(zeros, RCEIL, zeros)) == {"saturated": 0.0, "underflowed": 0.0}
