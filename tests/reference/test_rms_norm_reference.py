"""The oracle of RMSNorm against PyTorch's own, autograd in fp64 and numbers worked out by hand."""

import pytest
import torch
import torch.nn.functional as F

from mxtrain.reference.rms_norm import rms_norm, rms_norm_backward

EPS = 1e-5


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_by_hand():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    y, rstd, total = rms_norm(x, torch.tensor([2.0, -1.0]), 0.5)
    assert total is x
    torch.testing.assert_close(rstd, torch.tensor([1 / 13**0.5, 2**0.5]))
    torch.testing.assert_close(y, torch.tensor([[6 / 13**0.5, -4 / 13**0.5], [0.0, 0.0]]))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(7,), (1, 1), (5, 96), (2, 3, 31)], ids=str)
def test_against_torch_and_autograd_in_fp64(shape, weighted):
    x = draw(*shape).requires_grad_()
    weight = draw(shape[-1], seed=1).requires_grad_() if weighted else None
    want = F.rms_norm(x, shape[-1:], weight, EPS)
    y, rstd, total = rms_norm(x, weight, EPS)
    assert total is x and rstd.dtype == y.dtype == torch.float64 and rstd.shape == shape[:-1]
    torch.testing.assert_close(y, want)
    dy, dtotal = draw(*shape, seed=2), draw(*shape, seed=3)
    leaves = [x, weight] if weighted else [x]
    wants = torch.autograd.grad(want, leaves, dy, retain_graph=True)
    with torch.no_grad():
        dx, dweight = rms_norm_backward(dy, x, rstd, weight)
        torch.testing.assert_close(dx, wants[0])
        if weighted:
            torch.testing.assert_close(dweight, wants[1])
        else:
            assert dweight is None
        assert torch.equal(rms_norm_backward(dy, x, rstd, weight, dtotal)[0], dx + dtotal)


def test_the_residual_and_its_gradient():
    x, residual = (draw(5, 96, seed=seed).requires_grad_() for seed in (0, 1))
    weight, dy, dtotal = draw(96, seed=2), draw(5, 96, seed=3), draw(5, 96, seed=4)
    y, rstd, total = rms_norm(x, weight, EPS, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, F.rms_norm(x + residual, (96,), weight, EPS))
    wants = torch.autograd.grad((y, total), (x, residual), (dy, dtotal))
    dx, _ = rms_norm_backward(dy, total.detach(), rstd.detach(), weight, dtotal)
    for want in wants:
        torch.testing.assert_close(dx, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_roundings(dtype):
    """The sum is rounded before it is normalized, y and the gradients once, after arithmetic in fp32."""
    x, residual, dy = (draw(20, 96, seed=seed, dtype=dtype) for seed in range(3))
    weight = draw(96, seed=3, dtype=torch.bfloat16)
    y, rstd, total = rms_norm(x, weight, EPS, residual)
    assert torch.equal(total, (x.float() + residual.float()).to(dtype))
    wide = total.double()
    exact = 1 / (wide.square().mean(1) + EPS).sqrt()
    assert rstd.dtype == torch.float32
    torch.testing.assert_close(rstd.double(), exact, rtol=1e-6, atol=0)
    unit = torch.finfo(dtype).eps / 2
    want = wide * exact[:, None] * weight.double()
    assert y.dtype == dtype and ((y.double() - want).abs() <= want.abs() * (unit + 1e-6)).all()
    dx, dweight = rms_norm_backward(dy, total, rstd, weight, residual)
    wide_dx, wide_dweight = rms_norm_backward(dy.double(), wide, exact, weight.double(), residual.double())
    assert dx.dtype == dtype and dweight.dtype == torch.bfloat16
    assert ((dx.double() - wide_dx).abs() <= wide_dx.abs() * unit + 1e-5).all()
    assert ((dweight.double() - wide_dweight).abs() <= wide_dweight.abs() * 2**-8 + 1e-4).all()


@pytest.mark.parametrize("shape", [(0, 96), (2, 0, 96)], ids=str)
def test_no_rows(shape):
    x, weight = torch.empty(shape), torch.ones(96)
    y, rstd, total = rms_norm(x, weight, EPS, x)
    assert y.shape == total.shape == shape and rstd.shape == shape[:-1]
    dx, dweight = rms_norm_backward(x, x, rstd, weight)
    assert dx.shape == shape and torch.equal(dweight, torch.zeros(96))


def test_a_zero_row_stays_finite():
    x, weight = torch.zeros(2, 96), torch.ones(96)
    y, rstd, _ = rms_norm(x, weight, EPS)
    assert torch.equal(y, x)
    torch.testing.assert_close(rstd, torch.full((2,), EPS**-0.5))
    dx, dweight = rms_norm_backward(torch.ones(2, 96), x, rstd, weight)
    torch.testing.assert_close(dx, torch.full((2, 96), EPS**-0.5))
    assert torch.equal(dweight, torch.zeros(96))
