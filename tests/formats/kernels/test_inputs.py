"""Kernel functions return right results for tensors of any layout, with no elements, and past 32-bit offsets."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from mxtrain.formats import mxnorm as reference
from mxtrain.formats.cast_kernels import FORMS
from mxtrain.formats.mx import reference as casts
from mxtrain.formats.mx.cast import cast
from mxtrain.formats.mx.norm import mxnorm_cast
from mxtrain.norms.mxnorm_backward import fold_backward, norm_backward
from tests.support.kernel_checks import (
    DTYPES,
    LAYOUTS,
    RECIPES,
    assert_is_cast,
    assert_is_norm_backward,
    assert_within_ulps,
    check_cast,
    check_fold_backward,
    check_mxnorm_cast,
    check_norm_backward,
    draw,
    gpu_only,
    kernel_tests,
    misaligned,
    rms_estimate,
)

pytestmark = kernel_tests

RECIPE = RECIPES["rceil"]
ESTIMATE = rms_estimate()


class Function(NamedTuple):
    """How to check a function, and its arguments for R rows and C columns."""

    check: Callable
    arguments: dict[str, str]


FUNCTIONS = {
    "mxnorm_cast": Function(
        check_mxnorm_cast,
        {"x": "RC", "residual": "RC"},
    ),
    "cast": Function(
        lambda **arguments: check_cast(dims=(1, 0), **arguments),
        {"x": "RC", "row_factor": "R", "column_factor": "C"},
    ),
    "norm_backward": Function(check_norm_backward, {"g": "RC", "x": "RC", "rho": "R"}),
    "fold_backward": Function(check_fold_backward, {"g": "RC", "weight": "RC", "gain": "C"}),
}
ARGUMENTS = [(name, argument) for name, function in FUNCTIONS.items() for argument in function.arguments]


def arguments_of(name, rows, columns, dtype=torch.float32):
    """Draw arguments. Vectors are fp32, as rho must be."""
    shapes = {"RC": (rows, columns), "R": (rows,), "C": (columns,)}
    return {
        argument: draw(*shapes[kind], seed=seed, dtype=dtype if kind == "RC" else torch.float32)
        for seed, (argument, kind) in enumerate(FUNCTIONS[name].arguments.items())
    }


def expanded(t):
    return t[..., :1].expand(t.shape)


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_layouts(name, argument):
    for layout in (*LAYOUTS, expanded):
        arguments = arguments_of(name, 35, 96, torch.bfloat16)
        odd = layout(arguments[argument])
        assert layout in (misaligned, expanded) or torch.equal(odd, arguments[argument])
        FUNCTIONS[name].check(**{**arguments, argument: odd})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_no_rows(form, dtype):
    x = torch.empty(0, 96, dtype=dtype)
    data, scales, rho, total, _ = mxnorm_cast(x, ESTIMATE, RECIPE, form, x)
    image = form == "image"
    scales_shape = {"codes": (0, 3), "blocked": (0,)}.get(form)
    for got, got_scales in ((data, scales), cast(x, RECIPE, (1,), form)[1]):
        assert got.shape == (0, 96) and got.dtype == (torch.bfloat16 if image else torch.float8_e4m3fn)
        assert got_scales is None if image else got_scales.shape == scales_shape
    assert rho.shape == (0,) and rho.dtype == torch.float32 and total.shape == (0, 96) and total.dtype == dtype
    data, scales = cast(x, RECIPE, (0,), form)[0]
    assert data.shape == ((0, 96) if image else (96, 0))
    assert scales is None if image else scales.numel() == 0
    dx = norm_backward(x, x, torch.empty(0))
    assert dx.shape == (0, 96) and dx.dtype == dtype
    d_weight, d_gain = fold_backward(x, x, torch.ones(96))
    assert d_weight.shape == (0, 96) and torch.equal(d_gain, torch.zeros(96))


@pytest.mark.parametrize("form", FORMS)
def test_no_columns(form):
    x = torch.empty(5, 0)
    for dim, (data, scales) in cast(x, RECIPE, (1, 0), form).items():
        assert data.shape == ((5, 0) if form == "image" or dim == 1 else (0, 32))
        assert scales is None or scales.numel() == 0
    assert norm_backward(x, x, torch.ones(5)).shape == (5, 0)
    assert [t.shape for t in fold_backward(x, x, torch.empty(0))] == [(5, 0), (0,)]


def some_rows(huge):
    """The first rows, the last, and rows around offset 2^31, in whole blocks along columns except for the last."""
    around = 2**31 // huge.shape[1] // 32 * 32
    last = slice(len(huge) - 48, len(huge))
    return [slice(0, 32), slice(around - 32, around), slice(around, around + 64), last]


def part(scales, rows, blocks=slice(None)):
    return None if scales is None else scales[rows, blocks].contiguous()


@gpu_only
@pytest.mark.parametrize("form", FORMS)
def test_mxnorm_cast_past_32_bit_offsets(huge, form):
    data, scales, rho, *_ = mxnorm_cast(huge, ESTIMATE, RECIPE, form)
    if form == "blocked":
        scales, form = casts.from_blocked(scales, len(huge), huge.shape[1] // 32), "codes"
    for rows in some_rows(huge):
        assert_within_ulps(rho[rows], reference.inverse_rms(huge[rows], ESTIMATE, RECIPE), 2)
        assert_is_cast((data[rows], part(scales, rows)), reference.scale_rows(huge[rows], rho[rows]), "rceil", form)


@gpu_only
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dim", [0, 1])
def test_cast_past_32_bit_offsets(huge, dim, form):
    data, scales = cast(huge, RECIPE, (dim,), form)[dim]
    if form == "blocked":
        scales, form = casts.from_blocked(scales, huge.shape[1 - dim], -(-huge.shape[dim] // 32)), "codes"
    for rows in some_rows(huge):
        if dim == 1 or form == "image":
            result = data[rows], part(scales, rows)
        else:
            blocks = slice(rows.start // 32, -(-rows.stop // 32))
            result = data[:, blocks.start * 32 : blocks.stop * 32].contiguous(), part(scales, slice(None), blocks)
        assert_is_cast(result, huge[rows].float(), "rceil", form, dim)


@gpu_only
def test_norm_backward_past_32_bit_offsets(huge):
    rho = torch.rand(len(huge), generator=torch.Generator("cuda").manual_seed(1)) + 0.5
    g = huge.flip(1)
    dx = norm_backward(g, huge, rho)
    for rows in some_rows(huge):
        assert_is_norm_backward(dx[rows], g[rows], huge[rows], rho[rows])
