import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mxtrain.ops.gemm import Operand, matmul
from mxtrain.ops.quantize import activation, weight
from mxtrain.recipes.parse import get_recipe

pytestmark = pytest.mark.usefixtures("device")

MXFP8, NVFP4 = get_recipe("mxfp8"), get_recipe("nvfp4")


def draw(*shape, seed=0):
    x = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return x.to(torch.get_default_device())


def operands(m, n, k, recipe=MXFP8, mode="reference"):
    return activation(draw(m, k), recipe, mode), weight(draw(n, k, seed=1), recipe, mode, 1, None)


@pytest.mark.parametrize("mode", ["reference", "emulated"])
@pytest.mark.parametrize(("out_dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_product_of_the_dequantized_values(mode, out_dtype, tolerance):
    for m, n, k in ((32, 64, 96), (1, 32, 32)):
        a, b = operands(m, n, k, mode=mode)
        exact = a.data.double() @ b.data.double().t()
        out = matmul(a, b, out_dtype)
        assert out.dtype == out_dtype and (out.double() - exact).norm() <= tolerance * exact.norm()


def test_the_error_is_mxfp8s():
    exact = draw(64, 128) @ draw(32, 128, seed=1).t()
    error = (matmul(*operands(64, 32, 128), torch.float32) - exact).norm() / exact.norm()
    assert 0.01 < error < 0.06


def test_autocast_does_not_touch_the_reference_product():
    a, b = operands(64, 32, 128)
    expected = matmul(a, b, torch.float32)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        assert torch.equal(matmul(a, b, torch.float32), expected)


@pytest.mark.parametrize(("recipe", "k"), [(MXFP8, 64), (NVFP4, 48)], ids=["mxfp8", "nvfp4"])
def test_native_operands_fit_pytorchs_scaled_mm(recipe, k):
    """PyTorch's own shape and dtype checks of ``scaled_mm``, run without a GPU on fake tensors."""
    native = operands(22, 32, k, recipe, "native")
    with FakeTensorMode() as fake:
        a, b = (Operand(*(None if t is None else fake.from_tensor(t) for t in operand)) for operand in native)
        out = matmul(a, b, torch.bfloat16)
    assert out.shape == (22, 32) and out.dtype == torch.bfloat16
