"""MXNorm and MXNormLinear against an autograd model in fp64, and against an explicit composition of casts."""

import pytest
import torch
import torch.nn as nn

from mxtrain import ConfigError, MXLinear, MXNorm, MXNormLinear, mxnorm_cast
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.mx.reference import dequantize, image
from mxtrain.formats.mxfp8 import MXFP8
from mxtrain.formats.mxnorm import inverse_rms, norm_backward
from mxtrain.formats.parse import get_recipe
from mxtrain.nn import mxnorm as module
from mxtrain.nn.normed_input import NormedInput
from tests.support.layer_checks import NormBlock, assert_near, draw, results_of

D, N, TOKENS = 96, 64, (2, 20)

pytestmark = pytest.mark.usefixtures("device")


def block_of(recipe="mxfp8", mode="reference", **kwargs):
    """One norm that feeds three linears."""
    return NormBlock(D, N, recipe, recipe, recipe, mode=mode, **kwargs)


def inputs(dtype=torch.float32, tokens=TOKENS):
    return draw(*tokens, D, seed=0, dtype=dtype), [draw(*tokens, N, seed=s, dtype=dtype) for s in (1, 2, 3)]


def straight_through_model(block, x, dys, estimate):
    """The method's formulas with the casts as identity, differentiated by autograd in fp64.

    The norm's gradient is RMSNorm's with rho for the inverse RMS: rho is given the value of the estimate and the
    derivative -rho^3 x / D that the inverse of sqrt(mean(x^2)) would have there.
    """
    x = x.detach().double().requires_grad_()
    parameters = [p.detach().double().requires_grad_() for p in block.parameters()]
    rho = inverse_rms(x.detach(), estimate, get_recipe("unquantized"))
    mean_square = x.square().mean(-1)
    rho = rho - 0.5 * rho**3 * (mean_square - mean_square.detach())
    xhat = x * rho.unsqueeze(-1)
    gain, weights = (parameters[0], parameters[1:]) if block.norm.weight is not None else (None, parameters)
    outputs = [xhat @ (w if gain is None else w * gain).t() for w in weights]
    torch.autograd.backward(outputs, [dy.double() for dy in dys])
    return [*outputs, x.grad, *(p.grad for p in parameters)]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("p", "estimator"), [(1, "pre_round"), (2, "pre_round"), (2, "exact")])
def test_gradients_match_the_fp64_model(p, estimator, affine):
    block = block_of("unquantized", dtype=torch.float64, affine=affine, p=p, estimator=estimator)
    x, dys = inputs(torch.float64)
    estimate = RMSEstimate.for_recipe(get_recipe("unquantized"), p, estimator, 1e-5)
    expected = straight_through_model(block, x, dys, estimate)
    for got, want in zip(results_of(block, x, *dys), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)


