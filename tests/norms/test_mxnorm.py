"""The public ``mxnorm_cast`` against torchao's cast and the NVFP4 reference."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxtrain
from mxtrain import mxnorm_cast
from mxtrain.formats.nvfp4 import reference as nvfp4

pytestmark = pytest.mark.usefixtures("device")

ROUNDINGS = ("rceil", "floor")


def draw(*shape, seed=0, dtype=torch.float32):
    x = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return x.to(torch.get_default_device(), dtype)


def torchao_cast(x, rounding):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    mx = MXTensor.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode(rounding))
    return mx.qdata, mx.scale


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("estimator", ["pre_round", "post_round", "exact"])
def test_mxnorm_cast_is_torchaos_cast_of_the_product(estimator, rounding):
    for shape, dtype, p in product(((64,), (5, 96), (2, 3, 256)), (torch.bfloat16, torch.float32), (1, 2)):
        x = draw(*shape, seed=len(shape), dtype=dtype)
        codes, scales, rho = mxnorm_cast(x, p=p, estimator=estimator, scale_rounding=rounding)
        assert codes.dtype == torch.float8_e4m3fn and codes.shape == x.shape
        assert scales.dtype == torch.float8_e8m0fnu and scales.shape == (*shape[:-1], shape[-1] // 32)
        assert rho.dtype == torch.float32 and rho.shape == shape[:-1]
        expected_codes, expected_scales = torchao_cast(x.float() * rho.unsqueeze(-1), rounding)
        assert same_bits(codes, expected_codes) and same_bits(scales, expected_scales)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(ROUNDINGS), st.floats(-30, 30))
def test_one_set_of_maxima_serves_estimate_and_cast(seed, rounding, log2_scale):
    """max|x| rho == max|x rho| in fp32, so scales follow from the maxima of x alone."""
    x = draw(4, 128, seed=seed) * 2.0**log2_scale
    _, scales, rho = mxnorm_cast(x, scale_rounding=rounding)
    maxima = x.unflatten(-1, (-1, 32)).abs().amax(-1) * rho.unsqueeze(-1)
    _, from_maxima = torchao_cast(maxima.unsqueeze(-1).expand(-1, -1, 32).reshape(4, 128), rounding)
    assert same_bits(scales, from_maxima)


def test_non_finite_rows_are_never_silent():
    x = torch.ones(3, 64)
    x[0, 0], x[1, 40] = float("nan"), float("inf")
    _, scales, rho = mxnorm_cast(x)
    bits = scales.view(torch.uint8)
    assert (bits[0] == 255).all(), "a NaN spoils the estimate of its row"
    assert bits[1, 1] == 255 and bits[1, 0] != 255
    assert (bits[2] != 255).all() and rho[2].isfinite()


@pytest.mark.parametrize("mode", ["reference", "emulated"])
def test_results_have_no_gradients(mode):
    assert not any(result.requires_grad for result in mxnorm_cast(draw(2, 64).requires_grad_(), mode=mode))


@pytest.mark.parametrize("mode", ["reference", "emulated"])
@pytest.mark.parametrize("estimator", ["pre_round", "exact"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_rows_up_to_the_largest_number(recipe, estimator, mode):
    """Norms that sum squares in fp32 return 0 for rows of 1e20."""
    x = draw(3, 64).clamp(-1.9, 1.9)
    want = mxnorm_cast(x, recipe=recipe, estimator=estimator, mode=mode, eps=0.0)
    for exponent in (66, 127):
        huge = x * 2.0**exponent
        codes, scales, rho = mxnorm_cast(huge, recipe=recipe, estimator=estimator, mode=mode)
        assert huge.isfinite().all() and huge.abs().max() > 1e20
        assert same_bits(codes, want[0]) and same_bits(scales, want[1])
        torch.testing.assert_close(rho.double() * 2.0**exponent, want[2].double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"recipe": "unquantized"}, "no format to cast to"),
        (
            {"recipe": "fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8", "scale_rounding": "floor"},
            "scale_rounding = 'floor' does not apply to recipe 'nvfp4'",
        ),
    ],
)
def test_wrong_settings(kwargs, message):
    with pytest.raises(ValueError, match=message):
        mxnorm_cast(draw(2, 64), **kwargs)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_rows_without_elements_are_refused(recipe):
    with pytest.raises(ValueError, match=r"^x has shape \(3, 0\); its last dimension must be a multiple of"):
        mxnorm_cast(torch.empty(3, 0), recipe=recipe)


def test_strides_and_no_rows():
    x = draw(64, 6).t()
    for a, b in zip(mxnorm_cast(x), mxnorm_cast(x.contiguous())):
        assert same_bits(a, b)
    codes, scales, rho = mxnorm_cast(torch.empty(0, 64))
    assert codes.shape == (0, 64) and scales.shape == (0, 2) and rho.shape == (0,)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_dynamic", "nvfp4_row"])
@pytest.mark.parametrize(("p", "estimator"), [(1, "pre_round"), (2, "pre_round"), (2, "exact")])
def test_mxnorm_cast_to_nvfp4(p, estimator, recipe):
    for shape, dtype in product(((48,), (5, 96), (2, 3, 256)), (torch.bfloat16, torch.float32)):
        check_nvfp4(shape, dtype, p, estimator, recipe)


def check_nvfp4(shape, dtype, p, estimator, recipe):
    x = draw(*shape, seed=len(shape), dtype=dtype)
    codes, scales, rho, *rest = mxnorm_cast(x, p=p, estimator=estimator, recipe=recipe)
    xhat = x.float() * rho.unsqueeze(-1)
    if recipe == "nvfp4":
        assert not rest
        tensor_scale = mxtrain.static_tensor_scale(shape[-1], p, estimator)
    else:
        (tensor_scale,) = rest
        largest = xhat.abs().amax(-1) if recipe == "nvfp4_row" else xhat.abs().amax()
        assert torch.equal(tensor_scale, nvfp4.power_of_two_tensor_scales(largest))
        tensor_scale = tensor_scale.unsqueeze(-1)
    assert codes.dtype == torch.uint8 and codes.shape == (*shape[:-1], shape[-1] // 2)
    assert scales.dtype == torch.float8_e4m3fn and scales.shape == (*shape[:-1], shape[-1] // 16)
    assert rho.dtype == torch.float32 and rho.shape == shape[:-1]
    for got, want in zip((codes, scales), nvfp4.cast(xhat, tensor_scale)):
        assert same_bits(got, want)
    error = nvfp4.dequantize(codes, scales, tensor_scale) - xhat
    assert error.norm() < 0.15 * xhat.norm()


def test_mxnorm_cast_to_nvfp4_of_ugly_rows():
    x = draw(4, 64)
    x[0], x[1, 3] = 0, float("nan")
    x[2], x[2, 5] = 0, 1e30
    codes, scales, rho = mxnorm_cast(x, recipe="nvfp4")
    values = nvfp4.dequantize(codes, scales, mxtrain.static_tensor_scale(64))
    assert not values[0].any() and values[1].isnan().all() and values[2:].isfinite().all()
    assert values[2, 5] == values[2].abs().max() > 3.9
    with pytest.raises(ValueError, match=r"\(2, 40\)"):
        mxnorm_cast(draw(2, 40), recipe="nvfp4")
