"""RMSNorm and LayerNorm by kernel against the formula in fp64, element by element."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.norms import reference
from mxtrain.norms.kernels import Plan, row_norm
from tests.support.kernel_checks import LAYOUTS, assert_same_results, careful_call, draw, gpu_only, kernel_tests
from tests.support.row_norm_checks import (
    EPS,
    NORMS,
    WIDTHS,
    assert_is_norm,
    forward_by_plan,
    forward_inputs,
    pairs_of_dtypes,
)

pytestmark = kernel_tests

FP32 = torch.float32
DTYPES = (torch.bfloat16, torch.float16, FP32)
# Rows of 100 elements: held whole, and read twice in chunks, the last of which is cut off.
HELD, CHUNKED = Plan(True, 4, 128, 1, 1, 3), Plan(False, 4, 32, 1, 1, 3)
VARIANTS = pytest.mark.parametrize("plan", [HELD, CHUNKED], ids=["held", "chunked"])


def check_by_plan(plan, centered, x, weight=None, bias=None, residual=None, eps=EPS):
    results = forward_by_plan(plan, centered, x, weight, bias, residual, eps)
    assert_is_norm(results, centered, x, weight, bias, residual, eps)
    return results


def check(centered, x, weight=None, bias=None, residual=None):
    with careful_call(x, weight, bias, residual):
        results = row_norm(x, weight, bias, EPS, residual, centered)
    assert_is_norm(results, centered, x, weight, bias, residual)


@NORMS
@VARIANTS
def test_every_dtype_with_and_without_weight_bias_and_residual(plan, centered):
    """Rows and columns are cut off."""
    for index, (dtype, weight, residual) in enumerate(pairs_of_dtypes(DTYPES)):
        bias = (None, *DTYPES)[(index + index // 4) % 4] if centered else None
        check_by_plan(plan, centered, *forward_inputs(centered, 5, 100, dtype, weight, bias, residual))


@NORMS
def test_every_width(centered):
    for columns in (*WIDTHS, 65536):
        rows = min(3, max(1, 2**17 // columns))
        check(centered, *forward_inputs(centered, rows, columns, FP32, FP32, FP32 if centered else None, torch.float16))


@settings(max_examples=10, deadline=None)
@given(
    centered=st.booleans(),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 700)),
    seed=st.integers(0, 2**31),
    dtypes=st.tuples(st.sampled_from(DTYPES), *[st.sampled_from([None, *DTYPES])] * 3),
)
def test_any_shape(centered, shape, seed, dtypes):
    check(centered, *forward_inputs(centered, *shape, *dtypes, seed=seed))


@NORMS
@VARIANTS
def test_the_same_bits_every_time_and_whatever_the_other_rows(plan, centered):
    x, weight, bias, residual = forward_inputs(centered, 9, 100, *[torch.bfloat16] * 4)
    first = forward_by_plan(plan, centered, x, weight, bias, residual)
    assert_same_results(forward_by_plan(plan, centered, x, weight, bias, residual), first)
    single = plan._replace(rows=1, programs=1)
    alone = forward_by_plan(single, centered, x[3:4], weight, bias, residual[3:4])
    torch.testing.assert_close(alone[0], first[0][3:4])


@VARIANTS
def test_ugly_rows_of_rms_norm(plan):
    """What is not finite stays in its row. Squares of 1e30 overflow, and rstd is 0, as in PyTorch."""
    x, weight, _, _ = forward_inputs(False, 9, 100, weight=FP32)
    clean, *_ = forward_by_plan(plan, False, x, weight)
    x[2, 0], x[4, 99] = float("nan"), -float("inf")
    x[5] = 0
    for row, magnitude in ((6, 1e18), (7, 1e-18), (8, 1e30)):
        x[row] *= magnitude
    for eps in (EPS, 1e-38, 0.0):
        y, _, rstd, _ = forward_by_plan(plan, False, x, weight, eps=eps)
        torch.testing.assert_close(y, F.rms_norm(x, (100,), weight, eps), rtol=1e-5, atol=0, equal_nan=True)
        assert rstd[8] == 0 and rstd[5].item() == pytest.approx(eps**-0.5 if eps else math.inf, rel=1e-6)
        assert y[2].isnan().all() and y[4, 99].isnan()
    y, *_ = forward_by_plan(plan, False, x, weight)
    assert_same_results([y[[0, 1, 3]]], [clean[[0, 1, 3]]])


@VARIANTS
def test_a_large_mean_costs_the_variance_no_digits(plan):
    """mean(x^2) - mean(x)^2 would lose all digits: at a mean of 3e4 its error is larger than the variance, 1."""
    for dtype, mean in ((FP32, 1e3), (FP32, -3e4), (torch.float16, 1e3)):
        x = (draw(9, 100) + mean).to(dtype)
        _, _, rstd, _ = check_by_plan(plan, True, x, draw(100, seed=1))
        want = 1 / (x.double().var(1, correction=0) + EPS).sqrt()
        torch.testing.assert_close(rstd.double(), want, rtol=5e-7, atol=0)


@VARIANTS
def test_a_row_of_equal_numbers_becomes_the_bias(plan):
    """1 / sqrt(eps) multiplies the rounding error of the mean, unless this error cancels."""
    x = torch.tensor([0.0, 1000.1, -0.3, 7.7e8, 1e-30]).repeat_interleave(100).view(5, 100)
    y, mean, rstd, _ = forward_by_plan(plan, True, x, draw(100), draw(100, seed=1), eps=1e-8)
    assert_same_results((y, mean), (draw(100, seed=1).expand(5, 100).contiguous(), x[:, 0].contiguous()))
    variance = 1 / rstd.double() ** 2 - 1e-8
    # A GPU's mean may be off by one ulp, whose squares cancel to their rounding error.
    rounding = 2.0**-24 * (2.0**-23 * x[:, 0].double()) ** 2 if x.is_cuda else 0
    assert (variance.abs() <= 1e-14 + rounding).all()


@VARIANTS
def test_ugly_rows_of_layer_norm(plan):
    """Outliers and heavy tails. What is not finite stays in its row. Squares of 1e30 overflow, and rstd is 0."""
    x, weight, bias = draw(9, 100), draw(100, seed=1), draw(100, seed=2)
    x[0, 0], x[1, 50], x[2, 99] = 1e4, -1e4, 1e6
    x[3:6] /= torch.linspace(1e-3, 1, 100) ** 2
    x[6], x[7], x[8] = x[6] * 1e15, x[7] * 1e-15, x[8] * 1e-30
    clean = check_by_plan(plan, True, x, weight, bias)
    x[2, 0], x[4, 99], x[5] = float("nan"), -float("inf"), draw(100, seed=3) * 1e30
    y, mean, rstd, _ = forward_by_plan(plan, True, x, weight, bias)
    assert y[[2, 4]].isnan().all() and rstd[2].isnan() and rstd[5] == 0
    assert_same_results([y[5]], [bias])
    others = [0, 1, 3, 6, 7, 8]
    assert_same_results([each[others] for each in (y, mean, rstd)], [each[others] for each in clean[:3]])


@VARIANTS
def test_the_largest_rows_of_layer_norm_as_in_the_reference(plan):
    """The documented limits: 1e18 for rows of 100, then the bias, then NaN."""
    weight, bias, sign = draw(100, seed=1), draw(100, seed=2), torch.arange(100) % 2 * 2.0 - 1
    x = torch.stack([1e18 * sign, 1e20 * sign, 1e36 * sign, 3e38 * sign.clamp(min=0)])
    y, mean, rstd, _ = forward_by_plan(plan, True, x, weight, bias)
    expected = reference.row_norm(x, weight, bias, EPS, None, True)
    for got, want in zip((y, mean, rstd), expected):
        torch.testing.assert_close(got[:3], want[:3], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(y[0], sign * weight + bias, rtol=1e-6, atol=1e-6)
    assert_same_results([y[1], y[2]], [bias, bias])
    assert y[3].isnan().all() and expected[0][3].isnan().all() and (rstd[1:3] == 0).all()


@NORMS
@pytest.mark.parametrize("dtype", [FP32, torch.float16, pytest.param(torch.bfloat16, marks=gpu_only)], ids=str)
def test_no_larger_an_error_than_torchs(dtype, centered):
    """Of 300 rows: the error of rstd is one number per row. (The interpreter truncates to bf16.)"""
    x, weight, bias, _ = forward_inputs(centered, 300, 96, dtype, dtype, dtype if centered else None)

    def torchs(*tensors):
        x, *vectors = tensors
        return F.layer_norm(x, (96,), *vectors, EPS) if centered else F.rms_norm(x, (96,), vectors[0], EPS)

    want = torchs(x.double(), weight.double(), None if bias is None else bias.double())
    ours, theirs = (
        (y.double() - want).square().mean().sqrt()
        for y in (row_norm(x, weight, bias, EPS, None, centered)[0], torchs(x, weight, bias))
    )
    assert ours <= 1.05 * theirs


@NORMS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, centered):
    for argument in range(4):
        arguments = list(forward_inputs(centered, 3, 96, *[torch.float16] * 4))
        arguments[argument] = layout(arguments[argument])
        check(centered, *arguments)


@NORMS
def test_no_rows(centered):
    x, weight, bias, residual = forward_inputs(centered, 0, 96, torch.bfloat16, FP32, FP32, FP32)
    y, mean, rstd, total = row_norm(x, weight, bias, EPS, residual, centered)
    assert y.shape == total.shape == (0, 96) and y.dtype == total.dtype == torch.bfloat16
    for numbers in (rstd, mean) if centered else (rstd,):
        assert numbers.shape == (0,) and numbers.dtype == FP32


def test_longer_rows_are_refused(device):
    with pytest.raises(ValueError, match=r"x has shape \(2, 65537\); .* at most 65536"):
        row_norm(torch.ones(2, 65537), None, None, EPS, None, True)


@NORMS
def test_compiles_without_a_graph_break_for_any_number_of_rows(centered, compile_backend):
    residual_dtype = None if centered else FP32

    def run(x, weight, bias, residual):
        results = row_norm(x + x, weight, bias, EPS, residual, centered)
        return [None if result is None else result * 2 for result in results]

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for rows in (2, 3, 5):  # from the second call on the number of rows is symbolic
        with torch.compiler.set_stance("fail_on_recompile" if rows == 5 else "default"):
            arguments = forward_inputs(centered, rows, 96, FP32, FP32, FP32, residual_dtype)
            got = compiled(*arguments)
        assert_same_results(got, run(*arguments))


@NORMS
def test_custom_op_keeps_its_word(centered):
    """Schema (no input is changed or returned) and fake (shapes, dtypes, strides)."""
    for weight_dtype, residual_dtype in ((None, FP32), (FP32, None)):
        x, weight, bias, residual = forward_inputs(
            centered, 2, 96, torch.bfloat16, weight_dtype, weight_dtype, residual_dtype
        )
        torch.library.opcheck(
            torch.ops.mxtrain.row_norm.default,
            (x, residual, weight, bias, EPS, centered),
            test_utils=("test_schema", "test_faketensor"),
        )


@gpu_only
def test_past_32_bit_offsets(huge):
    (rows, columns), x = huge.shape, huge
    weight = draw(columns)
    y, _, rstd, _ = row_norm(x, weight, None, EPS, None, False)
    for some in (slice(0, 32), slice(2**31 // columns - 32, 2**31 // columns + 32), slice(rows - 48, rows)):
        part = x[some]
        assert_is_norm((y[some], None, rstd[some], part), False, part, weight, None, None)
