"""dgrad and wgrad on the values of fprop's codes: which values, how exact the products, and what is saved for them."""

from dataclasses import replace

import pytest
import torch

from mxtrain.formats.gemm import matmul
from mxtrain.formats.matrices import values_dtype
from mxtrain.formats.mxnorm import scale_rows
from mxtrain.formats.nvfp4 import reference as nvfp4
from mxtrain.formats.parse import get_recipe
from mxtrain.nn.group import LinearGroup
from mxtrain.nn.split import WHOLE
from mxtrain.nn.three_gemms import ThreeGEMMs
from mxtrain.norms.mxnorm import fold_backward, norm_backward
from tests.support.layer_checks import NormBlock, draw, mx_linear, results_of

D, N, T = 128, 96, 64
FORMATS = ("mxfp8", "nvfp4")
MODES = [("reference", torch.float32), ("reference", torch.bfloat16), ("emulated", torch.bfloat16)]


def cases(recipes, modes):
    """The interpreter takes seconds for a cast to NVFP4."""
    all_cases = [(recipe, *how) for recipe in recipes for how in modes]
    slow = [case for case in all_cases if case[0] != "mxfp8" and case[1] == "emulated"]
    return [pytest.param(*case, marks=pytest.mark.sweep if case in slow else ()) for case in all_cases]


pytestmark = pytest.mark.usefixtures("device", "rounding_step")


def dequantized(recipe):
    return get_recipe(recipe, backward="dequantized")


def assert_rounded_once(got, a, b):
    """``got`` is a product of these matrices with fp32 sums."""
    a, b = a.double(), b.double()
    bound = (torch.finfo(got.dtype).eps + a.shape[1] * 2.0**-24) * (a.abs() @ b.abs())
    assert ((got.double() - a @ b).abs() <= bound).all()


@pytest.mark.parametrize(("recipe", "mode", "dtype"), cases(FORMATS, MODES))
def test_a_linear(recipe, mode, dtype):
    linear, x = mx_linear(D, N, dequantized(recipe), mode, dtype), draw(T, D, seed=0, dtype=dtype)
    dy = draw(T, N, seed=1, dtype=dtype) * 3
    y, dx, dw = results_of(linear, x, dy)
    gemms = linear.gemms(x.device)
    x_values, w_values = gemms.quantize_activation(x).data, gemms.quantize_weights([linear.weight], None, (1,))[1].data
    assert torch.equal(y, results_of(mx_linear(D, N, recipe, mode, dtype), x, dy)[0])
    assert_rounded_once(dx, dy, w_values)
    assert_rounded_once(dw, dy.t(), x_values)
    assert not torch.equal(w_values, linear.weight) and not torch.equal(x_values, x)


@pytest.mark.parametrize(("recipe", "mode", "dtype"), cases([*FORMATS, "nvfp4_dynamic"], MODES[::2]))
def test_a_norm_and_its_linear(recipe, mode, dtype):
    """The norm's rows are cast again as its own kernel cast them, with its tensor scale."""
    block = NormBlock(D, N, dequantized(recipe), mode=mode, dtype=dtype)
    x, dy, (linear,) = draw(T, D, seed=0, dtype=dtype), draw(T, N, seed=1, dtype=dtype), block.linears
    _, dx, dgain, dw = results_of(block, x, dy)
    normed, gain = block.norm(x), block.norm.weight
    w_values = linear.gemms(x.device).quantize_weights([linear.weight], gain, (1,))[1].data
    assert torch.equal(dx, norm_backward(matmul(dy, w_values.t().to(dtype), dtype), x, normed.rho, mode, False))
    folded = fold_backward(matmul(dy.t(), normed.xhat.data.t().to(dtype), dtype), linear.weight, gain, mode)
    assert torch.equal(dw, folded[0]) and torch.equal(dgain, folded[1])


@pytest.mark.parametrize("recipe", ["mxfp8", pytest.param("nvfp4", marks=pytest.mark.sweep)])
def test_fp32_gradients_are_not_rounded_by_images_of_bf16(recipe):
    linear, x, dy = mx_linear(D, N, dequantized(recipe), "emulated"), draw(T, D, seed=0), draw(T, N, seed=1)
    _, dx, dw = results_of(linear, x, dy)
    gemms = linear.gemms(x.device)
    w = gemms.quantize_weights([linear.weight], None)
    assert w[0].data.dtype == torch.bfloat16 and w[0].data.data_ptr() == w[1].data.data_ptr(), "one image"
    assert_rounded_once(dx, dy, w[1].data)
    assert_rounded_once(dw, dy.t(), gemms.quantize_activation(x).data)


@pytest.mark.parametrize(("mode", "dtype"), [MODES[0], pytest.param(*MODES[2], marks=pytest.mark.sweep)])
def test_values_with_exact_tensor_scales(mode, dtype):
    recipe = get_recipe("nvfp4", four_over_six="both", weight_tiles=False, backward="dequantized")
    linear, x, dy = (
        mx_linear(D, N, recipe, mode, dtype),
        draw(T, D, seed=0, dtype=dtype),
        draw(T, N, seed=1, dtype=dtype),
    )
    experts = ThreeGEMMs(recipe.key, mode, WHOLE).quantize_weights([linear.weight.view(3, 32, D)], None)[0].data.t()

    def decoded(matrix):
        amax = matrix.float().abs().amax()
        return nvfp4.dequantize_by_amax(*nvfp4.cast_four_over_six(matrix, amax), amax, values_dtype(mode))

    _, dx, dw = results_of(linear, x, dy)
    assert_rounded_once(dx, dy, decoded(linear.weight))
    assert_rounded_once(dw, dy.t(), decoded(x))
    assert torch.equal(experts, torch.cat([decoded(w) for w in linear.weight.chunk(3)]))


@pytest.mark.parametrize("recipe", FORMATS)
def test_native_products_leave_images_for_the_backward(recipe):
    x, w, rho = draw(T, D, seed=0), draw(N, D, seed=1), draw(T, seed=2).abs()
    native, reference = (ThreeGEMMs(dequantized(recipe).key, mode, WHOLE) for mode in ("native", "reference"))
    operands, (wanted, along_tokens) = (
        native.quantize_weights([w], None),
        (reference.quantize_weights([w], None)[1].data, reference.quantize_along_tokens(x, rho).data),
    )
    assert operands[1].scales is not None
    for got, want in ((operands[0].data.t(), wanted), (native.quantize_along_tokens(x, rho).data, along_tokens)):
        assert got.dtype == torch.bfloat16 and torch.equal(got.float(), want), "exact"
    values = replace(reference, recipe_key=get_recipe(recipe).key).quantize_activation(scale_rows(x, rho)).data
    assert torch.equal(along_tokens.t(), values)


@pytest.mark.parametrize("mode", ["reference", "emulated"])
def test_nothing_more_is_saved_for_the_backward(mode):
    x = draw(T, D, seed=0)

    def saved(recipe, grouped: bool):
        block = NormBlock(D, N, recipe, recipe, mode=mode)
        block.norm.group = LinearGroup(block.linears) if grouped else None
        model = torch.nn.ModuleList([block, mx_linear(N, D, recipe, mode)])
        found, parameters = {}, {p.data_ptr() for p in model.parameters()}

        def keep(tensor):
            if tensor.data_ptr() not in parameters:
                found[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            gate, up = model[0](x.requires_grad_())
            model[1](gate + up)
        return sum(found.values())

    for grouped in (False, True):
        assert saved(dequantized("mxfp8"), grouped) == saved("mxfp8", grouped) > 0
