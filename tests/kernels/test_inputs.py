"""Public kernel functions return right results for any shape, layout and dtype, or raise ValueError with the shape."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from mxtrain.kernels.cast_results import FORMS
from mxtrain.kernels.mxfp8.cast import cast
from mxtrain.kernels.mxnorm.backward import fold_backward, norm_backward
from mxtrain.kernels.mxnorm.cast import mxnorm_cast
from mxtrain.recipes.parse import get_recipe
from mxtrain.recipes.recipe import RMSEstimate
from mxtrain.reference import casts
from mxtrain.reference import mxnorm as reference
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


def call_cast(x, row_factor, column_factor):
    return [t for result in cast(x, RECIPE, (1, 0), "codes", row_factor, column_factor).values() for t in result]


class Function(NamedTuple):
    """A public function: how to call it, how to check it, and its arguments for R rows and C columns."""

    call: Callable
    check: Callable
    arguments: dict[str, str]


FUNCTIONS = {
    "mxnorm_cast": Function(
        lambda x, residual: mxnorm_cast(x, ESTIMATE, RECIPE, "codes", residual),
        check_mxnorm_cast,
        {"x": "RC", "residual": "RC"},
    ),
    "cast": Function(
        call_cast,
        lambda **arguments: check_cast(dims=(1, 0), **arguments),
        {"x": "RC", "row_factor": "R", "column_factor": "C"},
    ),
    "norm_backward": Function(norm_backward, check_norm_backward, {"g": "RC", "x": "RC", "rho": "R"}),
    "fold_backward": Function(fold_backward, check_fold_backward, {"g": "RC", "weight": "RC", "gain": "C"}),
}
ARGUMENTS = [(name, argument) for name, function in FUNCTIONS.items() for argument in function.arguments]
MATRICES = [(name, argument) for name, argument in ARGUMENTS if FUNCTIONS[name].arguments[argument] == "RC"]
VECTORS = [pair for pair in ARGUMENTS if pair not in MATRICES]


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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_misaligned(name):
    for dtype in DTYPES:
        FUNCTIONS[name].check(**{key: misaligned(t) for key, t in arguments_of(name, 35, 96, dtype).items()})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_no_rows(form, dtype):
    x = torch.empty(0, 96, dtype=dtype)
    data, scales, rho, total = mxnorm_cast(x, ESTIMATE, RECIPE, form, x)
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
    with pytest.raises(ValueError, match=r"x \(5, 0\)"):
        mxnorm_cast(x, ESTIMATE, RECIPE, form)
    for dim, (data, scales) in cast(x, RECIPE, (1, 0), form).items():
        assert data.shape == ((5, 0) if form == "image" or dim == 1 else (0, 32))
        assert scales is None or scales.numel() == 0
    assert norm_backward(x, x, torch.ones(5)).shape == (5, 0)
    assert [t.shape for t in fold_backward(x, x, torch.empty(0))] == [(5, 0), (0,)]


NOT_MATRICES = [(), (96,), (2, 3, 96)]
OTHER_DTYPES = [torch.float16, torch.float64, torch.int32, torch.bool, torch.float8_e4m3fn]


def assert_refused(name, arguments, shape):
    """The call raises ValueError with the shape of the wrong argument."""
    with pytest.raises(ValueError) as error:
        FUNCTIONS[name].call(**arguments)
    assert str(tuple(shape)) in str(error.value)


@pytest.mark.parametrize(("name", "argument"), MATRICES)
def test_matrices_of_other_ranks_and_dtypes_are_refused(name, argument):
    arguments = arguments_of(name, 6, 96)
    for shape in NOT_MATRICES:
        assert_refused(name, {**arguments, argument: torch.ones(shape)}, shape)
    for dtype in OTHER_DTYPES:
        assert_refused(name, {**arguments, argument: arguments[argument].to(dtype)}, (6, 96))


@pytest.mark.parametrize(("name", "argument"), VECTORS)
def test_vectors_of_other_dtypes_are_refused(name, argument):
    arguments = arguments_of(name, 6, 96)
    for dtype in (torch.float16, torch.float64, torch.int32, *([torch.bfloat16] if argument == "rho" else [])):
        assert_refused(name, {**arguments, argument: arguments[argument].to(dtype)}, arguments[argument].shape)


# The other arguments follow the shape of these.
SET_THE_SHAPE = [("mxnorm_cast", "x"), ("cast", "x")]


@pytest.mark.parametrize(("name", "argument"), [pair for pair in ARGUMENTS if pair not in SET_THE_SHAPE])
def test_shapes_that_do_not_match_are_refused(name, argument):
    arguments = arguments_of(name, 6, 96)
    for rows, columns in ((5, 96), (6, 64), (7, 128), (96, 6)):
        other = arguments_of(name, rows, columns)[argument]
        if other.shape != arguments[argument].shape:
            assert_refused(name, {**arguments, argument: other}, other.shape)


@pytest.mark.parametrize(("name", "argument"), VECTORS)
def test_matrices_in_place_of_vectors_are_refused(name, argument):
    """Elsewhere [R, 1] and [1, C] would broadcast."""
    for dim in (0, 1):
        arguments = arguments_of(name, 6, 96)
        arguments[argument] = arguments[argument].unsqueeze(dim)
        assert_refused(name, arguments, arguments[argument].shape)


@pytest.mark.parametrize("columns", [1, 31, 33, 95, 65536 + 32, 2 * 65536])
def test_row_lengths_that_mxnorm_cast_refuses(columns):
    with pytest.raises(ValueError, match=rf"x \(2, {columns}\)"):
        mxnorm_cast(torch.ones(2, columns), ESTIMATE, RECIPE)


@pytest.mark.parametrize("columns", [1, 33])
@pytest.mark.parametrize("dims", [(1,), (1, 0)], ids=str)
def test_row_lengths_that_cast_refuses(dims, columns):
    with pytest.raises(ValueError, match=rf"x \(2, {columns}\)"):
        cast(torch.ones(2, columns), RECIPE, dims)


@pytest.mark.parametrize("dims", [(), (2,), (0, 0), (1, 1), (-1,), (0, 1, 0)], ids=str)
def test_unknown_dims_are_refused(dims):
    with pytest.raises(ValueError, match="dims = "):
        cast(torch.ones(2, 32), RECIPE, dims)


def test_unknown_forms_are_refused():
    for function in (
        lambda x: cast(x, RECIPE, (1,), "swizzled"),
        lambda x: mxnorm_cast(x, ESTIMATE, RECIPE, "swizzled"),
    ):
        with pytest.raises(ValueError, match="form = 'swizzled' is not one of: 'codes', 'blocked', 'image'"):
            function(torch.ones(2, 32))


def test_cpu_tensors_are_refused_where_kernels_are_not_interpreted():
    code = """
