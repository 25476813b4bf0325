"""The oracle of LayerNorm against PyTorch's own, autograd in fp64 and numbers worked out by hand."""

import pytest
import torch
import torch.nn.functional as F

from mxtrain.reference.layer_norm import layer_norm, layer_norm_backward

EPS = 1e-5
FP64 = torch.float64


def draw(*shape, seed=0, dtype=FP64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype)


def test_by_hand():
    x = torch.tensor([[2.0, 4.0, 9.0], [7.0, 7.0, 7.0]])
    weight, bias = torch.tensor([2.0, -1.0, 1.0]), torch.tensor([0.5, 0.0, -3.0])
    y, mean, rstd, total = layer_norm(x, weight, bias, 1 / 3)
    assert total is x and mean.tolist() == [5.0, 7.0]
    torch.testing.assert_close(rstd, torch.tensor([1 / 3, 3**0.5]))
    torch.testing.assert_close(y, torch.tensor([[-1.5, 1 / 3, -5 / 3], [0.5, 0.0, -3.0]]))


@pytest.mark.parametrize("vectors", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_against_torch_and_autograd_in_fp64(vectors):
    shape = (2, 3, 31)
    x, residual = draw(*shape).requires_grad_(), draw(*shape, seed=1).requires_grad_()
    weight, bias = (draw(31, seed=2 + i).requires_grad_() if given else None for i, given in enumerate(vectors))
    want = F.layer_norm(x + residual, (31,), weight, bias, EPS)
    y, mean, rstd, total = layer_norm(x, weight, bias, EPS, residual)
    assert rstd.dtype == mean.dtype == FP64 and rstd.shape == mean.shape == shape[:-1]
    torch.testing.assert_close(y, want)
    dy, dtotal = draw(*shape, seed=4), draw(*shape, seed=5)
    leaves = [each for each in (x, weight, bias) if each is not None]
    wants = torch.autograd.grad(want, leaves, dy)
    with torch.no_grad():
        dtypes = [FP64 if given else None for given in vectors]
        got = layer_norm_backward(dy, total, mean, rstd, weight, dtotal, *dtypes)
    assert [each is not None for each in got[1:]] == list(vectors)
    torch.testing.assert_close(got[0], wants[0] + dtotal)
    torch.testing.assert_close([each for each in got[1:] if each is not None], list(wants[1:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_roundings(dtype):
    """The sum is rounded before it is normalized, y and the gradients once, after arithmetic in fp32."""
    x, residual, dy = (draw(20, 96, seed=seed, dtype=dtype) for seed in range(3))
    weight, bias = draw(96, seed=3, dtype=torch.bfloat16), draw(96, seed=4, dtype=torch.float16)
    y, mean, rstd, total = layer_norm(x, weight, bias, EPS, residual)
    assert torch.equal(total, (x.float() + residual.float()).to(dtype)) and mean.dtype == rstd.dtype == torch.float32
    want, wide_mean, wide_rstd, _ = layer_norm(total.double(), weight.double(), bias.double(), EPS)
    unit = torch.finfo(dtype).eps / 2
    assert y.dtype == dtype and ((y.double() - want).abs() <= want.abs() * unit + 2e-6).all()
    got = layer_norm_backward(dy, total, mean, rstd, weight, residual, torch.bfloat16, torch.float16)
    wide = (each.double() for each in (dy, total, wide_mean, wide_rstd, weight, residual))
    wants = layer_norm_backward(*wide, FP64, FP64)
    assert [each.dtype for each in got] == [dtype, torch.bfloat16, torch.float16]
    for one, other, rounding in zip(got, wants, (unit, 2**-8, 2**-11)):
        assert ((one.double() - other).abs() <= other.abs() * rounding + 1e-4).all()


def test_a_row_of_equal_numbers_and_a_large_mean():
    x = torch.full((3, 96), 1000.1)
    x[1] += draw(96, dtype=torch.float32)
    x[2] = draw(96, dtype=torch.float32) - 3e4
    y, mean, rstd, _ = layer_norm(x, None, None, 1e-8)
    assert not y[0].any() and torch.equal(mean[0], x[0, 0])
    torch.testing.assert_close(rstd.double(), 1 / (x.double().var(1, correction=0) + 1e-8).sqrt(), rtol=1e-6, atol=0)


def test_no_rows():
    x, weight = torch.empty(2, 0, 96), torch.ones(96)
    y, mean, rstd, total = layer_norm(x, weight, weight, EPS, x)
    assert y.shape == total.shape == (2, 0, 96) and mean.shape == rstd.shape == (2, 0)
    dx, dweight, dbias = layer_norm_backward(x, x, mean, rstd, weight, None, torch.float32, torch.float32)
    assert dx.shape == (2, 0, 96) and not dweight.any() and not dbias.any()
