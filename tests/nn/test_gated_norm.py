"""MXNorm of gated rows in groups: results and gradients of the plain formula, and the bits of casts of whole rows."""

from dataclasses import replace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from mxtrain import MXNorm, MXNormLinear
from mxtrain.formats.matrices import CastSpec, Codes, Operand
from mxtrain.formats.mx.reference import from_blocked
from mxtrain.formats.parse import get_recipe
from mxtrain.formats.swiglu import swiglu
from mxtrain.nn.gated_norm import GatedMXNorm, _GatedNormFunction
from mxtrain.nn.ready_weights import ReadyWeights
from tests.support.layer_checks import assert_near, draw, fill
from tests.support.split_checks import recorded

D, N, T, GROUPS, EPS = 128, 64, 48, 4, 1e-5

pytestmark = pytest.mark.usefixtures("device")


class Gated(nn.Module):
    def __init__(self, recipe="mxfp8", mode="reference", groups=GROUPS, dtype=torch.float32):
        super().__init__()
        self.norm = GatedMXNorm(D, EPS, estimator="exact", recipe=recipe, mode=mode, dtype=dtype)
        self.norm.groups = groups
        self.linear = MXNormLinear(D, N, bias=False, recipe=recipe, mode=mode, dtype=dtype)
        self.linear.fed_by = (self.norm,)
        fill(self)

    def forward(self, x, gate):
        normed = self.norm(x, gate)
        return self.linear(normed if self.norm.is_plain else normed.to(x.dtype))


def plain(block, x, gate):
    u = (x * F.silu(gate)).unflatten(-1, (block.norm.groups, -1))
    normed = (u * torch.rsqrt(u.square().mean(-1, keepdim=True) + EPS)).flatten(-2)
    return F.linear(normed * block.norm.weight, block.linear.weight)


def results(run, block, dtype=torch.float32):
    x, gate = (draw(2, T // 2, D, seed=seed, dtype=dtype).requires_grad_() for seed in (0, 1))
    y = run(x, gate)
    return [y.detach(), *torch.autograd.grad(y, [x, gate, *block.parameters()], draw(*y.shape, seed=2, dtype=y.dtype))]


@pytest.mark.parametrize("groups", [1, GROUPS])
def test_without_rounding_results_and_gradients_are_those_of_autograd(groups):
    block = Gated("unquantized", groups=groups, dtype=torch.float64)
    expected = results(lambda *rows: plain(block, *rows), block, torch.float64)
    assert_near(results(block, block, torch.float64), expected, 1e-6)  # rho is fp32 of fp64 sums
    block.norm.is_plain = block.linear.is_plain = True
    assert_near(results(block, block, torch.float64), expected, 1e-12)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "nvfp4_row"])
