"""Shared by tests of the kernels of RMSNorm and LayerNorm: inputs, and checks of results against fp64."""

import pytest
import torch

from mxtrain.launch.launch import Launch
from mxtrain.norms.kernels import Plan, launch_backward, launch_forward
from tests.support.kernel_checks import assert_close, assert_is_sum, careful_call, draw

EPS = 1e-5
# The last is too long for registers.
WIDTHS = [1, 2, 3, 31, 32, 257, 1000, 4096, 16400]
SUM_ERROR = 2.0**-20
# Largest error of a mean: a rounding of the mean, and of the sum of distances from it.
MEAN_ERROR = 2.0**-23
NORMS = pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])


def rows_of_every_size(rows, columns, dtype=torch.float32, seed=0):
    """Rows between 1/8 and 8 in magnitude."""
    return draw(rows, columns, seed=seed, dtype=dtype) * 2.0 ** (torch.arange(rows) % 7 - 3)[:, None].to(dtype)


def shifted_rows(rows, columns, dtype=torch.float32, seed=0):
    """The same, with means up to 24 times as large."""
    x = rows_of_every_size(rows, columns, seed=seed)
    return (x + (torch.arange(rows) % 5 - 1)[:, None] * 3.0 * 2.0 ** (torch.arange(rows) % 7 - 3)[:, None]).to(dtype)


def statistics(total, centered, eps=EPS):
    """(mean or None, rstd) [T] in fp64."""
    total = total.double()
    mean = total.mean(1) if centered else None
    square = total.var(1, correction=0) if centered else total.square().mean(1)
    return mean, 1 / (square + eps).sqrt()


def forward_inputs(centered, rows, columns, dtype=torch.float32, weight=None, bias=None, residual=None, seed=0):
    """(x, weight, bias, residual); the last three are dtypes, and None leaves the tensor out."""
    return (
        (shifted_rows if centered else rows_of_every_size)(rows, columns, dtype, seed),
        None if weight is None else draw(columns, seed=seed + 1, dtype=weight),
        None if bias is None else draw(columns, seed=seed + 2, dtype=bias),
        None if residual is None else rows_of_every_size(rows, columns, residual, seed + 3),
    )


def backward_inputs(centered, rows, columns, dtype=torch.float32, weight=None, dtotal=None, dy=None, seed=0):
    """(dy, x, mean or None, rstd, weight, dtotal). dy has a component along x, and for LayerNorm a mean.

    Without them errors in the means hardly show.
    """
    x, weight, _, dtotal = forward_inputs(centered, rows, columns, dtype, weight, None, dtotal, seed)
    mean, rstd = (None if each is None else each.float() for each in statistics(x, centered))
    xhat = (x.float() - mean[:, None] if centered else x.float()) * rstd[:, None]
    given = draw(rows, columns, seed=seed + 4) + 0.7 * xhat + 0.6 * centered
    return given.to(dy or dtype), x, mean, rstd, weight, dtotal


def assert_near(got, want, error):
    """Every element is within ``error`` of ``want`` (fp64), apart from the rounding to the dtype of ``got``."""
    if got.dtype == torch.float16:
        error = error * 1.01 + want.abs() * 2.0**-11 + 2.0**-25
    elif got.dtype == torch.float32:
        error = error + want.abs() * 2.0**-24
    assert_close(got, want, error)


def assert_is_norm(results, centered, x, weight, bias, residual, eps=EPS):
    """``results`` as the public function returns them. Allow a few fp32 roundings of y and of the mean."""
    y, mean, rstd, total = results
    if residual is None:
        assert total is x
    else:
        assert_is_sum(total, x, residual)
    want_mean, want_rstd = statistics(total, centered, eps)
    distances, mean_error = total.double(), torch.zeros(len(x), dtype=torch.float64)
    if centered:
        distances = distances - want_mean[:, None]
        mean_error = want_mean.abs() * MEAN_ERROR + distances.abs().mean(1) * MEAN_ERROR
        assert mean.dtype == torch.float32 and mean.shape == x.shape[:1]
        assert_near(mean, want_mean, mean_error)
    else:
        assert mean is None
    assert rstd.dtype == torch.float32 and rstd.shape == x.shape[:1]
    assert_near(rstd, want_rstd, want_rstd * SUM_ERROR)
    want = distances * want_rstd[:, None]
    error = want.abs() * SUM_ERROR + (mean_error * want_rstd)[:, None]
    if weight is not None:
        want, error = want * weight.double(), error * weight.double().abs()
    if bias is not None:
        want = want + bias.double()
        error = error + want.abs() * SUM_ERROR
    assert y.dtype == x.dtype
    assert_near(y, want, error)


