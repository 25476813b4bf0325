import math

import numpy as np
import pytest
import torch

from mxtrain.diagnostics.norms import norm_figures, norm_totals, output_bound, squared_correlation
from mxtrain.diagnostics.totals import combined, numbers
from mxtrain.recipes.formats import norm_constant
from mxtrain.recipes.parse import get_recipe
from mxtrain.recipes.recipe import RMSEstimate
from mxtrain.reference.mxnorm import inverse_rms, scale_rows

MXFP8 = get_recipe("mxfp8")


def totals_of(x, estimate):
    return numbers({"norm": norm_totals(x, estimate, MXFP8)})["norm"]


def test_two_rows_by_hand():
    """Rows of two blocks. Ones: all maxima are 1. A single 2: maxima 2 and 0, sqrt(2) as p-mean, 2 / 8 as RMS."""
    estimate = RMSEstimate(2, "pre_round", 0.0, 32)
    x = torch.zeros(3, 64)  # the last row is zero, and left out
    x[0], x[1, 5] = 1.0, 2.0
    figures = norm_figures(totals_of(x, estimate))
    c = norm_constant(2, 32)
    ratios = [1 / c, math.sqrt(2) / c / 0.25]
    assert figures["rms_ratio_mean"] == pytest.approx(sum(ratios) / 2)
    assert figures["rms_ratio_std"] == pytest.approx(abs(ratios[0] - ratios[1]) / 2)
    assert (figures["rms_ratio_min"], figures["rms_ratio_max"]) == pytest.approx(tuple(ratios))
    assert figures["rms_r2"] == pytest.approx(1.0)  # two points lie on a line
    assert figures["outlier_rows"] == 0.0  # 2 is 8 times the RMS
    assert figures["output_max"] == pytest.approx(2 / (math.sqrt(2) / c))
    assert figures["output_max_over_bound"] == pytest.approx(1.0)  # a single element reaches the bound


@pytest.mark.parametrize("p, estimator", [(1, "pre_round"), (2, "post_round"), (2, "exact")])
def test_figures_of_two_halves_are_those_of_all_rows(p, estimator):
    """Against NumPy, and against the inverse RMS that training uses."""
    torch.manual_seed(0)
    x = torch.randn(64, 256) * torch.rand(64, 1).exp() + torch.randn(256)
    x[3, 7] = 300.0
    estimate = RMSEstimate(p, estimator, 1e-30, 32)
    figures = norm_figures(combined(totals_of(x[:40], estimate), totals_of(x[40:], estimate)))
    rho = inverse_rms(x, estimate, MXFP8)
    true, estimated = x.double().square().mean(1).sqrt().numpy(), (1 / rho.double()).numpy()
    ratios = estimated / true
    assert figures["rms_ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-5)
    assert figures["rms_ratio_std"] == pytest.approx(ratios.std(), rel=1e-4, abs=1e-6)
    assert figures["rms_ratio_max"] == pytest.approx(ratios.max(), rel=1e-5)
    assert figures["rms_r2"] == pytest.approx(np.corrcoef(true, estimated)[0, 1] ** 2, rel=1e-5)
    assert figures["output_max"] == pytest.approx(scale_rows(x, rho).abs().max().item(), rel=1e-5)
    assert figures["outlier_rows"] == 1 / 64


@pytest.mark.parametrize("p", (1, 2))
@pytest.mark.parametrize("estimator", ("pre_round", "post_round", "exact"))
@pytest.mark.parametrize("scale_rounding", ("rceil", "floor"))
def test_no_output_exceeds_the_bound(p, estimator, scale_rounding):
    recipe = get_recipe("mxfp8", scale_rounding=scale_rounding)
    estimate = RMSEstimate(p, estimator, 0.0, 32)
    x = torch.full((64, 128), 1e-3)
    x[:, 9] = torch.linspace(0.5, 2.0, 64)
    largest = scale_rows(x, inverse_rms(x, estimate, recipe)).abs().max().item()
    bound = output_bound(128, estimate, recipe)
    # Rounding of the maxima moves an estimate after it by a factor of less than 2.
    assert bound / (2.1 if estimator == "post_round" else 1.1) < largest <= bound * (1 + 1e-6)


def test_rows_whose_estimate_overflows_are_left_out():
    estimate = RMSEstimate(2, "post_round", 0.0, 32)
    x = torch.linspace(0.5, 2.0, 3 * 64).view(3, 64)
    with_large = torch.cat([x, torch.full((1, 64), 3.3e38)])  # its maxima are rounded up to infinity
    assert norm_figures(totals_of(with_large, estimate)) == norm_figures(totals_of(x, estimate))


def test_r2_needs_rows_that_differ():
    assert squared_correlation(3, 6.0, 6.0, 12.0, 12.0, 12.0) is None
    assert squared_correlation(4, 0.0, 0.0, 4.0, 4.0, 2.0) == 0.25
    assert "rms_r2" not in norm_figures(totals_of(torch.ones(4, 64), RMSEstimate(2, "pre_round", 0.0, 32)))
    assert norm_figures(totals_of(torch.zeros(4, 64), RMSEstimate(2, "pre_round", 0.0, 32))) == {}
