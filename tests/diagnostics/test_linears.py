"""The figures of a layer against the layer itself: its forward and backward give what the figures are about."""

import math

import pytest
import torch

from mxtrain.diagnostics import linears
from mxtrain.diagnostics.linears import (
    Input,
    MeasuredCast,
    cast_figures,
    linear_figures,
    norm_to_noise,
    product_totals,
)
from mxtrain.diagnostics.totals import Totals, combined, numbers
from mxtrain.formats.matrices import CastSpec, tile_amax
from mxtrain.formats.mx import reference as casts
from mxtrain.formats.mxnorm import block_amax
from mxtrain.formats.nvfp4 import ops as nvfp4_ops
from mxtrain.formats.nvfp4 import reference as nvfp4
from mxtrain.formats.parse import get_recipe
from mxtrain.nn.mx_linear import MXLinear
from mxtrain.nn.mxnorm import MXNorm, MXNormLinear
from mxtrain.nn.split import SplitMatrices
from mxtrain.rng.rounding import set_rounding_step

RECIPES = (
    "mxfp8",
    "mxfp8_2d",
    "nvfp4",
    "nvfp4_dynamic",
    "nvfp4_row",
    "fprop=nvfp4, dgrad=mxfp8, wgrad=bf16",
    "fprop=nvfp4, dgrad=dequantized, wgrad=dequantized",
    "mxfp4",
    "fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8_e5m2",
)


@pytest.fixture(autouse=True)
def same_random_bits():
    set_rounding_step(0)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).double().norm() / expected.double().norm()).item()


def linear_totals(linear, given: Input, dy: torch.Tensor) -> dict[str, Totals]:
    bits = linear.signs(dy.device), linear.draws(dy.device)
    return numbers(linears.linear_totals(linear.gemms(dy.device), given, linear.weight.detach(), dy, *bits))


def measured(linear, given: Input, dy: torch.Tensor) -> dict[str, float]:
    set_rounding_step(0)  # the layer's first call draws the bits of its backward again
    return linear_figures(linear_totals(linear, given, dy))


@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_are_those_of_the_layers_own_results(recipe):
    torch.manual_seed(0)
    linear = MXLinear(64, 96, bias=False, recipe=recipe, mode="reference")
    x, dy = torch.randn(96, 64, requires_grad=True), torch.randn(96, 96)
    y = linear(x)
    y.backward(dy)
    w = linear.weight.detach()
    expected = {"fprop": relative(y, x @ w.t()), "dgrad": relative(x.grad, dy @ w)}
    expected["wgrad"] = relative(linear.weight.grad, dy.t() @ x)
    figures = measured(linear, Input(x.detach()), dy)
    for gemm, error in expected.items():
        if not getattr(linear.recipe, gemm).rounds:
            assert not any(name.startswith(gemm) for name in figures) and error < 1e-5
        else:
            assert figures[f"{gemm}_error"] == pytest.approx(error, rel=1e-3)
    if linear.recipe.wgrad.rounds:
        assert figures["grad_norm_to_noise"] == pytest.approx(1 / expected["wgrad"], rel=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_after_a_norm_are_those_of_the_layers_own_results(recipe):
    torch.manual_seed(0)
    norm = MXNorm(64, recipe=recipe, mode="reference")
    linear = MXNormLinear(64, 96, bias=False, recipe=recipe, mode="reference")
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * torch.randn(64))
    x, dy = torch.randn(96, 64), torch.randn(96, 96)
    normed = norm(x)
    h = normed.h.detach().requires_grad_()  # whose gradient is dL/dxhat
    y = linear(normed._replace(h=h))
    y.backward(dy)
    w, gain, xhat = linear.weight.detach(), norm.weight.detach(), x * normed.rho.unsqueeze(1)
    expected = {"fprop": relative(y, xhat @ (w * gain).t()), "dgrad": relative(h.grad, dy @ (w * gain))}
    expected["wgrad"] = relative(linear.weight.grad, (dy.t() @ xhat) * gain)
    figures = measured(linear, Input(x, normed.rho, gain, norm.estimate), dy)
    assert figures["fprop_error"] == pytest.approx(expected["fprop"], rel=1e-3)
    assert figures["dgrad_error"] == pytest.approx(expected["dgrad"], rel=1e-3)
    if linear.recipe.wgrad.rounds:  # the layer's gradient has the gain, the GEMM's result does not
        assert figures["wgrad_error"] == pytest.approx(expected["wgrad"], rel=0.1)


def test_ranges_of_block_scales_and_shares():
    linear = MXLinear(32, 32, bias=False, mode="reference")
    with torch.no_grad():
        linear.weight.fill_(448.0)
    x = torch.full((32, 32), 2.0 * 448)
    x[:, 0] = 2.0**-10  # rounds to zero beside 896 in a row, and stands alone in a column
    figures = measured(linear, Input(x), torch.full((32, 32), 448.0))
    assert figures["fprop_input_scale_min_exponent"] == figures["fprop_input_scale_max_exponent"] == 1
    assert figures["fprop_input_underflowed"] == 1 / 32 and figures["wgrad_input_underflowed"] == 0.0
    assert (figures["wgrad_input_scale_min_exponent"], figures["wgrad_input_scale_max_exponent"]) == (-18, 1)
    assert figures["dgrad_grad_scale_max_exponent"] == figures["dgrad_weight_scale_max_exponent"] == 0