def autograd_in_fp64(centered, dy, x, weight, dtotal, eps=EPS):
    """(dx, dweight, dbias) of the plain formula; without a weight, dweight of a weight of ones."""
    columns = x.shape[1]
    weight = torch.ones(columns) if weight is None else weight
    leaves = [each.detach().double().requires_grad_() for each in (x, weight, torch.zeros(columns))]
    distances = leaves[0] - leaves[0].mean(1, keepdim=True) if centered else leaves[0]
    y = distances * (distances.square().mean(1, keepdim=True) + eps).rsqrt() * leaves[1] + leaves[2]
    dx, dweight, dbias = torch.autograd.grad(y, leaves, dy.double())
    return dx if dtotal is None else dx + dtotal.double(), dweight, dbias


def assert_is_backward(results, dy, x, mean, rstd, weight, dtotal, dweight=None, dbias=None):
    """Allow a few fp32 roundings of each term, of the sums and of the mean. The last two are dtypes or None."""
    wants = autograd_in_fp64(mean is not None, dy, x, weight, dtotal)
    wide_rstd, h = rstd.double()[:, None], dy.double().abs()
    if weight is not None:
        h = h * weight.double().abs()
    if mean is None:
        xhat, terms = (x.double() * wide_rstd).abs(), h
    else:
        # The rounding of the mean changes xhat, which is a term of dx and of the sums.
        rounding = (mean.abs() * MEAN_ERROR * rstd).double()[:, None] / SUM_ERROR
        xhat = ((x.double() - mean.double()[:, None]) * wide_rstd).abs() + rounding
        terms = h + h.mean(1, keepdim=True)
    terms = (terms + xhat * (h * xhat).mean(1, keepdim=True)) * wide_rstd
    if dtotal is not None:
        terms = terms + dtotal.double().abs()
    sums = [(dy.double().abs() * xhat).sum(0), dy.double().abs().sum(0)]
    assert results[0].dtype == x.dtype
    assert_near(results[0], wants[0], terms * SUM_ERROR)
    for got, want, dtype, error in zip(results[1:], wants[1:], (dweight, dbias), sums, strict=True):
        if dtype is None:
            assert got is None
        else:
            assert got.dtype == dtype
            assert_near(got, want, error * SUM_ERROR)


def forward_by_plan(plan: Plan, centered, x, weight=None, bias=None, residual=None, eps=EPS):
    """(y, mean, rstd, total) by a plan; no input changes."""
    y, rstd, *others = _launched(launch_forward, (x, residual, weight, bias, eps, centered), plan)
    mean = others.pop(0) if centered else None
    return y, mean, rstd, others[0] if others else x


def backward_by_plan(plan: Plan, arguments, dweight=torch.float32, dbias=None):
    """(dx, dweight or None, dbias or None) by a plan; no input changes."""
    dx, *sums = _launched(launch_backward, (*arguments, dweight, dbias), plan)
    found = iter(sums)
    return dx, *(None if dtype is None else next(found) for dtype in (dweight, dbias))


def _launched(function, arguments, plan):
    with careful_call(*(each for each in arguments if isinstance(each, torch.Tensor))):
        results, launches = function(*arguments, plan)
        for launch in (launches,) if isinstance(launches, Launch) else launches:
            launch.run(results[0].device)
    return results


def pairs_of_dtypes(dtypes):
    """(dtype, weight dtype or None, other dtype or None): every pair of values of any two of them."""
    optional = [None, *dtypes]
    return [(dtypes[(i + j) % 3], optional[i], optional[j]) for i in range(4) for j in range(4)]
