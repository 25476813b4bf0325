"""The backward of LayerNorm by kernel against fp64 autograd of the plain formula, element by element."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import mxtrain.kernels.norm.partial_sums
from mxtrain.kernels.device import INTERPRETED
from mxtrain.kernels.norm import rms_norm_plan
from mxtrain.kernels.norm.layer_norm_backward import layer_norm_backward, layer_norm_backward_by_plan
from mxtrain.kernels.norm.rms_norm_plan import LAYER_BACKWARD, Plan, choose_backward
from mxtrain.kernels.norm.wide_rows_backward import wide_rows_kernel
from tests.support.kernel_checks import LAYOUTS, assert_same_results, careful_call, draw, gpu_only, kernel_tests
from tests.support.layer_norm_checks import EPS, assert_is_backward, autograd_in_fp64, backward_inputs, statistics
from tests.support.rms_norm_checks import WIDTHS, by_plan

pytestmark = kernel_tests

FP32 = torch.float32
# Rows of 100 elements: held whole, and read twice in chunks; programs walk two tiles, the last tile is cut off.
HELD, CHUNKED = Plan(True, 2, 128, 1, 2, 2), Plan(False, 2, 64, 1, 2, 2)
# The kernel for wide rows, on rows of 100 elements.
WIDE = Plan(True, 1, 128, 1, 1, 2)
VARIANTS = pytest.mark.parametrize("plan", [HELD, CHUNKED, WIDE], ids=["held", "chunked", "wide"])


def run(plan, arguments, dweight=FP32, dbias=FP32):
    """(dx, dweight or None, dbias or None) by a plan."""
    longest = 64 if plan == WIDE else rms_norm_plan.LONGEST_TILE_WITH_WEIGHT
    with mock.patch.object(rms_norm_plan, "LONGEST_TILE_WITH_WEIGHT", longest):
        dx, *sums = by_plan(layer_norm_backward_by_plan, (*arguments, dweight, dbias), plan)
    found = iter(sums)
    return dx, *(None if dtype is None else next(found) for dtype in (dweight, dbias))


def check(plan, arguments, dweight=FP32, dbias=FP32):
    results = run(plan, arguments, dweight, dbias)
    assert_is_backward(results, *arguments, dweight, dbias)
    return results


@VARIANTS
def test_every_dtype_and_every_choice_of_gradients(plan):
    bf16, fp16 = torch.bfloat16, torch.float16
    for dtypes, dweight, dbias in (
        ((FP32, fp16, bf16, bf16), fp16, bf16),
        ((bf16, None, FP32, fp16), FP32, None),
        ((fp16, FP32, None, FP32), None, FP32),
        ((FP32, None, fp16, FP32), None, None),
    ):
        check(plan, backward_inputs(5, 100, *dtypes), dweight, dbias)


@pytest.mark.parametrize("columns", [1, 31, *(pytest.param(n, marks=pytest.mark.sweep) for n in WIDTHS)])
def test_every_width(columns):
    arguments = backward_inputs(2, columns, FP32, FP32, torch.float16)
    with careful_call(*arguments):
        results = layer_norm_backward(*arguments, FP32, torch.float16)
    assert_is_backward(results, *arguments, FP32, torch.float16)


def test_wide_rows_with_both_sums_have_a_kernel_of_their_own():
    """RMSNorm's kernel has registers for one sum. The wide rows' kernel walks one row at a time."""
    arguments = backward_inputs(2, 8200, torch.bfloat16)
    for plan, dweight, dbias in (
        (None, FP32, FP32),
        (None, FP32, None),
        (None, None, None),
        (Plan(True, 2, 16384, 32, 1, 1), FP32, FP32),
        (Plan(False, 1, 4096, 8, 3, 1), FP32, FP32),
    ):
        launch, *_ = layer_norm_backward_by_plan(*arguments, dweight, dbias, plan)[1]
        assert (launch.kernel is wide_rows_kernel) == (plan is None and dbias is not None)
    check(WIDE, backward_inputs(3, 100, FP32))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(True, 16, 128, 2, 2, 2),
        pytest.param(Plan(True, 1, 128, 2, 2, 5), marks=pytest.mark.sweep),
        pytest.param(Plan(False, 1, 32, 2, 2, 9), marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_every_plan(plan):
    """Many tiles for a program, and many programs. Without the sums, dx has the same bits."""
    arguments = backward_inputs(35, 100, FP32, FP32, FP32)
    dx, *_ = check(plan, arguments)
    alone, *_ = check(plan, arguments, None, None)
    torch.testing.assert_close(alone, dx, rtol=1e-6, atol=1e-6)


def test_more_partial_rows_than_are_summed_at_once(monkeypatch):
    monkeypatch.setattr(mxtrain.kernels.norm.partial_sums, "reduction_tile", lambda *sizes: (4, 8, 1))
    check(Plan(True, 1, 16, 1, 1, 11), backward_inputs(11, 13, FP32, FP32), FP32, torch.float16)


def test_one_launch_sums_both_gradients():
    arguments = backward_inputs(5, 100, FP32, FP32)
    for dweight, dbias, grids in ((FP32, FP32, [2, 2]), (FP32, None, [2, 1]), (None, FP32, [2, 1]), (None, None, [2])):
        _, launches = layer_norm_backward_by_plan(*arguments, dweight, dbias, HELD)
        assert [launch.grid[-1] for launch in launches] == grids


@VARIANTS
def test_the_same_bits_every_time(plan):
    arguments = backward_inputs(5, 100, *[torch.bfloat16] * 3)
    assert_same_results(run(plan, arguments), run(plan, arguments))


@VARIANTS
def test_ugly_rows(plan):
    """Large means, equal numbers, an outlier, huge and tiny rows."""
    dy, x, _, _, weight, dtotal = backward_inputs(9, 100, FP32, FP32, FP32)
    x[0], x[1], x[2], x[3] = draw(100) + 1e3, draw(100) - 3e4, 0, 1000.1
    x[4, 7], x[5], x[6] = 1e4, x[5] * 1e15, x[6] * 1e-15
    mean, rstd = (each.float() for each in statistics(x))
    check(plan, (dy, x, mean, rstd, weight, dtotal))
    # A constant along the row changes only the mean, and has no gradient.
    dy[7] = 1
    dx, *_ = run(plan, (dy, x, mean, rstd, None, None))
    assert dx[7].abs().max() <= 1e-5 * rstd[7]


@VARIANTS
@pytest.mark.parametrize("where", ["dy", "x"])
def test_what_is_not_finite_stays_in_its_row(where, plan):
    dy, x, mean, rstd, weight, _ = backward_inputs(5, 100, FP32, FP32)
    clean, *_ = run(plan, (dy, x, mean, rstd, weight, None))
    {"dy": dy, "x": x}[where][2, 0] = float("nan")
    dx, dweight, dbias = run(plan, (dy, x, mean, rstd, weight, None))
    assert not dx[2].isfinite().any() and dbias[0].isnan() == (where == "dy") and dbias[1:].isfinite().all()
    assert_same_results([dx[:2], dx[3:]], [clean[:2], clean[3:]])
    assert dweight[0].isnan() and dweight[1:].isfinite().all()


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [FP32, pytest.param(torch.bfloat16, marks=gpu_only)], ids=str)
def test_no_larger_an_error_than_torchs(dtype):
    """(The interpreter sums columns one number after another, where a GPU adds in pairs.)"""
    dy, x, mean, rstd, weight, _ = backward_inputs(60, 96, dtype, dtype)
    wants = autograd_in_fp64(dy, x, weight, None)
    leaves = [each.requires_grad_() for each in (x, weight, torch.zeros(96, dtype=dtype))]
    torchs = torch.autograd.grad(F.layer_norm(x, (96,), *leaves[1:], EPS), leaves, dy)
    results = layer_norm_backward(dy, x.detach(), mean, rstd, weight.detach(), None, dtype, dtype)
    for got, other, want in zip(results, torchs, wants):
        ours, theirs = ((t.double() - want).square().mean().sqrt() for t in (got, other))
        assert ours <= (3 if INTERPRETED and want.ndim == 1 else 1.05) * theirs


def test_layouts_and_no_rows():
    for layout, argument in zip(LAYOUTS, (0, 1, 4, 5)):
        arguments = list(backward_inputs(2, 40, *[torch.float16] * 3))
        arguments[argument] = layout(arguments[argument])
        results = layer_norm_backward(*arguments, FP32, FP32)
        assert_is_backward(results, *arguments, FP32, FP32)
    dx, dweight, dbias = layer_norm_backward(*backward_inputs(0, 96, torch.bfloat16, FP32), FP32, torch.float16)
    assert dx.shape == (0, 96) and not dweight.any() and not dbias.any() and dbias.dtype == torch.float16


def test_the_plan_is_layer_norms_own(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "mxtrain.kernels.norm.rms_norm_backward.choose_backward",
        lambda *args: asked.append(args[5]) or choose_backward(*args),
    )
    layer_norm_backward_by_plan(*backward_inputs(2, 40), None, None)
    assert asked == [LAYER_BACKWARD]


def test_bad_input(device):
    x, numbers = torch.ones(6, 96), torch.ones(6)
    for changed, message in (
        (dict(mean=torch.ones(5)), r"mean \(5,\) of torch.float32: expected \(6,\) of float32"),
        (dict(rstd=numbers.half()), r"rstd \(6,\) of torch.float16: expected \(6,\) of float32"),
        (dict(dy=torch.ones(6, 95)), r"dy \(6, 95\) on .* does not go with x \(6, 96\)"),
    ):
        with pytest.raises(ValueError, match=message):
            layer_norm_backward(**{**dict(dy=x, x=x, mean=numbers, rstd=numbers), **changed})


def test_custom_op_keeps_its_word():
    """Schema (no input is changed or returned) and fake (shapes, dtypes, strides)."""
    for dweight, dbias in ((torch.float16, FP32), (None, None)):
        arguments = (*backward_inputs(2, 40, *[torch.bfloat16] * 3), dweight, dbias)
        op = torch.ops.mxtrain.layer_norm_backward.default
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
