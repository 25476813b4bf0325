"""Shared by tests of the RMSNorm kernels: inputs, and checks of results against fp64."""

import torch

from mxtrain.kernels.launch import Launch
from mxtrain.kernels.norm.rms_norm import rms_norm
from mxtrain.kernels.norm.rms_norm_backward import rms_norm_backward
from mxtrain.kernels.norm.rms_norm_plan import Plan
from tests.support.kernel_checks import assert_close, assert_is_sum, careful_call, draw

EPS = 1e-5
# The last is too long for registers.
WIDTHS = [1, 2, 3, 31, 32, 257, 1000, 4096, 16400]
SUM_ERROR = 2.0**-20


def rows_of_every_size(rows, columns, dtype=torch.float32, seed=0):
    """Rows between 1/8 and 8 in magnitude."""
    return draw(rows, columns, seed=seed, dtype=dtype) * 2.0 ** (torch.arange(rows) % 7 - 3)[:, None].to(dtype)


def exact_rstd(total, eps=EPS):
    return 1 / (total.double().square().mean(1) + eps).sqrt()


def forward_inputs(rows, columns, dtype=torch.float32, weight_dtype=None, residual_dtype=None, seed=0):
    """(x, weight, residual); a dtype of None leaves the tensor out."""
    weight = None if weight_dtype is None else draw(columns, seed=seed + 1, dtype=weight_dtype)
    residual = None if residual_dtype is None else rows_of_every_size(rows, columns, residual_dtype, seed + 2)
    return rows_of_every_size(rows, columns, dtype, seed), weight, residual


def backward_inputs(rows, columns, dtype=torch.float32, weight_dtype=None, dtotal_dtype=None, dy_dtype=None, seed=0):
    """(dy, x, rstd, weight, dtotal). dy has a component along x: without it errors in the mean hardly show."""
    x, weight, dtotal = forward_inputs(rows, columns, dtype, weight_dtype, dtotal_dtype, seed)
    rstd = exact_rstd(x).float()
    dy = draw(rows, columns, seed=seed + 3) + 0.7 * x.float() * rstd[:, None]
    return dy.to(dy_dtype or dtype), x, rstd, weight, dtotal


def assert_near(got, want, error):
    """Every element is within ``error`` of ``want`` (fp64), apart from the rounding to the dtype of ``got``."""
    if got.dtype == torch.float16:
        error = error * 1.01 + want.abs() * 2.0**-11 + 2.0**-25
    elif got.dtype == torch.float32:
        error = error + want.abs() * 2.0**-24
    assert_close(got, want, error)


def assert_is_rms_norm(results, x, weight, residual, eps=EPS):
    y, rstd, total = results
    if residual is None:
        assert total is x
    else:
        assert_is_sum(total, x, residual)
    wide = total.double()
    want_rstd = exact_rstd(total, eps)
    assert rstd.dtype == torch.float32 and rstd.shape == x.shape[:1]
    assert_near(rstd, want_rstd, want_rstd * SUM_ERROR)
    want = wide * want_rstd[:, None]
    if weight is not None:
        want = want * weight.double()
    assert y.dtype == x.dtype
    assert_near(y, want, want.abs() * SUM_ERROR)


def check_forward(x, weight=None, residual=None, eps=EPS):
    with careful_call(x, weight, residual):
        results = rms_norm(x, weight, eps, residual)
    assert_is_rms_norm(results, x, weight, residual, eps)


def autograd_in_fp64(dy, x, weight, dtotal, eps=EPS):
    """(dx, dweight) of the plain formula; without a weight, dweight of a weight of ones."""
    leaves = [x.double(), torch.ones(x.shape[1], dtype=torch.float64) if weight is None else weight.double()]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    y = leaves[0] * (leaves[0].square().mean(1, keepdim=True) + eps).rsqrt() * leaves[1]
    dx, dweight = torch.autograd.grad(y, leaves, dy.double())
    return dx if dtotal is None else dx + dtotal.double(), dweight


def assert_is_backward(results, dy, x, rstd, weight, dtotal, needs_dweight=True):
    """Allows a few fp32 roundings of each term and of the sums. rstd must be computed from x and EPS."""
    dx, dweight = results
    want_dx, want_dweight = autograd_in_fp64(dy, x, weight, dtotal)
    xhat = (x.double() * rstd.double()[:, None]).abs()
    h = dy.double().abs() if weight is None else (dy.double() * weight.double()).abs()
    terms = (h + xhat * (h * xhat).mean(1, keepdim=True)) * rstd.double()[:, None]
    if dtotal is not None:
        terms = terms + dtotal.double().abs()
    assert dx.dtype == x.dtype
    assert_near(dx, want_dx, terms * SUM_ERROR)
    if weight is None or not needs_dweight:
        assert dweight is None
    else:
        assert dweight.dtype == weight.dtype
        assert_near(dweight, want_dweight, (dy.double().abs() * xhat).sum(0) * SUM_ERROR)


def check_backward(dy, x, rstd, weight=None, dtotal=None, needs_dweight=True):
    with careful_call(dy, x, rstd, weight, dtotal):
        results = rms_norm_backward(dy, x, rstd, weight, dtotal, needs_dweight)
    assert_is_backward(results, dy, x, rstd, weight, dtotal, needs_dweight)


def by_plan(function, arguments, plan: Plan):
    """Results of ``rms_norm_by_plan`` or ``rms_norm_backward_by_plan`` under a plan; no input changes."""
    with careful_call(*(each for each in arguments if isinstance(each, torch.Tensor))):
        results, launches = function(*arguments, plan)
        for launch in (launches,) if isinstance(launches, Launch) else launches:
            launch.run(results[0].device)
    return results


def pairs_of_dtypes(dtypes):
    """(dtype, weight dtype or None, other dtype or None): every pair of values of any two of them."""
    optional = [None, *dtypes]
    return [(dtypes[(i + j) % 3], optional[i], optional[j]) for i in range(4) for j in range(4)]
