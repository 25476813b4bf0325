"""Casts of several matrices into one operand have the bits of a cast of the joined matrix."""

import itertools

import pytest
import torch

from mxtrain.kernels.cast_results import FORMS
from mxtrain.kernels.mxfp8.cast import cast
from mxtrain.kernels.mxfp8.joined_cast import joined_cast
from tests.support.kernel_checks import DTYPES, RECIPES, assert_same_results, draw, kernel_tests, poisoned_memory, ugly

pytestmark = kernel_tests


def check(parts, axis, dims, form, rounding="rceil", **factor):
    recipe = RECIPES[rounding]
    expected = cast(torch.cat(parts, axis), recipe, dims, form, **factor)
    with poisoned_memory():
        results = joined_cast(parts, axis, recipe, dims, form, **factor)
    assert results.keys() == expected.keys() == {*dims}
    for dim, want in expected.items():
        assert_same_results(results[dim], want)


@pytest.mark.parametrize("form", FORMS)
def test_the_bits_of_the_joined_matrix(form):
    """Parts of 32 and of 96 rows or columns: a tile of 128 in the blocked layout of scales holds several parts."""
    side_by_side = [ugly(43, columns, seed=columns, dtype=torch.bfloat16) for columns in (96, 32)]
    check(side_by_side, 1, (1, 0), form, "floor")
    stacked = [ugly(rows, 64, seed=rows) for rows in (96, 32, 64)]
    for dims in ((1,), (0,)):
        check(stacked, 0, dims, form, column_factor=draw(64))


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
def test_every_setting(form):
    for dims, rounding, dtype in itertools.product([(1,), (0,), (1, 0)], RECIPES, DTYPES):
        check([ugly(43, columns, seed=columns, dtype=dtype) for columns in (96, 32, 160)], 1, dims, form, rounding)
        stacked = [ugly(rows, 160, seed=rows, dtype=dtype) for rows in (96, 32, 64)]
        check(stacked, 0, dims, form, rounding, column_factor=draw(160, dtype=dtype))


def test_views_no_tokens_and_one_part():
    check([part.t() for part in (draw(64, 5), draw(32, 5))], 1, (1, 0), "blocked")
    check([draw(0, 64), draw(0, 32)], 1, (1, 0), "blocked")
    check([draw(32, 32)], 0, (1, 0), "blocked")


@pytest.mark.parametrize(("shape", "dims"), [((40, 64), (0,)), ((32, 40), (1, 0))], ids=["rows", "columns"])
def test_parts_without_whole_blocks_are_refused(shape, dims):
    with pytest.raises(ValueError, match="multiple of 32"):
        joined_cast([draw(*shape)] * 2, 0, RECIPES["rceil"], dims)
