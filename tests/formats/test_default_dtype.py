"""Results do not depend on PyTorch's default dtype."""

import pytest
import torch

from mxtrain import MXNorm, MXNormLinear, mxnorm_cast
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.nvfp4 import reference as nvfp4
from mxtrain.formats.parse import get_recipe


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def other_default(request):
    """A context in which PyTorch has another default dtype."""

    class Other:
        def __enter__(self):
            torch.set_default_dtype(request.param)

        def __exit__(self, *_):
            torch.set_default_dtype(torch.float32)

    return Other()


def layer(recipe, x):
    """Output and gradients of a norm and the linear behind it, with the tensors of the operand between them."""
    generator = torch.Generator().manual_seed(1)
    norm = MXNorm(64, recipe=recipe, mode="reference", dtype=torch.float32)
    linear = MXNormLinear(64, 32, bias=False, recipe=recipe, mode="reference", dtype=torch.float32)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(32, 64, generator=generator, dtype=torch.float32))
    x = x.clone().requires_grad_()
    normed = norm(x)
    y = linear(normed)
    y.square().sum().backward()
    operand = [tensor for tensor in normed.xhat if tensor is not None]
    return [*operand, normed.rho, y, x.grad, linear.weight.grad, norm.weight.grad]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "nvfp4_dynamic"])
def test_layers_and_casts(recipe, other_default):
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)) * 3.0
    switches = {} if recipe == "mxfp8" else {"stochastic_rounding": False}
    of_layer = get_recipe(recipe, **switches)
    expected = [*layer(of_layer, x), *mxnorm_cast(x, recipe=recipe, mode="reference")]
    with other_default:
        got = [*layer(of_layer, x), *mxnorm_cast(x, recipe=recipe, mode="reference")]
    for result, want in zip(got, expected, strict=True):
        assert result.dtype == want.dtype
        assert torch.equal(result.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


def test_tensor_scales(other_default):
    with other_default:
        assert nvfp4.dynamic_tensor_scale(torch.empty(0, 16)).dtype == torch.float32
        sixes = torch.full((1, 16), 6.0, dtype=torch.float32)
        assert torch.equal(nvfp4.dequantize(*nvfp4.cast(sixes, 1.0), 1.0), sixes)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_dynamic"])
def test_native_operands_have_fp32_tensor_scales(recipe, other_default):
    recipe = get_recipe(recipe)
    with other_default:
        x = torch.ones(32, 64, dtype=torch.bfloat16)
        operand, rho = recipe.ops.normalize(x, RMSEstimate.for_recipe(recipe), recipe, "native")
        assert (operand.tensor_scale.dtype, rho.dtype) == (torch.float32, torch.float32)