def test_operands_are_casts_of_the_rows_with_a_factor_for_each_group(recipe):
    recipe = get_recipe(recipe, stochastic_rounding=False)
    operands = {}
    for mode, dtype in (("reference", torch.float32), ("emulated", torch.float32)):
        block = Gated(recipe, mode)
        with recorded(found := []):
            results(block, block, dtype)
        operands[mode] = [operand.float() for operand in found]
    x, gate = (draw(2, T // 2, D, seed=seed).view(T, D) for seed in (0, 1))
    u = gate * torch.sigmoid(gate) * x
    rho = (1 / (u.unflatten(1, (GROUPS, -1)).double().square().mean(-1) + EPS).sqrt()).float()
    xhat = u * rho.repeat_interleave(D // GROUPS, 1)
    scale = recipe.fprop.ops.static_scale(D // GROUPS, block.norm.estimate, recipe.fprop)
    fprop = recipe.fprop.ops.cast([xhat], recipe.fprop, "reference", (1,), CastSpec(tensor_scale=scale))[1].data
    wgrad = recipe.wgrad.ops.cast([xhat], recipe.wgrad, "reference", (0,), CastSpec(signs=block.norm.signs(x.device)))
    assert torch.equal(operands["reference"][0], fprop) and torch.equal(operands["reference"][5], wgrad[0].data)
    for reference, kernels in zip(operands["reference"][:2], operands["emulated"][:2], strict=True):
        assert (reference != kernels).sum() <= reference.numel() / 1000  # rho may differ in its last bit


@pytest.mark.parametrize(
    "recipe, mode, ratio",
    [("mxfp8", "emulated", 1.66), ("nvfp4", "emulated", 1.49), ("nvfp4_row", "reference", 1.49)],
)
def test_a_measured_ratio_makes_the_estimate_of_gated_rows_their_rms(recipe, mode, ratio):
    """A ratio of 1 gives the bits of the plain estimate."""
    norm, own = (kind(size, EPS, recipe=recipe, mode=mode) for kind, size in ((GatedMXNorm, 2048), (MXNorm, 1024)))
    norm.groups = 2
    x, gate = (draw(T // 2, 2048, seed=seed) for seed in (0, 1))
    u = swiglu(gate, x).view(T, 1024)
    expected, rms = own(u), u.double().square().mean(-1).sqrt()
    for factor in (1.0, ratio):
        norm.estimate = replace(own.estimate, ratio=factor)
        normed = norm(x, gate)
        xhat, rho = normed.xhat.data.view(T, 1024).float(), normed.rho.flatten()
        if factor == 1:
            assert torch.equal(rho, expected.rho)
            # Rows of whole tokens have other scales.
            assert recipe == "nvfp4_row" or torch.equal(xhat, expected.xhat.data.float())
        assert (rho * rms).mean().item() == pytest.approx(factor / ratio, abs=0.02)
        assert xhat.square().mean().sqrt().item() == pytest.approx(factor / ratio, abs=0.02)


def test_a_dequantized_backward_decodes_the_rows_of_fprop():
    block = Gated(get_recipe("nvfp4", backward="dequantized"))
    x, gate = (draw(T, D, seed=seed) for seed in (0, 1))
    x[:, ::32] *= 3e5  # other blocks get the smallest block scale, so that their values depend on the tensor scale
    with recorded(found := []):
        block(x, gate).backward(draw(T, N, seed=2))
    of_fprop, _, _, of_wgrad = found
    assert torch.equal(of_wgrad, of_fprop.t())


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "nvfp4_row"])
def test_native_codes_are_those_of_whole_rows(recipe):
    norm = Gated(recipe, "reference").norm
    x, gate = (draw(T, D, seed=seed) for seed in (0, 1))
    of = {}
    for mode in ("reference", "native"):
        *_, rho, data, scales, tensor_scale = _GatedNormFunction.apply(
            x, gate, GROUPS, norm.estimate.key, norm.recipe.fprop.key, mode, False
        )
        of[mode] = Operand(data, scales, tensor_scale), rho
    fprop, operand = norm.recipe.fprop, of["native"][0]
    codes = Codes(operand.data, from_blocked(operand.scales, T, D // fprop.block_size), operand.tensor_scale)
    values = fprop.ops.dequantize(codes, torch.float32)
    torch.testing.assert_close(of["native"][1], of["reference"][1], rtol=3e-7, atol=0)
    assert (values != of["reference"][0].data).sum() <= values.numel() / 1000


def test_weights_cast_ahead_and_compiled_layers_change_nothing(compile_backend):
    block = Gated(mode="emulated")
    expected = results(block, block)
    ReadyWeights([block]).refresh()
    assert block.linear.ready is not None
    assert all(map(torch.equal, results(block, block), expected))
    compiled = torch.compile(block, backend=compile_backend, fullgraph=True)
    assert_near(results(compiled, block), expected, 1e-4)


def test_gradients_have_the_dtypes_of_x_and_gate():
    block = Gated(dtype=torch.bfloat16)
    y, dx, dgate, *_ = results(block, block, torch.bfloat16)
    assert y.dtype == dx.dtype == dgate.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="of torch.bfloat16 cannot become torch.float32"):
        block.norm(*(draw(T, D, seed=0, dtype=torch.bfloat16),) * 2).to(torch.float32)
    assert "groups=4" in repr(block.norm)
