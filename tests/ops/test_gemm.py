import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mxtrain.ops.gemm import matmul
from mxtrain.ops.nvfp4_operands import activation, weight
from mxtrain.ops.quantize import Operand, quantize
from mxtrain.recipes.parse import get_recipe

pytestmark = pytest.mark.usefixtures("device")

MXFP8, NVFP4 = get_recipe("mxfp8"), get_recipe("nvfp4")


def draw(*shape, seed=0):
    x = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return x.to(torch.get_default_device())


@pytest.mark.parametrize("mode", ["reference", "emulated"])
@pytest.mark.parametrize(("m", "n", "k"), [(32, 64, 96), (1, 32, 32), (40, 32, 64)])
def test_product_of_the_dequantized_values(mode, m, n, k):
    a, b = quantize(draw(m, k), MXFP8, mode), quantize(draw(n, k, seed=1), MXFP8, mode)
    exact = a.data.double() @ b.data.double().t()
    out = matmul(a, b, torch.float32)
    tolerance = {"reference": 1e-6, "emulated": 2**-8}[mode]
    assert (out.double() - exact).norm() <= tolerance * exact.norm()


def test_modes_multiply_the_same_values():
    x, w = draw(64, 128), draw(32, 128, seed=1)
    reference, emulated = (quantize(x, MXFP8, mode).data.float() for mode in ("reference", "emulated"))
    assert torch.equal(reference, emulated)
    error = (quantize(x, MXFP8, "reference").data @ quantize(w, MXFP8, "reference").data.t() - x @ w.t()).norm()
    assert 0.01 < error / (x @ w.t()).norm() < 0.06, "the error of MXFP8, neither absent nor large"


def test_autocast_does_not_touch_the_reference_product():
    a, b = quantize(draw(64, 128), MXFP8, "reference"), quantize(draw(32, 128, seed=1), MXFP8, "reference")
    expected = matmul(a, b, torch.float32)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        assert torch.equal(matmul(a, b, torch.float32), expected)


OPERANDS = {
    "mxfp8": lambda: (quantize(draw(70, 64), MXFP8, "native"), quantize(draw(96, 64, seed=1), MXFP8, "native")),
    "nvfp4": lambda: (activation(draw(70, 48), "native"), weight(draw(96, 48, seed=1), NVFP4, "native", 1)),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_native_operands_fit_pytorchs_scaled_mm(name):
    """PyTorch's own shape and dtype checks of ``scaled_mm``, run without a GPU on fake tensors."""
    operands = OPERANDS[name]()
    with FakeTensorMode() as fake:
        a, b = (Operand(*(None if t is None else fake.from_tensor(t) for t in operand)) for operand in operands)
        out = matmul(a, b, torch.bfloat16)
    assert out.shape == (70, 96) and out.dtype == torch.bfloat16
