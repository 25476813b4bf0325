"""MXNorm to NVFP4: rho near the reference's, and for the kernel's own rho the reference's cast to the bit."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.kernels.cast_results import FORMS
from mxtrain.kernels.nvfp4.norm_cast import nvfp4_norm
from mxtrain.recipes.rms_estimate import RMSEstimate
from tests.support.kernel_checks import DTYPES, assert_same_results, draw, kernel_tests, ugly
from tests.support.nvfp4_checks import check_norm, estimate_16

pytestmark = kernel_tests

ESTIMATES = [(1, "pre_round"), (2, "pre_round"), (1, "exact")]
# Rows of more than 16384 elements are read twice.
LOOPED = 20480


@pytest.mark.parametrize(("p", "estimator"), ESTIMATES)
def test_every_setting_on_ugly_rows(p, estimator):
    for form, dtype in zip(FORMS, itertools.cycle(DTYPES)):
        check_norm(ugly(19, 176, dtype=dtype), form=form, p=p, estimator=estimator)


def test_every_shape():
    """One block, half of MXFP8's, rows of three and five parts, several programs, and the longest row in registers."""
    shapes = [(1, 16), (3, 48), (130, 16), (19, 176), (5, 624), (3, 3088), (1, 16384)]
    forms = itertools.cycle(["blocked", "image", "codes", "blocked"])
    for shape, form, dtype in zip(shapes, forms, itertools.cycle([DTYPES[1], DTYPES[1], DTYPES[0]])):
        check_norm(draw(*shape, dtype=dtype), form=form)


def test_images_of_long_rows_with_the_exact_rms():
    """Two parts, of which the second is not full."""
    check_norm(ugly(11, 7184), form="image", estimator="exact")
    check_norm(draw(3, 7184), form="image", estimator="exact", residual=draw(3, 7184, seed=1))


@pytest.mark.parametrize(("form", "p", "estimator"), [("codes", 2, "exact"), ("image", 1, "pre_round")])
def test_ugly_rows_that_are_read_twice(form, p, estimator):
    check_norm(ugly(11, 16400)[[2, 3, 4, 5, 7, 10]], form=form, p=p, estimator=estimator)


def test_any_tensor_scale():
    """Too small a scale saturates elements. Too large a scale leaves block scales at their minimum."""
    for form, tensor_scale in itertools.product(("blocked", "image"), (2.0**-121, 2.0**-12, 2.0**60)):
        check_norm(draw(7, 96), tensor_scale, form)


def test_residual():
    """The kernel normalizes the sum as stored, rounded to the dtype of x."""
    cases = zip(itertools.product(DTYPES, DTYPES), [96, LOOPED, 96, LOOPED], ["codes", "blocked", "image", "image"])
    for (dtype, residual_dtype), columns, form in cases:
        x, residual = draw(3, columns, dtype=dtype), draw(3, columns, seed=1, dtype=residual_dtype) * 2.0**5
        check_norm(x, form=form, residual=residual)


def test_transposed_matrices():
    check_norm(draw(48, 19).t(), residual=draw(48, 19, seed=1).t())


@settings(max_examples=6, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 40)),
    seed=st.integers(0, 2**31),
    log2_scale=st.integers(-50, 50),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMS),
    setting=st.sampled_from(ESTIMATES),
)
def test_any_rows(shape, seed, log2_scale, dtype, form, setting):
    x = draw(shape[0], 16 * shape[1], seed=seed, dtype=dtype) * 2.0**log2_scale
    check_norm(x, form=form, p=setting[0], estimator=setting[1])


def test_compiles_without_a_graph_break(compile_backend):
    """One graph with codes and image, with and without a residual."""
    estimate = estimate_16()

    def run(x, residual):
        calls = (("blocked", residual), ("image", None))
        casts = [nvfp4_norm(x + x, estimate, 2.0**-8, form, other) for form, other in calls]
        return [casts[0].rho * 2, *(t for result in casts for t in result if t is not None)]

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for rows in (5, 9, 12):  # the row count is symbolic from the second call on
        x, residual = draw(rows, 96, seed=rows), draw(rows, 96, seed=1)
        assert_same_results(compiled(x, residual), run(x, residual))


@pytest.mark.parametrize("form", FORMS)
def test_op_matches_its_schema_and_fake(form):
    """No input is changed or returned; shapes, dtypes and strides are as the fake says."""
    arguments = (draw(5, 96), draw(5, 96, seed=1), 2, "pre_round", 1e-5, estimate_16().constant, 2.0**-8, form)
    torch.library.opcheck(
        torch.ops.mxtrain.nvfp4_norm.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("form", FORMS)
def test_no_rows(form):
    for dtype in DTYPES:
        data, scales, rho, total = nvfp4_norm(torch.empty(0, 96, dtype=dtype), estimate_16(), 1.0, form)
        assert data.shape == ((0, 96) if form == "image" else (0, 48)) and rho.shape == (0,) and total is None
        assert scales is None if form == "image" else scales.numel() == 0


@pytest.mark.parametrize("shape", [(), (96,), (2, 3, 96), (5, 0), (2, 1), (2, 17), (2, 65536 + 16)], ids=str)
def test_refused_shapes(shape):
    with pytest.raises(ValueError) as error:
        nvfp4_norm(torch.ones(shape), estimate_16(), 1.0)
    assert str(tuple(shape)) in str(error.value)


def test_refused_arguments():
    x = torch.ones(2, 32)
    with pytest.raises(ValueError, match="dtype torch.float16 of x"):
        nvfp4_norm(x.half(), estimate_16(), 1.0)
    with pytest.raises(ValueError, match="form = 'swizzled'"):
        nvfp4_norm(x, estimate_16(), 1.0, "swizzled")
    with pytest.raises(ValueError, match="estimator = 'post_round'"):
        nvfp4_norm(x, estimate_16(2, "post_round"), 1.0)
    with pytest.raises(ValueError, match="blocks of 32: expected 16"):
        nvfp4_norm(x, RMSEstimate(2, "pre_round", 1e-5, 32), 1.0)
    with pytest.raises(ValueError, match=r"residual \(2, 16\)"):
        nvfp4_norm(x, estimate_16(), 1.0, residual=torch.ones(2, 16))
