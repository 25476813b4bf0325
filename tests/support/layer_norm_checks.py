"""Shared by tests of the LayerNorm kernels: inputs, and checks of results against fp64."""

import torch

from tests.support.kernel_checks import assert_is_sum, draw
from tests.support.rms_norm_checks import SUM_ERROR, assert_near, rows_of_every_size

EPS = 1e-5
# Largest error of a mean: a rounding of the mean, and of the sum of distances from it.
MEAN_ERROR = 2.0**-23


def statistics(total, eps=EPS):
    """(mean, rstd) [T] in fp64."""
    total = total.double()
    return total.mean(1), 1 / (total.var(1, correction=0) + eps).sqrt()


def shifted_rows(rows, columns, dtype=torch.float32, seed=0):
    """Rows between 1/8 and 8 in magnitude, with means up to 24 times as large."""
    x = rows_of_every_size(rows, columns, seed=seed)
    return (x + (torch.arange(rows) % 5 - 1)[:, None] * 3.0 * 2.0 ** (torch.arange(rows) % 7 - 3)[:, None]).to(dtype)


def forward_inputs(rows, columns, dtype=torch.float32, weight=None, bias=None, residual=None, seed=0):
    """(x, weight, bias, residual); the last three are dtypes, and None leaves the tensor out."""
    return (
        shifted_rows(rows, columns, dtype, seed),
        None if weight is None else draw(columns, seed=seed + 1, dtype=weight),
        None if bias is None else draw(columns, seed=seed + 2, dtype=bias),
        None if residual is None else rows_of_every_size(rows, columns, residual, seed + 3),
    )


def assert_is_layer_norm(results, x, weight, bias, residual, eps=EPS):
    """``results`` as the public function returns them. Allow a few fp32 roundings of y and of the mean."""
    y, mean, rstd, total = results
    if residual is None:
        assert total is x
    else:
        assert_is_sum(total, x, residual)
    want_mean, want_rstd = statistics(total, eps)
    distances = total.double() - want_mean[:, None]
    mean_error = want_mean.abs() * MEAN_ERROR + distances.abs().mean(1) * MEAN_ERROR
    assert mean.dtype == rstd.dtype == torch.float32 and mean.shape == rstd.shape == x.shape[:1]
    assert_near(mean, want_mean, mean_error)
    assert_near(rstd, want_rstd, want_rstd * SUM_ERROR)
    want = distances * want_rstd[:, None]
    error = want.abs() * SUM_ERROR + (mean_error * want_rstd)[:, None]
    if weight is not None:
        want, error = want * weight.double(), error * weight.double().abs()
    if bias is not None:
        want = want + bias.double()
    assert y.dtype == x.dtype
    assert_near(y, want, error + want.abs() * SUM_ERROR)


def backward_inputs(rows, columns, dtype=torch.float32, weight=None, dtotal=None, dy=None, seed=0):
    """(dy, x, mean, rstd, weight, dtotal). dy has a mean and a component along x, so that errors in both show."""
    x, weight, _, dtotal = forward_inputs(rows, columns, dtype, weight, None, dtotal, seed)
    mean, rstd = (each.float() for each in statistics(x))
    along = (x.float() - mean[:, None]) * rstd[:, None]
    return (draw(rows, columns, seed=seed + 4) + 0.7 * along + 0.6).to(dy or dtype), x, mean, rstd, weight, dtotal


def autograd_in_fp64(dy, x, weight, dtotal, eps=EPS):
    """(dx, dweight, dbias) of the plain formula; without a weight, dweight of a weight of ones."""
    columns = x.shape[1]
    weight = torch.ones(columns) if weight is None else weight
    leaves = [each.detach().double().requires_grad_() for each in (x, weight, torch.zeros(columns))]
    centered = leaves[0] - leaves[0].mean(1, keepdim=True)
    y = centered * (centered.square().mean(1, keepdim=True) + eps).rsqrt() * leaves[1] + leaves[2]
    dx, dweight, dbias = torch.autograd.grad(y, leaves, dy.double())
    return dx if dtotal is None else dx + dtotal.double(), dweight, dbias


def assert_is_backward(results, dy, x, mean, rstd, weight, dtotal, dweight=None, dbias=None):
    """Allow a few fp32 roundings of each term, of the sums and of the mean. The last two are dtypes or None."""
    wants = autograd_in_fp64(dy, x, weight, dtotal)
    rounded_mean = (mean.abs() * MEAN_ERROR * rstd).double()[:, None]
    xhat = ((x.double() - mean.double()[:, None]) * rstd.double()[:, None]).abs()
    h = dy.double().abs() if weight is None else (dy.double() * weight.double()).abs()
    # The rounding of the mean changes xhat, which is a term of dx and of the sums.
    projection = (h * (xhat + rounded_mean / SUM_ERROR)).mean(1, keepdim=True)
    terms = (h + h.mean(1, keepdim=True) + (xhat + rounded_mean / SUM_ERROR) * projection) * rstd.double()[:, None]
    if dtotal is not None:
        terms = terms + dtotal.double().abs()
    sums = [(dy.double().abs() * (xhat + rounded_mean / SUM_ERROR)).sum(0), dy.double().abs().sum(0)]
    assert results[0].dtype == x.dtype
    assert_near(results[0], wants[0], terms * SUM_ERROR)
    for got, want, dtype, error in zip(results[1:], wants[1:], (dweight, dbias), sums, strict=True):
        if dtype is None:
            assert got is None
        else:
            assert got.dtype == dtype
            assert_near(got, want, error * SUM_ERROR)
