"""Casts to the merged forms, by the kernels of matrices, weights, norms and SwiGLU, against plain PyTorch."""

import pytest
import torch

from mxtrain.formats.cast_kernels import MERGED_FORMS
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.matrices import Codes
from mxtrain.formats.mx.cast import cast, cast_tiles
from mxtrain.formats.mx.merged import merge, shares_tile
from mxtrain.formats.mx.norm import mxnorm_cast
from mxtrain.formats.mx.reference import cast as reference_cast
from mxtrain.formats.mx.swiglu_cast import swiglu_backward_cast, swiglu_cast
from mxtrain.formats.mxfp8 import MXFP8
from mxtrain.formats.mxnorm import scale_rows
from mxtrain.formats.recipe import SCALE_ROUNDINGS
from tests.formats.kernels.mx.test_swiglu_cast import formula, inputs
from tests.support.kernel_checks import (
    DTYPES,
    RECIPES,
    assert_same_bits,
    bits,
    careful_call,
    draw,
    kernel_tests,
    ugly,
)

pytestmark = kernel_tests


def assert_is_merged(got, x: torch.Tensor, rounding: str, form: str, dim: int, tiles=False) -> None:
    """Require ``got`` to be the reference's operand of x (fp32) along ``dim``; ``tiles`` of 32 x 32 share a scale."""
    x = torch.nn.functional.pad(x.t(), (0, -x.shape[0] % 32)).contiguous() if dim == 0 else x
    codes = Codes(*reference_cast(x, MXFP8, rounding, tiles))
    want = merge(codes, shares_tile(form.removeprefix("merged_"), dim))
    assert_same_bits(got[1], want.scales)
    # The sign of a NaN code differs by processor.
    assert_same_bits(got[0], want.data, ignore=(bits(want.data) & 127) == 127)


def joined_product(parts, axis, row_factor=None, column_factor=None):
    x = torch.cat(parts, axis).float()
    x = x if row_factor is None else x * row_factor[:, None]
    return x if column_factor is None else x * column_factor


@pytest.mark.parametrize("form", MERGED_FORMS)
@pytest.mark.parametrize("dims", [(1,), (0,), (1, 0)])
def test_casts_of_a_matrix(form, dims):
    x, rounding = ugly(150, 256, dtype=torch.bfloat16), SCALE_ROUNDINGS[len(dims) - 1]
    factors = {"row_factor": draw(150, seed=1).abs()} if form == "merged_input" else {}
    factors |= {"column_factor": draw(256, seed=2)} if form == "merged_weight" else {}
    with careful_call(x, *factors.values()):
        results = cast(x, RECIPES[rounding], dims, form, **factors)
    for dim in dims:
        assert_is_merged(results[dim], joined_product([x], 0, **factors), rounding, form, dim)


@pytest.mark.parametrize("rounding", SCALE_ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_roundings_and_dtypes(rounding, dtype):
    x = ugly(129, 128, seed=3, dtype=dtype)
    for dim, got in cast(x, RECIPES[rounding], (1, 0), "merged_gradient").items():
        assert_is_merged(got, x.float(), rounding, "merged_gradient", dim)


def test_a_matrix_without_whole_groups_of_columns_has_codes_along_them():
    x = ugly(40, 96)
    for form in ("merged_input", "merged_gradient"):
        assert_is_merged(cast(x, RECIPES["rceil"], (0,), form)[0], x, "rceil", form, 0)


@pytest.mark.parametrize("axis", [0, 1])
def test_several_matrices(axis):
    parts = [ugly(*((rows, 128) if axis == 0 else (128, rows)), seed=rows) for rows in (128, 256)]
    form = ("merged_weight", "merged_gradient")[axis]
    for dim, got in cast(parts, RECIPES["rceil"], (1, 0), form, axis=axis).items():
        assert_is_merged(got, joined_product(parts, axis), "rceil", form, dim)


@pytest.mark.parametrize("dims", [(1,), (0,), (1, 0)])
def test_weights_in_tiles_of_blocks(dims):
    parts, gain = [ugly(128, 128), ugly(256, 128, seed=1)], draw(128, seed=2)
    results = cast_tiles(parts, RECIPES["rceil"], dims, "merged_weight", gain)
    for dim in dims:
        assert_is_merged(
            results[dim], joined_product(parts, 0, column_factor=gain), "rceil", "merged_weight", dim, True
        )


@pytest.mark.parametrize("columns", [128, 384, 640, pytest.param(32896, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("residual", [False, True])
def test_norm(columns, residual):
    x, other = ugly(33, columns), draw(33, columns, seed=5) if residual else None
    estimate = RMSEstimate.for_recipe(RECIPES["rceil"])
    data, scales, rho, total, _ = mxnorm_cast(x, estimate, RECIPES["rceil"], "merged_input", other)
    x = x if total is None else total
    assert_is_merged((data, scales), scale_rows(x, rho), "rceil", "merged_input", 1)


def test_swiglu_along_rows():
    dh, gate, up = inputs(140, 256)
    h, dup, dgate = formula(dh, gate, up)
    assert_is_merged(swiglu_cast(gate, up, True, False, "e4m3", "rceil", "merged_input"), h, "rceil", "merged_input", 1)
    for joined in (False, True):
        settings = True, False, False, joined, "e4m3", "e4m3", "rceil", "merged_gradient"
        results = swiglu_backward_cast(dh, gate, up, *settings)
        matrices = [torch.cat((dgate, dup), 1)] if joined else [dgate, dup]
        for matrix, got in zip(matrices, zip(results[::2], results[1::2]), strict=True):
            assert_is_merged(got, matrix, "rceil", "merged_gradient", 1)