def test_scales_of_output_gradients_are_those_of_their_own_format():
    """448 is E5M2's largest element, 57344, times 2^-7."""
    linear = MXLinear(32, 32, bias=False, recipe=RECIPES[-1], mode="reference")
    figures = measured(linear, Input(torch.full((32, 32), 448.0)), torch.full((32, 32), 448.0))
    assert figures["dgrad_grad_scale_max_exponent"] == figures["wgrad_grad_scale_max_exponent"] == -7
    assert figures["fprop_input_scale_max_exponent"] == figures["wgrad_input_scale_max_exponent"] == 0


def totals_of_product(a, b, b_cast):
    pairs = ((a, a), (b, b_cast))
    return numbers({"": product_totals(*(MeasuredCast(values, image, None, 1) for values, image in pairs))})[""]


def test_the_error_of_a_product_by_hand():
    """[3, 4] against [3, 5]: the error's norm is 1, the product's 5."""
    totals = totals_of_product(torch.eye(2), torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 5.0]]))
    assert linear_figures({"fprop": totals})["fprop_error"] == pytest.approx(1 / 5)
    assert linear_figures({"fprop": combined(totals, totals)})["fprop_error"] == pytest.approx(1 / 5)
    assert norm_to_noise(totals) == pytest.approx(5.0)
    exact = totals_of_product(*[torch.eye(2)] * 3)
    assert linear_figures({"fprop": exact})["fprop_error"] == 0.0 and norm_to_noise(exact) == math.inf


# Casts

FLOOR, RCEIL, NVFP4 = get_recipe("mxfp8", scale_rounding="floor"), get_recipe("mxfp8"), get_recipe("nvfp4")


def totals_of(values, recipe, image, dim=1, **options):
    return numbers({"": MeasuredCast(values, image, recipe, dim, **options).totals})[""]


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
    codes, expected = casts.cast(values, recipe.format, recipe.scale_rounding, tiles=True)
    image = casts.dequantize(codes, expected, recipe.format)
    for dim, x, of_x in ((1, values, image), (0, values.t(), image.t())):
        totals = totals_of(x, recipe, of_x, dim, tiles=True)
        found = totals.least["scale"], totals.largest["scale"]
        assert found == (expected.float().min(), expected.float().max())


@pytest.mark.parametrize("tiles", (False, True))
def test_nvfp4_scales_are_those_of_the_cast(tiles):
    torch.manual_seed(0)
    values = torch.randn(24, 64) * torch.logspace(-3, 1, 24).unsqueeze(1)
    scale = nvfp4.power_of_two_tensor_scale(values)
    codes, expected = nvfp4.cast(values, scale, tiles=tiles)
    image = nvfp4.dequantize(codes, expected, scale)
    maxima = values.abs().view(24, 4, 16).amax(2)
    scales, tops = NVFP4.ops.block_scales(tile_amax(maxima, 16, 0) if tiles else maxima, NVFP4, scale)
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


def test_zeros_a_nan_and_casts_without_noise():
    ones, zeros = torch.ones(1, 32), torch.zeros(1, 32)
    assert "sqnr_db" not in cast_figures(totals_of(ones, RCEIL, ones))
    assert cast_figures(totals_of(zeros, RCEIL, zeros)) == {"saturated": 0.0, "underflowed": 0.0}
    values = torch.zeros(1, 64)
    values[0, 0], values[0, 40] = math.nan, 448.0
    figures = cast_figures(totals_of(values, RCEIL, casts.image(values, RCEIL.format, "rceil", 1, torch.float32)))
    assert figures == {"saturated": 0, "underflowed": 0, "scale_min_exponent": 0, "scale_max_exponent": 0}


def test_a_tensor_scale_is_that_of_the_matrix_in_all_processes(monkeypatch):
    monkeypatch.setattr(linears, "largest", lambda amax, group: amax * {None: 1, "others": 1024}[group])
    recipe, values = get_recipe("nvfp4_dynamic").fprop, torch.randn(16, 32)
    exponents = [
        cast_figures(MeasuredCast(values, values, recipe, 1, group=group).totals)["scale_max_exponent"]
        for group in (None, "others")
    ]
    assert exponents[0] - exponents[1] == 10


@pytest.mark.parametrize(("group", "is_normed"), [(None, False), ("others", False), (None, True)])
def test_scales_of_rows_are_those_of_the_cast(group, is_normed, monkeypatch):
    """Other processes have other parts of the same rows."""
    for module in (linears, nvfp4_ops):
        monkeypatch.setattr(module, "largest", lambda found, group: found * {None: 1, "others": 1024}[group])
    linear, norm = MXLinear(64, 96, recipe="nvfp4_row", mode="reference"), MXNorm(64, recipe="nvfp4_row")
    linear.split = SplitMatrices(x=group)
    x = torch.randn(32, 64) * torch.logspace(-6, 6, 32).unsqueeze(1)
    rho, estimate = (norm(x).rho, norm.estimate) if is_normed else (None, None)
    spec = CastSpec(row_factor=rho, group=group, as_codes=True)
    scales = linear.recipe.ops.cast([x], linear.recipe, "reference", (1,), spec)[1].scales.float()
    totals = linear_totals(linear, Input(x, rho, None, estimate, group), torch.randn(32, 96))["fprop_input"]
    assert (totals.least["scale"], totals.largest["scale"]) == (scales.min(), scales.max())
