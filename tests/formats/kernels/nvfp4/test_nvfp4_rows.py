"""NVFP4 casts with a tensor scale for each row, of MXNorm's output and of other rows: the bits of the reference."""

import itertools

import pytest
import torch

from mxtrain.formats import mxnorm
from mxtrain.formats.cast_kernels import FORMS
from mxtrain.formats.nvfp4 import reference as nvfp4
from mxtrain.formats.nvfp4.norm import NORM, ROWS, nvfp4_norm, nvfp4_rows
from tests.support.kernel_checks import (
    DTYPES,
    assert_same_bits,
    assert_same_results,
    assert_within_ulps,
    careful_call,
    draw,
    kernel_tests,
    ugly,
)
from tests.support.nvfp4_checks import assert_is_nvfp4, estimate_16

pytestmark = kernel_tests

# One block, rows of three and five parts, several programs, and rows read twice.
SHAPES = [(1, 16), (3, 48), (130, 16), (5, 624), (3, 3088), (2, 20480)]


def assert_is_cast(data, scales, row_scales, x, form) -> None:
    """Require the reference's cast of x, fp32 [T, D], with the reference's scales of rows."""
    want = nvfp4.power_of_two_tensor_scales(x.abs().amax(1))
    if form == "image":
        assert row_scales is None
    else:
        assert_same_bits(row_scales, want)
    assert_is_nvfp4((data, scales), nvfp4.cast(x, want[:, None]), want[:, None], form)


def check_rows(x, form) -> None:
    with careful_call(x):
        found = nvfp4_rows(x, None, form)
    assert_is_cast(*found, x.float(), form)
    given = nvfp4.power_of_two_tensor_scales(x.float().abs().amax(1)) * 4
    data, scales, row_scales = nvfp4_rows(x, given, form)
    assert row_scales is (None if form == "image" else given)
    assert_is_nvfp4((data, scales), nvfp4.cast(x, given[:, None]), given[:, None], form)


def check_norm(x, form, residual=None, **estimate) -> None:
    with careful_call(x, residual):
        data, scales, rho, total, row_scales = nvfp4_norm(x, estimate_16(**estimate), None, form, residual)
    x = x if residual is None else total
    assert_within_ulps(rho, mxnorm.inverse_rms(x, estimate_16(**estimate), None), 2)
    assert_is_cast(data, scales, row_scales, mxnorm.scale_rows(x, rho), form)


def test_ugly_rows():
    """A NaN or an infinity stays in its row."""
    estimates = (1, "pre_round"), (2, "exact"), (2, "pre_round")
    for form, dtype, (p, estimator) in zip(FORMS, itertools.cycle(DTYPES), estimates):
        x = ugly(19, 176, dtype=dtype)
        check_rows(x, form)
        check_norm(x, form, p=p, estimator=estimator)
    assert nvfp4_rows(x, None, "image")[0].isfinite().all(1).equal(x.isfinite().all(1))


def test_every_shape():
    for shape, form, dtype in zip(SHAPES, itertools.cycle(reversed(FORMS)), itertools.cycle(DTYPES)):
        x, residual = draw(*shape, dtype=dtype), draw(*shape, seed=1)
        x *= torch.exp2(torch.arange(shape[0]) % 40 - 20.0)[:, None]
        check_rows(x, form)
        check_norm(x, form, residual)


def test_a_row_has_the_bits_that_it_has_alone():
    x = ugly(19, 48)
    whole, normed = nvfp4_rows(x), nvfp4_norm(x, estimate_16(), None)
    for row in (3, 7, 18):
        own = x[row : row + 1]
        assert_same_results([t[row : row + 1] for t in whole], nvfp4_rows(own))
        alone = nvfp4_norm(own, estimate_16(), None)._replace(total=own)
        assert_same_results([t[row : row + 1] for t in normed._replace(total=x)], alone)


def test_scales_of_rows_are_the_next_powers_of_two():
    largest = torch.tensor([2688.0, 2688.0 * (1 + 2**-23), 1.0, 3.0, 0.0, 1e-38, 2.0**127, torch.inf, -torch.nan])
    x = torch.zeros(len(largest), 32)
    x[:, 17] = -largest
    want = [1.0, 2.0, 2.0**-11, 2.0**-9, 2.0**-121, 2.0**-121, 2.0**116, torch.inf, torch.nan]
    assert_same_bits(nvfp4_rows(x)[2], torch.tensor(want))


@pytest.mark.parametrize("form", FORMS)
def test_no_rows(form):
    x = torch.empty(0, 96)
    for found in (nvfp4_rows(x, None, form), nvfp4_norm(x, estimate_16(), None, form)[::4]):
        assert found[0].shape == ((0, 96) if form == "image" else (0, 48))
        assert found[-1] is None if form == "image" else found[-1].shape == (0,)


def test_ops_match_their_schemas_and_fakes():
    x = draw(5, 32)
    constant = estimate_16().constant
    for form in FORMS:
        of_norm = x, draw(5, 32, seed=1), 2, "pre_round", 1e-5, constant, form, None, ""
        for op, arguments in (
            (NORM, of_norm),
            (ROWS, ([x], None, form, "mae")),
            (ROWS, ([x], torch.ones(5), form, "")),
        ):
            torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
