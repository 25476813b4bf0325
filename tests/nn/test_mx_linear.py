import pytest
import torch
import torch.nn as nn

from mxtrain import MXLinear, MXNorm, MXNormLinear
from mxtrain.formats.mx.reference import image
from mxtrain.formats.mxfp8 import MXFP8
from mxtrain.formats.parse import get_recipe
from tests.support.layer_checks import assert_near, draw, fill, mx_linear, results_of

D, N, T = 96, 64, 40

pytestmark = pytest.mark.usefixtures("device")


def layer(recipe="mxfp8", **kwargs):
    return mx_linear(D, N, recipe, **kwargs)


def test_unquantized_is_nn_linear():
    linear = layer("unquantized", dtype=torch.float64, bias=True)
    x, dy = (draw(T, n, seed=seed, dtype=torch.float64) for seed, n in enumerate((D, N)))
    plain = nn.Linear(D, N, dtype=torch.float64)
    plain.load_state_dict(linear.state_dict())
    assert_near(results_of(linear, x, dy), results_of(plain, x, dy), 1e-12)


@pytest.mark.parametrize(("rounding", "tiles"), [("rceil", False), ("rceil", True), ("floor", False)])
@pytest.mark.parametrize(
    ("mode", "dtype", "tolerance"), [("reference", torch.float32, 1e-6), ("emulated", torch.bfloat16, 4e-3)]
)
def test_three_gemms_of_casts_along_their_own_reduction_axis(mode, dtype, tolerance, rounding, tiles):
    """Blocks have very different scales, so that a cast along a wrong dimension would show."""
    recipe = get_recipe("mxfp8", scale_rounding=rounding, weight_tiles=tiles)
    linear = layer(recipe, mode=mode, dtype=dtype)
    linear.weight.data.pow_(9)
    x, dy = (draw(T, n, seed=seed, dtype=dtype) ** 9 for seed, n in enumerate((D, N)))
    cast = lambda t, dim, tiles=False: image(t.detach(), MXFP8, rounding, dim, torch.float32, tiles)  # noqa: E731
    w = [cast(linear.weight, dim, tiles) for dim in (0, 1)]
    assert torch.equal(*w) == tiles
    expected = [cast(x, 1) @ w[1].t(), cast(dy, 1) @ w[0], cast(dy, 0).t() @ cast(x, 0)]
    assert_near(results_of(linear, x, dy), expected, tolerance)


def test_leading_dimensions_and_bf16_autocast():
    linear, x = layer(), draw(2, 5, D, seed=0)
    assert linear(x).shape == (2, 5, N)
    assert torch.equal(linear(x).flatten(0, 1), linear(x.flatten(0, 1)))
    assert torch.equal(linear(x[0, 0]), linear(x[0])[0])
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, linear(x.bfloat16())), "autocast rounds the input, not the master weight"


@pytest.mark.parametrize("with_norm", [False, True])
def test_autocast_leaves_float64_alone(with_norm):
    settings = dict(recipe="unquantized", mode="reference")
    module, x = MXLinear(D, N, **settings), draw(T, D, seed=0, dtype=torch.float64)
    if with_norm:
        module = nn.Sequential(MXNorm(D, **settings), MXNormLinear(D, N, **settings))
    dy, module = draw(T, N, seed=1, dtype=torch.float64), fill(module.double())
    expected = results_of(module, x, dy)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        results = results_of(module, x, dy)
    assert all(torch.equal(a, b) and a.dtype == torch.float64 for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_frozen_weight_or_input_gets_no_gradient(recipe):
    linear, x = layer(recipe), draw(T, D, seed=0)
    linear(x).sum().backward()
    assert x.grad is None and linear.weight.grad is not None
    linear = layer(recipe).requires_grad_(False)
    x = x.requires_grad_()
    linear(x).sum().backward()
    assert x.grad is not None and linear.weight.grad is None
