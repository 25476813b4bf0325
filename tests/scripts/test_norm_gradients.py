"""The ablations of the norm's gradient: what they change, what they leave, and what they refuse."""

from pathlib import Path

import pytest
import torch

from mxtrain import ConfigError
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.mxnorm import inverse_rms, norm_backward
from mxtrain.formats.parse import get_recipe
from mxtrain.nn import gathered_norm, mxnorm
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.v02.engine import build_on_meta

EVIDENCE = Path(__file__).parents[2] / "scripts" / "evidence"
RECIPE = get_recipe("mxfp8").fprop


@pytest.fixture(scope="module")
def norm_gradients(import_evidence):
    return import_evidence("norm_gradients")


def rows(estimator):
    """Heavy-tailed rows, a row of zeros and gradients, in fp64, and rho without eps."""
    torch.manual_seed(0)
    x, g = torch.randn(6, 96, dtype=torch.float64) ** 3, torch.randn(6, 96, dtype=torch.float64)
    rho = inverse_rms(x, RMSEstimate.for_recipe(RECIPE, 2, estimator, 0.0), RECIPE)
    x[0] = 0
    return g, x, rho


def along(dx, x):
    return (dx * x).mean(-1)


def test_radial_gradient_has_the_part_along_x_that_the_estimate_leaves(norm_gradients):
    g, x, rho = rows("exact")
    dx = norm_gradients.gradient_with(norm_gradients.radial)(g, x, rho, "reference", False)
    mean_square = along(x, x) * inverse_rms(x, RMSEstimate.for_recipe(RECIPE, 2, "pre_round", 0.0), RECIPE) ** 2
    left = (along(g, x) * rho * (1 - mean_square))[1:]
    assert left.abs().min() > 1e-3
    torch.testing.assert_close(along(dx, x)[1:], left)
    across = dx - x * (along(dx, x) / along(x, x)).nan_to_num(0)[:, None]
    torch.testing.assert_close(across[1:], norm_backward(g, x, rho)[1:])
    assert torch.equal(dx[0], g[0] * rho[0])


@pytest.mark.parametrize("name", ["orthogonal_gradient", "radial_gradient"])
def test_the_configs_change_the_gradient_of_every_norm(norm_gradients, name, monkeypatch):
    for module in (mxnorm, gathered_norm):
        monkeypatch.setattr(module, "norm_backward", module.norm_backward)
    job_config = parse_job_config([f"--job.config_file={EVIDENCE / name}.toml", "--model.flavor=debugmodel"])
    first, second = job_config.model.converters
    assert (first, second) == ("mxnorm", name)
    converter = getattr(norm_gradients, name.title().replace("_", ""))(job_config, None)
    model = build_on_meta(job_config)
    with pytest.raises(ConfigError, match="comes after 'mxnorm'"):
        converter.convert(model)
    norm = mxnorm.MXNorm(64, mode="reference", estimator=job_config.mxnorm.estimator)
    g, x = torch.randn(5, 64), torch.randn(5, 64, requires_grad=True)
    (before,) = torch.autograd.grad(norm(x).h, x, g)
    converter.convert(norm)
    (after,) = torch.autograd.grad(norm(x).h, x, g)
    assert not torch.equal(before, after)
    assert (along(after, x).abs().max() < 1e-6) == (name == "orthogonal_gradient")
