"""The oracle of Decompose-K against PyTorch's own operations in fp64 and numbers worked out by hand."""

import pytest
import torch

from mxtrain.reference.decompose_k import EPILOGUES, decompose_k_mm, finish

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
    for splits in (1, 2, 3, 4):
        assert torch.equal(decompose_k_mm(a, b, splits=splits), torch.tensor([[-2.0, -1.0]]))
        got = decompose_k_mm(a, b, torch.tensor([3.0, 0.5]), "relu", splits=splits)
        assert torch.equal(got, torch.tensor([[1.0, 0.0]]))


@pytest.mark.parametrize("splits", [1, 2, 7, 64])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_in_fp64(epilogue, biased, splits):
    a, b, bias = draw(5, 30), draw(30, 4, seed=1), draw(4, seed=2) if biased else None
    want = AFTER[epilogue](a @ b + (bias if biased else 0))
    got = decompose_k_mm(a, b, bias, epilogue, splits=splits)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_it_is_rounded_once(dtype, out_dtype):
    a, b, bias = draw(5, 300, dtype=dtype), draw(300, 4, seed=1, dtype=dtype), draw(4, seed=2, dtype=torch.float32)
    got = decompose_k_mm(a, b, bias, "sigmoid", out_dtype, splits=8)
    want = torch.sigmoid(a.double() @ b.double() + bias.double())
    assert got.dtype == (out_dtype or dtype)
    unit = torch.finfo(got.dtype).eps / 2
    assert ((got.double() - want).abs() <= want.abs() * unit + 1e-5).all()


def test_bf16_parts_are_not_rounded():
    """256 + 1 - 256 in bf16 would be 0."""
    a, b = torch.tensor([[256.0, 1.0, -256.0]], dtype=torch.bfloat16), torch.ones(3, 1, dtype=torch.bfloat16)
    for splits in (1, 3):
        assert decompose_k_mm(a, b, splits=splits).item() == 1
    bias = torch.tensor([-255.0])
    assert decompose_k_mm(a[:, :2], b[:2], bias, splits=2).item() == 2


@pytest.mark.parametrize("shape", [(0, 5, 4), (3, 5, 0), (3, 0, 4), (3, 1, 4)], ids=str)
@pytest.mark.parametrize("splits", [1, 8])
def test_nothing_to_sum_and_fewer_than_the_splits(shape, splits):
    m, k, n = shape
    a, b, bias = draw(m, k), draw(k, n, seed=1), draw(n, seed=2)
    torch.testing.assert_close(decompose_k_mm(a, b, bias, "relu", splits=splits), torch.relu(a @ b + bias))


def test_transposed_views():
    a, b = draw(30, 5).t(), draw(4, 30, seed=1).t()
    torch.testing.assert_close(decompose_k_mm(a, b, splits=4), a @ b)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_it_can_be_differentiated(epilogue):
    a, b, bias = draw(3, 8).requires_grad_(), draw(8, 4, seed=1).requires_grad_(), draw(4, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda *inputs: decompose_k_mm(*inputs, epilogue, splits=2), (a, b, bias))


def test_the_end_alone():
    total, bias = draw(5, 4, dtype=torch.float32), draw(4, seed=1, dtype=torch.bfloat16)
    got = finish(total, bias, "relu", torch.bfloat16)
    assert torch.equal(got, torch.relu(total + bias.float()).bfloat16())
    assert finish(total, None, None, torch.float32) is total


def test_unknown_epilogue():
    with pytest.raises(ValueError, match="epilogue 'gelu': expected one of"):
        decompose_k_mm(draw(2, 3), draw(3, 2), None, "gelu")
