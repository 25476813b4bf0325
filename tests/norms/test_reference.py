"""The oracle of RMSNorm and LayerNorm against PyTorch's own, autograd in fp64 and numbers worked out by hand."""

import pytest
import torch
import torch.nn.functional as F

from mxtrain.norms.reference import row_norm, row_norm_backward

EPS = 1e-5
FP64 = torch.float64
NORMS = pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])


def draw(*shape, seed=0, dtype=FP64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype)


def test_rms_norm_by_hand():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    y, mean, rstd, total = row_norm(x, torch.tensor([2.0, -1.0]), None, 0.5, None, False)
    assert total is x and mean is None
    torch.testing.assert_close(rstd, torch.tensor([1 / 13**0.5, 2**0.5]))
    torch.testing.assert_close(y, torch.tensor([[6 / 13**0.5, -4 / 13**0.5], [0.0, 0.0]]))


def test_layer_norm_by_hand():
    x = torch.tensor([[2.0, 4.0, 9.0], [7.0, 7.0, 7.0]])
    weight, bias = torch.tensor([2.0, -1.0, 1.0]), torch.tensor([0.5, 0.0, -3.0])
    y, mean, rstd, total = row_norm(x, weight, bias, 1 / 3, None, True)
    assert total is x and mean.tolist() == [5.0, 7.0]
    torch.testing.assert_close(rstd, torch.tensor([1 / 3, 3**0.5]))
    torch.testing.assert_close(y, torch.tensor([[-1.5, 1 / 3, -5 / 3], [0.5, 0.0, -3.0]]))


@NORMS
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("vectors", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("shape", [(7,), (2, 3, 31)], ids=str)
def test_against_torch_and_autograd_in_fp64(shape, vectors, residual, centered):
    x = draw(*shape).requires_grad_()
    other = draw(*shape, seed=1).requires_grad_() if residual else None
    weight, bias = (draw(shape[-1], seed=2 + i).requires_grad_() if given else None for i, given in enumerate(vectors))
    summed = x if other is None else x + other
    if centered:
        want = F.layer_norm(summed, shape[-1:], weight, bias, EPS)
    else:
        want = F.rms_norm(summed, shape[-1:], weight, EPS) + (0 if bias is None else bias)
    y, mean, rstd, total = row_norm(x, weight, bias, EPS, other, centered)
    assert rstd.dtype == y.dtype == FP64 and rstd.shape == shape[:-1] and (total is x) == (not residual)
    assert mean is None if not centered else mean.dtype == FP64 and mean.shape == shape[:-1]
    torch.testing.assert_close(y, want)
    dy, dtotal = draw(*shape, seed=4), draw(*shape, seed=5)
    leaves = [each for each in (x, other, weight, bias) if each is not None]
    dx, *others = torch.autograd.grad(want, leaves, dy)
    with torch.no_grad():
        dtypes = [FP64 if given else None for given in vectors]
        got = row_norm_backward(dy, total, mean, rstd, weight, dtotal, *dtypes)
        without_dtotal, *_ = row_norm_backward(dy, total, mean, rstd, weight, None, *dtypes)
    assert [each is not None for each in got[1:]] == list(vectors)
    torch.testing.assert_close([each for each in got[1:] if each is not None], others[residual:])
    torch.testing.assert_close(got[0], dx + dtotal)
    assert torch.equal(got[0], without_dtotal + dtotal)


@NORMS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_roundings(dtype, centered):
    """The sum is rounded before it is normalized, y and the gradients once, after arithmetic in fp32."""
    x, residual, dy = (draw(20, 96, seed=seed, dtype=dtype) for seed in range(3))
    weight, bias = draw(96, seed=3, dtype=torch.bfloat16), draw(96, seed=4, dtype=torch.float16)
    y, mean, rstd, total = row_norm(x, weight, bias, EPS, residual, centered)
    assert torch.equal(total, (x.float() + residual.float()).to(dtype)) and rstd.dtype == torch.float32
    want, wide_mean, wide_rstd, _ = row_norm(total.double(), weight.double(), bias.double(), EPS, None, centered)
    torch.testing.assert_close(rstd.double(), wide_rstd, rtol=1e-6, atol=0)
    unit = torch.finfo(dtype).eps / 2
    assert y.dtype == dtype and ((y.double() - want).abs() <= want.abs() * unit + 2e-6).all()
    got = row_norm_backward(dy, total, mean, rstd, weight, residual, torch.bfloat16, torch.float16)
    wide = (dy, total, wide_mean, wide_rstd, weight, residual)
    wants = row_norm_backward(*(None if each is None else each.double() for each in wide), FP64, FP64)
    assert [each.dtype for each in got] == [dtype, torch.bfloat16, torch.float16]
    for one, other, rounding, error in zip(got, wants, (unit, 2**-8, 2**-11), (1e-5, 1e-4, 1e-4)):
        assert ((one.double() - other).abs() <= other.abs() * rounding + error).all()


def test_a_row_of_equal_numbers_and_a_large_mean():
    x = torch.full((3, 96), 1000.1)
    x[1] += draw(96, dtype=torch.float32)
    x[2] = draw(96, dtype=torch.float32) - 3e4
    y, mean, rstd, _ = row_norm(x, None, None, 1e-8, None, True)
    assert not y[0].any() and torch.equal(mean[0], x[0, 0])
    torch.testing.assert_close(rstd.double(), 1 / (x.double().var(1, correction=0) + 1e-8).sqrt(), rtol=1e-6, atol=0)


@NORMS
def test_no_rows(centered):
    x, weight = torch.empty(2, 0, 96), torch.ones(96)
    y, mean, rstd, total = row_norm(x, weight, weight, EPS, x, centered)
    assert y.shape == total.shape == (2, 0, 96) and rstd.shape == (2, 0)
    dx, dweight, dbias = row_norm_backward(x, x, mean, rstd, weight, None, torch.float32, torch.float32)
    assert dx.shape == (2, 0, 96) and not dweight.any() and not dbias.any()


def test_a_zero_row_stays_finite():
    x, weight = torch.zeros(2, 96), torch.ones(96)
    y, _, rstd, _ = row_norm(x, weight, None, EPS, None, False)
    assert torch.equal(y, x)
    torch.testing.assert_close(rstd, torch.full((2,), EPS**-0.5))
    dx, dweight, _ = row_norm_backward(torch.ones(2, 96), x, None, rstd, weight, None, torch.float32)
    torch.testing.assert_close(dx, torch.full((2, 96), EPS**-0.5))
    assert torch.equal(dweight, torch.zeros(96))
