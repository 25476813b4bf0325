"""Shapes, dtypes and padding of NVFP4 operands; what they hold is tested in tests/nn/test_nvfp4_layers.py."""

import pytest
import torch

from mxtrain.ops.mxnorm import normalize
from mxtrain.ops.nvfp4_operands import activation, activation_along_tokens, gradient, weight
from mxtrain.ops.quantize import quantize
from mxtrain.recipes.parse import get_recipe
from mxtrain.recipes.rms_estimate import RMSEstimate
from mxtrain.reference import nvfp4
from mxtrain.reference.casts import from_blocked

RECIPE = get_recipe("nvfp4")
DTYPES = {"reference": torch.float32, "emulated": torch.bfloat16}


pytestmark = pytest.mark.usefixtures("device")


def draw(*shape, seed=0, dtype=torch.float32):
    x = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return x.to(dtype).to(torch.get_default_device())


def signs():
    return torch.tensor(0b1010)


def draws():
    return torch.tensor([1, 3, 0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 16, 37])
def test_shapes_and_dtypes(tokens, mode, dtype):
    x, w, dy = draw(tokens, 48, dtype=dtype), draw(80, 48, dtype=dtype), draw(tokens, 80, dtype=dtype)
    padded = -(-tokens // 16) * 16
    by_dim = gradient(dy, RECIPE, mode, (1, 0), signs(), draws())
    operands = {
        (tokens, 48): activation(x, mode),
        (48, padded): activation_along_tokens(x, RECIPE, mode, None, signs()),
        (80, 48): weight(w, RECIPE, mode, 1),
        (48, 80): weight(w, RECIPE, mode, 0),
        (tokens, 80): by_dim[1],
        (80, padded): by_dim[0],
    }
    for shape, (data, scales, tensor_scale) in operands.items():
        assert data.shape == shape and data.dtype == DTYPES[mode] and scales is None and tensor_scale is None
        assert data.isfinite().all()


def test_both_modes_hold_the_same_values():
    """Tensor scale and all: it is a power of two, so bf16 holds what fp32 does."""
    x, w = draw(37, 48) * 3e-5, draw(80, 48) * 700
    factor = draw(37, seed=1).abs()
    for cast in (
        lambda mode: activation(x, mode, factor),
        # So large that the scales of small blocks are at their least: not what the largest element asks for.
        lambda mode: activation(x, mode, factor, 2.0**-12),
        lambda mode: activation_along_tokens(x, RECIPE, mode, factor, signs()),
        lambda mode: weight(w, RECIPE, mode, 1, draw(48)),
        lambda mode: gradient(x, RECIPE, mode, (1,), signs(), draws())[1],
        lambda mode: gradient(x, RECIPE, mode, (0,), signs(), draws())[0],
    ):
        assert torch.equal(cast("emulated").data.float(), cast("reference").data)


def test_weights_in_tiles_are_the_same_in_both_orientations_and_blocks_are_not():
    w = draw(80, 48)
    by_dim = [weight(w, RECIPE, "reference", dim).data for dim in (0, 1)]
    assert torch.equal(by_dim[0], by_dim[1].t())
    blocks = [weight(w, get_recipe("nvfp4", weight_tiles=False), "reference", dim).data for dim in (0, 1)]
    assert not torch.equal(blocks[0], blocks[1].t())
    tensor_scale = nvfp4.power_of_two_tensor_scale(w)
    assert torch.equal(blocks[0], nvfp4.image(w.t(), tensor_scale, torch.float32) * tensor_scale)


def test_wgrad_is_what_it_is_without_transform_and_padding():
    """Up to the casts: the same signs on both sides, and padding that adds nothing."""
    x, dy = draw(37, 48), draw(37, 80, seed=1)
    dw = gradient(dy, RECIPE, "reference", (0,), signs(), draws())[0].data
    dw = dw @ activation_along_tokens(x, RECIPE, "reference", None, signs()).data.t()
    assert (dw - dy.t() @ x).norm() < 0.25 * (dy.t() @ x).norm()
    plain = get_recipe("nvfp4", hadamard=False, stochastic_rounding=False)
    dw = gradient(dy, plain, "reference", (0,), None, None)[0].data
    assert not dw[:, 37:].any()


def test_the_general_cast_refuses_nvfp4():
    with pytest.raises(ValueError, match="recipe nvfp4/static/weight_tiles/hadamard/stochastic_rounding: its operands"):
        quantize(draw(16, 32), RECIPE, "reference")


@pytest.mark.parametrize("switches", [{}, {"weight_tiles": False, "hadamard": False, "stochastic_rounding": False}])
@pytest.mark.parametrize(("tokens", "features", "outputs"), [(37, 48, 80), (64, 128, 144)])
def test_native_operands_hold_the_emulated_values(tokens, features, outputs, switches):
    """Codes times scales, after undoing the blocked layout, are the values that emulation multiplies."""
    recipe = get_recipe("nvfp4", **switches)
    x, w, dy, factor = draw(tokens, features), draw(outputs, features), draw(tokens, outputs), draw(tokens).abs()

    def operands(mode):
        by_dim = gradient(dy, recipe, mode, (1, 0), signs(), draws())
        norm = normalize(x, RMSEstimate.for_recipe(recipe), recipe, mode)[0]
        return [
            norm,
            activation(x, mode, factor),
            activation_along_tokens(x, recipe, mode, factor, signs()),
            weight(w, recipe, mode, 1, draw(features)),
            weight(w, recipe, mode, 0),
            by_dim[1],
            by_dim[0],
        ]

    for native, emulated in zip(operands("native"), operands("emulated"), strict=True):
        rows, k = native.data.shape[0], 2 * native.data.shape[1]
        used = emulated.data.shape[1]
        assert native.data.is_contiguous() and k % 32 == 0 and used <= k < used + 32
        # The layout has blocks in fours.
        scales = from_blocked(native.scales, rows, -(-k // 64) * 4)[:, : k // 16]
        values = nvfp4.dequantize(native.data, scales, native.tensor_scale)
        assert torch.equal(values[:, :used], emulated.data.float())
        assert (values[:, used:] == 0).all(), "an incomplete block is filled up with zeros"
