"""The figures of a layer against the layer itself: its forward and backward give what the figures are about."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from mxtrain.diagnostics import casts as measured_casts
from mxtrain.diagnostics.casts import Matrix, MeasuredCast
from mxtrain.diagnostics.linears import (
    Gradient,
    Input,
    linear_figures,
    norm_to_noise,
    product_totals,
    products_and_casts,
)
from mxtrain.diagnostics.totals import Totals, combined, numbers
from mxtrain.formats.mxfp8.ops import MXFP8Ops
from mxtrain.formats.nvfp4.ops import NVFP4Ops
from mxtrain.nn.mx_linear import MXLinear
from mxtrain.nn.mxnorm import MXNorm, MXNormLinear
from mxtrain.nn.three_gemms import ThreeGEMMs
from mxtrain.rng.rounding import set_rounding_step

RECIPES = ("mxfp8", "nvfp4", "nvfp4_dynamic", "fprop=nvfp4, dgrad=mxfp8, wgrad=bf16")


@pytest.fixture(autouse=True)
def same_random_bits():
    set_rounding_step(0)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).double().norm() / expected.double().norm()).item()


def linear_totals(linear, given: Input, gradient: Gradient) -> dict[str, Totals]:
    found, casts = products_and_casts(linear.gemms(gradient.dy.device), given, linear.weight.detach(), gradient)
    return numbers(found | measured_casts.cast_totals(casts))


def measured(linear, given: Input, dy: torch.Tensor) -> dict[str, float]:
    set_rounding_step(0)  # the layer's first call draws the bits of its backward again
    gradient = Gradient(dy, linear.signs(dy.device), linear.draws(dy.device))
    return linear_figures(linear_totals(linear, given, gradient))


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
    formats = {gemm: getattr(linear.recipe, gemm).format for gemm in expected}
    for gemm, error in expected.items():
        if formats[gemm] is None:
            assert not any(name.startswith(gemm) for name in figures) and error < 1e-5
        else:
            assert figures[f"{gemm}_error"] == pytest.approx(error, rel=1e-3)
    if formats["wgrad"]:
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
    if linear.recipe.wgrad.format:  # the layer's gradient has the gain, the GEMM's result does not
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


def counted(calls: list, function, *args):
    calls.append(args[0])
    return function(*args)


@pytest.mark.parametrize("gain", (None, torch.linspace(0.5, 2, 64)))
def test_casts_are_measured_alike_after_the_memory_of_the_weight_is_used_again(gain):
    """FSDP2 does so after the backward of a layer."""
    torch.manual_seed(0)
    linear, dy = MXLinear(64, 96, bias=False, mode="reference"), torch.randn(32, 96)
    given = Input(torch.randn(32, 64), gain=gain)
    expected = linear_totals(linear, given, Gradient(dy))
    found, casts = products_and_casts(linear.gemms(dy.device), given, linear.weight.detach(), Gradient(dy))
    with torch.no_grad():
        linear.weight.zero_()
    assert numbers(found | measured_casts.cast_totals(casts)) == expected


SHARED = ("mxfp8", "nvfp4", "fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8", "fprop=mxfp8, dgrad=mxfp8, wgrad=nvfp4")


@pytest.mark.parametrize("recipe", SHARED)
def test_linears_that_share_an_input_have_the_figures_of_each_alone(recipe, monkeypatch):
    """The second linear has the first one's recipe and signs, the third other signs, the fourth another recipe."""
    torch.manual_seed(0)
    x, dy = torch.randn(64, 64) * torch.logspace(-1, 1, 64), torch.randn(64, 96)
    norm = MXNorm(64, recipe=recipe, mode="reference")
    rho, gain = norm(x).rho, norm.weight.detach()
    linears = [MXNormLinear(64, 96, bias=False, recipe=r, mode="reference") for r in (*[recipe] * 3, "mxfp8")]
    linears[2].set_seed(0, "another")
    gradients = [Gradient(dy, linear.signs(dy.device), linear.draws(dy.device)) for linear in linears]
    gradients[1] = replace(gradients[1], signs=gradients[0].signs)

    alone = [linear_totals(linear, Input(x, rho, gain, norm.estimate), g) for linear, g in zip(linears, gradients)]
    casts = []
    for owner, name in ((MXFP8Ops, "normalize"), (NVFP4Ops, "normalize"), (ThreeGEMMs, "quantize_along_tokens")):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, function=function: counted(casts, function, *args))
    given = Input(x, rho, gain, norm.estimate)
    made = []
    for linear, gradient, expected in zip(linears, gradients, alone):
        assert linear_totals(linear, given, gradient) == expected
        made.append(len(casts))
    first, last = linears[0].recipe, linears[3].recipe
    of_third, of_fourth = first.wgrad.hadamard, (first.fprop != last.fprop) + (first.wgrad != last.wgrad)
    assert made == [2, 2, 2 + of_third, 2 + of_third + of_fourth]


@pytest.mark.parametrize("recipe, count", [("nvfp4", 5), ("fprop=nvfp4, dgrad=nvfp4_dynamic, wgrad=nvfp4", 6)])
def test_weights_in_tiles_are_measured_once_for_both_directions(recipe, count, monkeypatch):
    torch.manual_seed(0)
    linear, calls = MXLinear(64, 96, bias=False, recipe=recipe, mode="reference"), []
    monkeypatch.setattr(measured_casts, "_measure", partial(counted, calls, measured_casts._measure))
    figures = measured(linear, Input(torch.randn(32, 64)), torch.randn(32, 96))
    assert sum(len(casts) for casts in calls) == count
    names = [name for name in figures if name.startswith("fprop_weight")]
    assert len(names) == 5 and all(figures[name] == figures[name.replace("fprop", "dgrad")] for name in names)


def totals_of_product(a, b, b_cast):
    casts = [MeasuredCast(Matrix(values), image, None, 1) for values, image in ((a, a), (b, b_cast))]
    return numbers(product_totals({"fprop": tuple(casts)}))["fprop"]


def test_the_error_of_a_product_by_hand():
    """[3, 4] against [3, 5]: the error's norm is 1, the product's 5."""
    totals = totals_of_product(torch.eye(2), torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 5.0]]))
    assert linear_figures({"fprop": totals})["fprop_error"] == pytest.approx(1 / 5)
    assert linear_figures({"fprop": combined(totals, totals)})["fprop_error"] == pytest.approx(1 / 5)
    assert norm_to_noise(totals) == pytest.approx(5.0)
    exact = totals_of_product(*[torch.eye(2)] * 3)
    assert linear_figures({"fprop": exact})["fprop_error"] == 0.0 and norm_to_noise(exact) == math.inf