import torch
from mxtrain.kernels.mxfp8.cast import cast
from mxtrain.kernels.mxnorm.backward import fold_backward
from mxtrain.kernels.mxnorm.cast import mxnorm_cast
from mxtrain.kernels.mxnorm.backward import norm_backward
from mxtrain.recipes.parse import get_recipe
from mxtrain.recipes.recipe import RMSEstimate

recipe, x, vector = get_recipe("mxfp8"), torch.ones(3, 96), torch.ones(3)
for call in (
    lambda: mxnorm_cast(x, RMSEstimate.for_recipe(recipe), recipe),
    lambda: cast(x, recipe),
    lambda: norm_backward(x, x, vector),
    lambda: fold_backward(x, x, torch.ones(96)),
):
    try:
        call()
    except ValueError as error:
        print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    messages = run.stdout.splitlines()
    assert len(messages) == 4, run.stderr
    assert all("(3, 96) is on cpu: expected a CUDA device" in message for message in messages)


@gpu_only
@pytest.mark.parametrize("argument", ["row_factor", "column_factor", "rho", "gain", "residual", "g"])
def test_one_cpu_tensor_among_others(argument):
    for name, function in FUNCTIONS.items():
        if argument in function.arguments:
            mixed = arguments_of(name, 6, 96)
            mixed[argument] = mixed[argument].cpu()
            with pytest.raises(ValueError, match="cpu"):
                function.call(**mixed)


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
    data, scales, rho, _ = mxnorm_cast(huge, ESTIMATE, RECIPE, form)
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


def test_other_formats_and_block_sizes_are_refused(device):
    x = torch.ones(2, 64)
    mxfp8, unquantized = get_recipe("mxfp8"), get_recipe("unquantized")
    with pytest.raises(ValueError, match="expected MXFP8 and blocks of 32"):
        mxnorm_cast(x, RMSEstimate(2, "pre_round", 1e-5, 16), mxfp8)
    with pytest.raises(ValueError, match="recipe unquantized"):
        mxnorm_cast(x, RMSEstimate.for_recipe(unquantized), unquantized)
    with pytest.raises(ValueError, match="recipe unquantized"):
        cast(x, unquantized)
