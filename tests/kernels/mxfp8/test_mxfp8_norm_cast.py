"""The MXNorm cast: rho near the reference's, and for the kernel's own rho the reference's cast to the bit."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.kernels.cast_results import FORMS
from mxtrain.kernels.device import INTERPRETED
from mxtrain.kernels.mxfp8.norm_cast import mxnorm_cast
from mxtrain.reference import mxnorm as reference
from tests.support.kernel_checks import (
    DTYPES,
    RECIPES,
    assert_same_results,
    assert_within_ulps,
    check_mxnorm_cast,
    draw,
    gpu_only,
    kernel_tests,
    rms_estimate,
    ugly,
)

pytestmark = kernel_tests

ESTIMATES = [(1, "pre_round"), (2, "pre_round"), (1, "post_round"), (2, "post_round"), (1, "exact")]
# Rows of more than 16384 elements are read twice.
LOOPED = 20480


@pytest.mark.parametrize(("p", "estimator"), ESTIMATES)
def test_every_setting_on_ugly_rows(p, estimator):
    for form, rounding, dtype in zip(("image", *FORMS), itertools.cycle(RECIPES), itertools.cycle(DTYPES)):
        check_mxnorm_cast(ugly(19, 160, dtype=dtype), rounding, form, p=p, estimator=estimator)
    check_mxnorm_cast(ugly(19, 160, dtype=torch.bfloat16), "rceil", "codes", p=p, estimator=estimator)


def test_every_shape():
    """One block, rows of three and five parts, several programs, the longest row in registers, and rows read twice."""
    shapes = [(1, 32), (67, 96), (130, 32), (5, 768), (3, 3104), (1, 10240), (1, 16384), (1, 65536)]
    for shape, form, dtype in zip(shapes, itertools.cycle(reversed(FORMS)), itertools.cycle(DTYPES)):
        check_mxnorm_cast(draw(*shape, dtype=dtype), form=form)


def test_images_of_long_rows_with_the_exact_rms():
    """Two parts, of which the second is not full."""
    check_mxnorm_cast(ugly(11, 7200), form="image", estimator="exact", residual=ugly(11, 7200, seed=1))


@pytest.mark.parametrize(("p", "estimator", "form"), [(1, "post_round", "blocked"), (2, "exact", "codes")])
def test_ugly_rows_that_are_read_twice(p, estimator, form):
    check_mxnorm_cast(ugly(11, 16416)[[2, 3, 4, 5, 7, 10]], form=form, p=p, estimator=estimator)


@pytest.mark.parametrize(("p", "estimator"), ESTIMATES)
def test_rows_that_are_read_twice(p, estimator):
    for dtype, rounding, form in zip(DTYPES, RECIPES, ("image", "codes")):
        check_mxnorm_cast(draw(1, LOOPED, dtype=dtype), rounding, form, p=p, estimator=estimator)


@pytest.mark.parametrize(("p", "estimator"), ESTIMATES)
def test_eps_is_added_to_the_squared_estimate(p, estimator):
    x = draw(7, 96)
    x[1:] *= 10.0 ** torch.arange(-3, 3)[:, None]
    x[0] = 0
    for eps in (0.0, 1e-12, 1e6):
        check_mxnorm_cast(x, eps=eps, p=p, estimator=estimator)


def check_rho(x, *estimate):
    rho = mxnorm_cast(x, rms_estimate(*estimate), RECIPES["rceil"]).rho
    assert_within_ulps(rho, reference.inverse_rms(x, rms_estimate(*estimate), RECIPES["rceil"]), 2)


@pytest.mark.parametrize(("p", "estimator"), ESTIMATES)
def test_rho_of_many_rows(p, estimator):
    for columns in (96, 768) if INTERPRETED else (32, 96, 768, 4096):
        check_rho(draw(*((16384 if INTERPRETED else 2**22) // columns, columns)), p, estimator)


@pytest.mark.parametrize(("p", "estimator"), ESTIMATES)
def test_rho_of_rows_of_equal_numbers(p, estimator):
    """Every term is rounded in the same direction, so errors that cancel elsewhere add up."""
    for columns, rows in ((160, 64), (4128, 4), (65536, 2)):
        rows = rows if INTERPRETED else 1024
        check_rho(torch.linspace(1, 4, rows + 1)[1:, None].expand(rows, columns).contiguous(), p, estimator)


@pytest.mark.parametrize(("p", "estimator"), ESTIMATES)
def test_rho_of_rows_of_every_size(p, estimator):
    """From 2^-149 to 2^127, no square overflows or underflows."""
    exponents = torch.arange(-149, 128, dtype=torch.float64)
    x = (draw(exponents.numel(), 64).clamp(-1.9, 1.9).double() * torch.exp2(exponents)[:, None]).float()
    for eps in (0.0, 1e-5):
        check_rho(x, p, estimator, eps)


def test_settings_make_a_difference():
    """Otherwise a kernel that ignores a setting would pass wherever the reference happens to agree."""
    x = draw(3, 768)
    rhos = [mxnorm_cast(x, rms_estimate(*setting), RECIPES["rceil"]).rho for setting in ESTIMATES]
    assert all(not torch.equal(a, b) for i, a in enumerate(rhos) for b in rhos[:i])


def test_residual():
    """The kernel normalizes the sum as stored, rounded to the dtype of x."""
    cases = zip(itertools.product(DTYPES, DTYPES), itertools.cycle([96, LOOPED]), itertools.cycle(FORMS))
    for (dtype, residual_dtype), columns, form in cases:
        x, residual = draw(3, columns, dtype=dtype), draw(3, columns, seed=1, dtype=residual_dtype) * 2.0**5
        check_mxnorm_cast(x, form=form, residual=residual)
    for estimator in ("pre_round", "exact"):
        check_mxnorm_cast(ugly(19, 160), residual=ugly(19, 160, seed=1).flip(0), estimator=estimator)


@settings(max_examples=10, deadline=None)
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


@gpu_only
@pytest.mark.parametrize("shape", [(4096, 96), (512, LOOPED)])
def test_the_same_bits_every_time(shape):
    x = draw(*shape)
    first = mxnorm_cast(x, rms_estimate(), RECIPES["rceil"])
    for _ in range(3):
        assert_same_results(mxnorm_cast(x, rms_estimate(), RECIPES["rceil"]), first)


def test_compiles_without_a_graph_break(compile_backend):
    """One graph with every form, with and without a residual."""
    estimate = rms_estimate()

    def run(x, residual):
        x = x + x
        calls = zip(FORMS, (None, residual, None))
        casts = [mxnorm_cast(x, estimate, RECIPES["rceil"], form, other) for form, other in calls]
        return [casts[0].rho * 2, *(t for result in casts for t in result if t is not None)]

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for rows in (5, 9, 17):  # the row count is symbolic from the second call on
        x, residual = draw(rows, 96, seed=rows), draw(rows, 96, seed=1)
        assert_same_results(compiled(x, residual), run(x, residual))


@pytest.mark.parametrize("form", FORMS)
def test_op_matches_its_schema_and_fake(form):
    """No input is changed or returned; shapes, dtypes and strides are as the fake says."""
    for residual in (None, draw(5, 96, seed=1)):
        arguments = (draw(5, 96), residual, 2, "pre_round", 1e-5, rms_estimate().constant, "rceil", form)
        torch.library.opcheck(
            torch.ops.mxtrain.mxnorm_cast.default, arguments, test_utils=("test_schema", "test_faketensor")
        )
