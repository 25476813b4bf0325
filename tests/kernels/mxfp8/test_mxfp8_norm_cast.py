"""The MXNorm cast: rho near the reference's, and with the kernel's own rho the reference's cast to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import (
    DTYPES,
    RECIPES,
    assert_same_results,
    assert_within_ulps,
    check_mxnorm_cast,
    draw,
    kernel_tests,
    rms_estimate,
    ugly,
)

from mxtrain.kernels.cast_results import FORMS
from mxtrain.kernels.device import INTERPRETED
from mxtrain.kernels.mxfp8.norm_cast import mxnorm_cast
from mxtrain.reference import mxnorm as reference

pytestmark = kernel_tests

ESTIMATES = [(1, "pre_round"), (2, "pre_round"), (1, "post_round"), (2, "post_round"), (2, "exact")]
# Rows of more than 16384 elements are read twice.
LOOPED = 20480


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rounding", RECIPES)
@pytest.mark.parametrize(("p", "estimator"), ESTIMATES)
def test_every_setting_on_ugly_rows(p, estimator, rounding, form, dtype):
    check_mxnorm_cast(ugly(19, 160, dtype=dtype), rounding, form, p=p, estimator=estimator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape",
    [(1, 32), (3, 64), (67, 96), (130, 160), (5, 768), (3, 3104), (2, 10240), (1, 16384), (2, LOOPED), (1, 65536)],
    ids=str,
)
def test_every_shape(shape, form, dtype):
    check_mxnorm_cast(draw(*shape, dtype=dtype), form=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("p", "estimator"), ESTIMATES)
def test_long_rows_that_are_ugly(p, estimator, form):
    check_mxnorm_cast(ugly(11, 16416), form=form, p=p, estimator=estimator)


@pytest.mark.parametrize("rounding", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("p", "estimator"), ESTIMATES)
def test_long_rows_of_other_settings(p, estimator, dtype, rounding):
    check_mxnorm_cast(draw(1, LOOPED, dtype=dtype), rounding, p=p, estimator=estimator)


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1.0, 1e6])
@pytest.mark.parametrize(("p", "estimator"), ESTIMATES)
def test_eps_is_added_to_the_squared_estimate(p, estimator, eps):
    x = draw(7, 96)
    x[1:] *= 10.0 ** torch.arange(-3, 3)[:, None]
    x[0] = 0
    check_mxnorm_cast(x, eps=eps, p=p, estimator=estimator)


def check_rho(x, *estimate):
    rho = mxnorm_cast(x, rms_estimate(*estimate), RECIPES["rceil"]).rho
    assert_within_ulps(rho, reference.inverse_rms(x, rms_estimate(*estimate), RECIPES["rceil"]), 2)


@pytest.mark.parametrize("columns", [32, 96, 768, 4096])
@pytest.mark.parametrize(("p", "estimator"), ESTIMATES)
def test_rho_of_many_rows(p, estimator, columns):
    check_rho(draw(*((32768 if INTERPRETED else 2**22) // columns, columns)), p, estimator)


@pytest.mark.parametrize("columns", [32, 96, 160, 4128, LOOPED, 65536])
@pytest.mark.parametrize(("p", "estimator"), ESTIMATES)
def test_rho_of_rows_of_equal_numbers(p, estimator, columns):
    """Every term is rounded in the same direction, so errors add up that cancel elsewhere."""
    rows = max(6, 16384 // columns) if INTERPRETED else 1024
    check_rho(torch.linspace(1, 4, rows)[:, None].expand(rows, columns).contiguous(), p, estimator)


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize(("p", "estimator"), ESTIMATES)
def test_rho_of_rows_of_every_size(p, estimator, eps):
    """From 2^-149 to 2^127: no square overflows or is lost."""
    exponents = torch.arange(-149, 128, dtype=torch.float64)
    x = (draw(exponents.numel(), 64).clamp(-1.9, 1.9).double() * torch.exp2(exponents)[:, None]).float()
    check_rho(x, p, estimator, eps)


def test_settings_make_a_difference():
    """Else a kernel that ignores one would pass wherever the reference happens to agree."""
    x = draw(3, 768)
    rhos = [mxnorm_cast(x, rms_estimate(*setting), RECIPES["rceil"]).rho for setting in ESTIMATES]
    assert all(not torch.equal(a, b) for i, a in enumerate(rhos) for b in rhos[:i])


@pytest.mark.parametrize("columns", [96, LOOPED])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("residual_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual(dtype, residual_dtype, form, columns):
    """What is normalized is the sum as stored, rounded to the dtype of x."""
    x, residual = draw(3, columns, dtype=dtype), draw(3, columns, seed=1, dtype=residual_dtype) * 2.0**5
    check_mxnorm_cast(x, form=form, residual=residual)


@pytest.mark.parametrize("estimator", ["pre_round", "exact"])
def test_residual_of_ugly_rows(estimator):
    check_mxnorm_cast(ugly(19, 160), residual=ugly(19, 160, seed=1).flip(0), estimator=estimator)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 40)),
    seed=st.integers(0, 2**31),
    log2_scale=st.integers(-50, 50),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMS),
    rounding=st.sampled_from(list(RECIPES)),
    setting=st.sampled_from(ESTIMATES),
)
def test_any_rows(shape, seed, log2_scale, dtype, form, rounding, setting):
    x = draw(shape[0], 32 * shape[1], seed=seed, dtype=dtype) * 2.0**log2_scale
    check_mxnorm_cast(x, rounding, form, p=setting[0], estimator=setting[1])


@pytest.mark.parametrize("shape", [(64 if INTERPRETED else 4096, 96), (3 if INTERPRETED else 512, LOOPED)])
def test_the_same_bits_every_time(shape):
    x = draw(*shape)
    first = mxnorm_cast(x, rms_estimate(), RECIPES["rceil"])
    for _ in range(3):
        assert_same_results(mxnorm_cast(x, rms_estimate(), RECIPES["rceil"]), first)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_compiles_without_a_graph_break(form, with_residual, compile_backend):
    estimate = rms_estimate()

    def run(x, residual):
        x = x + x
        result = mxnorm_cast(x, estimate, RECIPES["rceil"], form, residual if with_residual else None)
        return [result.rho * 2, *(t for t in result if t is not None)]

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for rows in (5, 9, 130):  # from the second on the row count is symbolic
        x, residual = draw(rows, 96, seed=rows), draw(rows, 96, seed=1)
        assert_same_results(compiled(x, residual), run(x, residual))


@pytest.mark.parametrize("form", FORMS)
def test_custom_op_keeps_its_word(form):
    """Schema (no input is changed or returned) and fake (shapes, dtypes, strides)."""
    x = draw(5, 96)
    for residual in (None, draw(5, 96, seed=1)):
        arguments = (x, residual, 2, "pre_round", 1e-5, rms_estimate().constant, "rceil", form)
        torch.library.opcheck(
            torch.ops.mxtrain.mxnorm_cast.default, arguments, test_utils=("test_schema", "test_faketensor")
        )
