"""The oracle of the router's product against PyTorch's own operations in fp64 and numbers worked out by hand."""

import pytest
import torch

from mxtrain.nn.decompose_k.reference import EPILOGUES, decompose_k_mm, finish

AFTER = {
    None: lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: torch.softmax(x, 1),
}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_by_hand():
    a, b = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    assert torch.equal(decompose_k_mm(a, b), torch.tensor([[-2.0, -1.0]]))
    assert torch.equal(decompose_k_mm(a, b, torch.tensor([3.0, 0.5]), "relu"), torch.tensor([[1.0, 0.0]]))


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_in_fp64(epilogue):
    for m, k, n in ((5, 30, 4), (0, 5, 4), (3, 5, 0), (3, 0, 4)):
        a, b = draw(m, k), draw(n, k, seed=1).t()
        for bias in (draw(n, seed=2), None):
            got = decompose_k_mm(a, b, bias, epilogue)
            assert got.dtype == torch.float64
            torch.testing.assert_close(got, AFTER[epilogue](a @ b + (0 if bias is None else bias)))


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_it_is_rounded_once(dtype, out_dtype):
    a, b, bias = draw(5, 300, dtype=dtype), draw(300, 4, seed=1, dtype=dtype), draw(4, seed=2, dtype=torch.float32)
    got = decompose_k_mm(a, b, bias, "sigmoid", out_dtype)
    want = torch.sigmoid(a.double() @ b.double() + bias.double())
    assert got.dtype == (out_dtype or dtype)
    unit = torch.finfo(got.dtype).eps / 2
    assert ((got.double() - want).abs() <= want.abs() * unit + 1e-5).all()


def test_bf16_sums_are_not_rounded():
    """256 + 1 is 256 in bf16."""
    a, b = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16), torch.ones(2, 1, dtype=torch.bfloat16)
    assert decompose_k_mm(a, b, torch.tensor([-255.0])).item() == 2


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_it_can_be_differentiated(epilogue):
    a, b, bias = draw(3, 8).requires_grad_(), draw(8, 4, seed=1).requires_grad_(), draw(4, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda *inputs: decompose_k_mm(*inputs, epilogue), (a, b, bias))


def test_finish():
    total, bias = draw(5, 4, dtype=torch.float32), draw(4, seed=1, dtype=torch.bfloat16)
    got = finish(total, bias, "relu", torch.bfloat16)
    assert torch.equal(got, torch.relu(total + bias.float()).bfloat16())
    assert finish(total, None, None, torch.float32) is total