def test_with_the_exact_estimator_this_is_rmsnorm_then_linear():
    block = block_of("unquantized", dtype=torch.float64, estimator="exact")
    x, dys = inputs(torch.float64)
    norm, *linears = [nn.RMSNorm(D, eps=1e-5), *(nn.Linear(D, N, bias=False) for _ in range(3))]
    plain = nn.ModuleList([norm, *linears]).double()
    for mine, theirs in zip(block.parameters(), plain.parameters()):
        theirs.data.copy_(mine.data)
    x = x.requires_grad_()
    outputs = [linear(norm(x)) for linear in linears]
    expected = [*outputs, *torch.autograd.grad(outputs, [x, *plain.parameters()], dys)]
    # eps is inside rho here and in RMSNorm alike, but RMSNorm's derivative knows it: hence not exact to rounding.
    for got, want in zip(results_of(block, x, *dys), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rounding", "tiles"), [("rceil", False), ("rceil", True), ("floor", False)])
@pytest.mark.parametrize(("mode", "dtype"), [("reference", torch.float32), ("emulated", torch.bfloat16)])
def test_forward_and_gradients_match_an_explicit_composition_of_casts(mode, dtype, rounding, tiles):
    """The gain is folded before the maxima of tiles are found."""
    recipe = get_recipe("mxfp8", scale_rounding=rounding, weight_tiles=tiles)
    block = block_of(recipe, mode, dtype=dtype)
    # Casts along a wrong dimension would show: blocks have very different scales.
    x, dys = inputs(dtype)
    x, dys = x**9, [dy**9 for dy in dys]
    codes, scales, rho = mxnorm_cast(x.flatten(0, -2), recipe=recipe, eps=1e-5)
    xhat = x.flatten(0, -2).float() * rho[:, None]
    gain = block.norm.weight.detach().float()
    cast = lambda t, dim, tiles=False: image(t, recipe.format, rounding, dim, torch.float32, tiles)  # noqa: E731
    dxhat_sum, dgain, expected_outputs, dweights = 0, 0, [], []
    for linear, dy in zip(block.linears, dys):
        weight = linear.weight.detach().float()
        folded, dy = weight * gain, dy.flatten(0, -2).float()
        expected_outputs.append(dequantize(codes, scales, recipe.format) @ cast(folded, 1, tiles).t())
        dxhat_sum = dxhat_sum + (cast(dy, 1) @ cast(folded, 0, tiles)).to(dtype).float()
        d_folded = (cast(dy, 0).t() @ cast(xhat, 0)).to(dtype).float()
        dweights.append(d_folded * gain)
        dgain = dgain + (weight * d_folded).sum(0)
    dx = norm_backward(dxhat_sum, x.flatten(0, -2), rho).view_as(x)

    # bf16 rounds each result once more, and autograd's partial sums; fp32 differs only by summation order.
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert_near(results_of(block, x, *dys), [*expected_outputs, dx, dgain, *dweights], tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", ["reference", "emulated"])
def test_the_norms_operand_is_mxnorm_cast_to_the_bit(mode, dtype):
    """The cast reads x * rho in fp32. Rounded to bf16 first, it would give other codes."""
    x = draw(*TOKENS, D, seed=0, dtype=dtype)
    normed = MXNorm(D, mode=mode)(x)
    codes, scales, rho = mxnorm_cast(x, mode=mode)
    assert torch.equal(normed.xhat.data.float(), dequantize(codes, scales, MXFP8).flatten(0, -2))
    assert torch.equal(normed.rho, rho.flatten())


def test_frozen_weights_and_inputs_leave_the_other_gradients_unchanged():
    block, (x, dys) = block_of(), inputs()
    *_, dx, dgain, _, _, _ = results_of(block, x, *dys)
    block.linears.requires_grad_(False)
    torch.autograd.backward(block(x), dys)
    assert torch.equal(block.norm.weight.grad, dgain) and all(w.weight.grad is None for w in block.linears)
    block.requires_grad_(False)
    x = x.requires_grad_()
    torch.autograd.backward(block(x), dys)
    assert torch.equal(x.grad, dx)


def test_one_norm_backward_for_all_consumers(monkeypatch):
    calls = []
    original = module.norm_backward
    monkeypatch.setattr(module, "norm_backward", lambda *args: calls.append(1) or original(*args))
    x, dys = inputs()
    results_of(block_of(), x, *dys)
    assert len(calls) == 1


def test_the_backward_saves_x_and_rho():
    """Besides parameters, the backward keeps only x itself and one number per token."""
    block, x = block_of(), inputs()[0].requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        block(x)
    parameters = {p.data_ptr() for p in block.parameters()}
    others = [t for t in saved if t.data_ptr() not in parameters]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in others}
    rho_bytes = TOKENS[0] * TOKENS[1] * 4
    assert sorted(storages.values()) == [rho_bytes, x.untyped_storage().nbytes()]
    assert x.untyped_storage().data_ptr() in storages


def test_ugly_rows():
    """Zero rows stay finite; NaN and infinity reach the outputs of their row and of no other."""
    block, (x, dys) = block_of(), inputs()
    x[0, 0] = 0
    results = results_of(block, x, *dys)
    assert not any(y[0, 0].any() for y in results[:3]) and all(t.isfinite().all() for t in results)
    x[1, 3, 7], x[1, 5, 7] = float("nan"), float("inf")
    for y in block(x):
        finite = y.isfinite()
        assert not finite[1, 3].any() and not finite[1, 5].any()
        assert finite.sum() == finite.numel() - 2 * N


def test_bias():
    block, (x, dys) = block_of(bias=True), inputs()
    with_bias = results_of(block, x, *dys)
    biases = [linear.bias.detach().clone() for linear in block.linears]
    for linear in block.linears:
        linear.bias.data.zero_()
    for got, without, bias in zip(with_bias, block(x), biases):
        torch.testing.assert_close(got, without + bias)
    for got, dy in zip(with_bias[6::2], dys, strict=True):
        torch.testing.assert_close(got, dy.sum((0, 1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant):
    block, (x, dys) = block_of(), inputs()
    _, _, _, *plain = results_of(block, x, *dys)
    x = x.requires_grad_()
    outputs = torch.utils.checkpoint.checkpoint(lambda t: tuple(block(t)), x, use_reentrant=reentrant)
    torch.autograd.backward(outputs, dys)
    for got, want in zip([x.grad] + [p.grad for p in block.parameters()], plain):
        assert torch.equal(got, want)


def test_autocast_gives_its_dtype_and_reads_master_weights_unrounded():
    block, (x, _) = block_of(), inputs()
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        outputs = block(x)
    for got, full in zip(outputs, block(x)):
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, full.bfloat16())


def test_modules_keep_parameters_and_describe_themselves():
    norm, linear = nn.RMSNorm(D, eps=1e-3), nn.Linear(D, N)
    new_norm = MXNorm.from_rms_norm(norm, p=1, mode="reference")
    new_linear = MXNormLinear.from_linear(linear, mode="reference")
    assert new_norm.weight is norm.weight and new_norm.eps == 1e-3 and new_norm.estimate.eps == 1e-3
    assert new_linear.weight is linear.weight and new_linear.bias is linear.bias
    assert "p=1, estimator=pre_round, recipe=mxfp8/rceil, mode=reference" in repr(new_norm)
    assert "recipe=mxfp8/rceil, mode=reference" in repr(new_linear)
    assert isinstance(new_norm(draw(2, D, seed=0)), NormedInput)
    assert new_norm(draw(2, 5, D, seed=0)).shape == (2, 5, D)


def test_rms_norm_without_eps_keeps_pytorchs_default():
    assert MXNorm.from_rms_norm(nn.RMSNorm(D), mode="reference").estimate.eps == torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MXNorm(80), "dim = 80 is not a multiple of the block size 32"),
        (lambda: MXNorm(64, recipe="nvfp4", estimator="post_round"), "estimator = 'post_round' reads rounded block"),
        (lambda: MXNormLinear(64, 72, recipe="nvfp4"), "out_features = 72 is not a multiple"),
        (lambda: MXNorm.from_rms_norm(nn.RMSNorm((4, 32))), r"normalized_shape = \(4, 32\)"),
    ],
)
def test_wrong_settings(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_plain_tensor_is_refused():
    with pytest.raises(TypeError, match="takes the result of an MXNorm, not Tensor"):
        MXNormLinear(D, N)(torch.ones(2, D))


@pytest.mark.parametrize("norm", [{"recipe": "unquantized"}, {"mode": "emulated"}])
def test_a_norm_with_another_recipe_or_mode_is_refused(norm):
    normed = MXNorm(D, **{"mode": "reference", **norm})(draw(2, D, seed=0))
    with pytest.raises(ConfigError, match="but its input was normalized with"):
        MXNormLinear(D, N, mode="reference")(normed)


class LoRA(nn.Module):
    """An adapter of peft on a linear: ``peft.tuners.lora.layer.Linear``."""

    def __init__(self, linear, rank=4):
        super().__init__()
        self.base_layer = linear
        self.a, self.b = nn.Linear(D, rank, bias=False), nn.Linear(rank, N, bias=False)

    def forward(self, x):
        y = self.base_layer(x)
        return y + self.b(self.a(x if x.dtype == self.a.weight.dtype else x.to(self.a.weight.dtype)))


def test_an_adapter_behind_an_mxnorm_is_told_the_way_out():
    norm, linear = MXNorm(D, mode="reference"), LoRA(MXNormLinear(D, N, mode="reference"))
    with pytest.raises(AttributeError, match="no 'dtype', because it is no tensor .* the linears that get adapters"):
        linear(norm(draw(2, D, seed=0)))
    assert LoRA(MXLinear(D, N, mode="reference"))(nn.RMSNorm(D)(draw(2, D, seed=0))).shape == (2, N)


def test_layers_have_no_attribute_called_state():
    """peft sets ``linear.state`` anew where it finds one, as layers of bitsandbytes have it."""
    for layer in (MXNorm(D), MXNormLinear(D, N), MXLinear(D, N)):
        assert not hasattr(layer, "state")
