"""RMSNorm by kernel against the formula in fp64, element by element."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.kernels.norm.rms_norm import rms_norm, rms_norm_by_plan
from mxtrain.kernels.norm.rms_norm_plan import DTYPES, Plan, choose_forward
from tests.support.kernel_checks import LAYOUTS, assert_same_bits, assert_same_results, draw, gpu_only, kernel_tests
from tests.support.rms_norm_checks import (
    EPS,
    WIDTHS,
    assert_is_rms_norm,
    by_plan,
    check_forward,
    forward_inputs,
    pairs_of_dtypes,
)

pytestmark = kernel_tests

LOOPED = 16400
# Rows of 100 elements: held whole, and read twice in chunks.
HELD, CHUNKED = Plan(True, 4, 128, 1, 1, 3), Plan(False, 4, 64, 1, 1, 3)
VARIANTS = pytest.mark.parametrize("plan", [HELD, CHUNKED], ids=["held", "chunked"])
PLANS = [
    *(Plan(True, rows, 128, warps, 1, -(-35 // rows)) for rows, warps in ((1, 4), (2, 1), (16, 4), (32, 1))),
    *(Plan(False, rows, columns, 2, 1, -(-35 // rows)) for rows, columns in ((8, 16), (4, 64), (2, 128))),
]


def check_by_plan(x, weight, residual, plan, eps=EPS):
    y, rstd, *total = by_plan(rms_norm_by_plan, (x, residual, weight, eps), plan)
    assert_is_rms_norm((y, rstd, *(total or [x])), x, weight, residual, eps)


@VARIANTS
def test_every_dtype(plan):
    """Rows and columns are cut off."""
    for dtypes in pairs_of_dtypes(DTYPES):
        check_by_plan(*forward_inputs(5, 100, *dtypes), plan)


def test_every_width():
    for columns in (*WIDTHS, 65536):
        rows = min(3, max(1, 2**17 // columns))
        check_forward(*forward_inputs(rows, columns, torch.float32, torch.float32, torch.float16))


@settings(max_examples=10, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 700)),
    seed=st.integers(0, 2**31),
    dtypes=st.tuples(st.sampled_from(DTYPES), *[st.sampled_from([None, *DTYPES])] * 2),
)
def test_any_shape(shape, seed, dtypes):
    check_forward(*forward_inputs(*shape, *dtypes, seed=seed))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_plan(plan):
    check_by_plan(*forward_inputs(35, 100, torch.float32, torch.float32, torch.float32), plan)
    # Nothing is cut off.
    check_by_plan(*forward_inputs(plan.rows, 128, torch.float32), plan._replace(programs=1))


def test_the_launch_is_that_of_the_plan():
    x, weight, _ = forward_inputs(9, 100, weight_dtype=torch.float32)
    _, launch = rms_norm_by_plan(x, None, weight, EPS, HELD)
    assert launch.grid == (3,) and launch.constants["num_warps"] == 1 and not launch.constants["EXACT"]
    assert rms_norm_by_plan(x[:8], None, weight, EPS, HELD)[1].constants["EXACT"] is False, "columns are cut off"
    x = draw(8, 128)
    assert rms_norm_by_plan(x, None, None, EPS, HELD)[1].constants["EXACT"] is True
    _, launch = rms_norm_by_plan(x, None, None, EPS)
    plan = choose_forward(8, 128, x.dtype, x.device).plan
    constants = [launch.constants[name] for name in ("PERSISTENT", "ROWS", "COLUMNS", "num_warps")]
    assert constants == [plan.persistent, plan.rows, plan.columns, plan.warps]


@VARIANTS
def test_the_same_bits_every_time_and_whatever_the_other_rows(plan):
    x, weight, residual = forward_inputs(9, 100, torch.bfloat16, torch.bfloat16, torch.bfloat16)
    first = by_plan(rms_norm_by_plan, (x, residual, weight, EPS), plan)
    assert_same_results(by_plan(rms_norm_by_plan, (x, residual, weight, EPS), plan), first)
    alone = by_plan(rms_norm_by_plan, (x[3:4], residual[3:4], weight, EPS), plan._replace(rows=1, programs=1))
    torch.testing.assert_close(alone[0], first[0][3:4])


@VARIANTS
def test_ugly_rows(plan):
    """What is not finite stays in its row. Squares of 1e30 overflow, and rstd is 0, as in PyTorch."""
    x, weight, _ = forward_inputs(9, 100, torch.float32, torch.float32)
    clean, *_ = by_plan(rms_norm_by_plan, (x, None, weight, EPS), plan)
    x[2, 0], x[4, 99] = float("nan"), -float("inf")
    x[5] = 0
    for row, magnitude in ((6, 1e18), (7, 1e-18), (8, 1e30)):
        x[row] *= magnitude
    for eps in (EPS, 1e-38, 0.0):
        y, rstd, *_ = by_plan(rms_norm_by_plan, (x, None, weight, eps), plan)
        torch.testing.assert_close(y, F.rms_norm(x, (100,), weight, eps), rtol=1e-5, atol=0, equal_nan=True)
        assert rstd[8] == 0 and rstd[5].item() == pytest.approx(eps**-0.5 if eps else math.inf, rel=1e-6)
        assert y[2].isnan().all() and y[4, 99].isnan()
    y, *_ = by_plan(rms_norm_by_plan, (x, None, weight, EPS), plan)
    assert_same_bits(y[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=gpu_only)], ids=str)
def test_no_larger_an_error_than_torchs(dtype):
    """Of 300 rows: the error of rstd is one number per row. (The interpreter truncates to bf16.)"""
    x, weight, _ = forward_inputs(300, 96, dtype, dtype)
    want = F.rms_norm(x.double(), (96,), weight.double(), EPS)
    ours, torchs = (
        (y.double() - want).square().mean().sqrt()
        for y in (rms_norm(x, weight, EPS)[0], F.rms_norm(x, (96,), weight, EPS))
    )
    assert ours <= 1.05 * torchs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    for argument in range(3):
        arguments = list(forward_inputs(3, 96, torch.float16, torch.float16, torch.float16))
        arguments[argument] = layout(arguments[argument])
        check_forward(*arguments)


def test_no_rows():
    x, weight, residual = forward_inputs(0, 96, torch.bfloat16, torch.float32, torch.float32)
    y, rstd, total = rms_norm(x, weight, EPS, residual)
    assert y.shape == total.shape == (0, 96) and y.dtype == total.dtype == torch.bfloat16
    assert rstd.shape == (0,) and rstd.dtype == torch.float32


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(x=torch.ones(96)), r"x \(96,\): expected a matrix"),
        (dict(x=torch.ones(2, 6, 96)), r"x \(2, 6, 96\): expected a matrix"),
        (dict(x=torch.ones(6, 0)), r"x \(6, 0\): expected rows of 1 to 65536 elements"),
        (dict(x=torch.ones(2, 65537)), r"x \(2, 65537\): expected rows of 1 to 65536 elements"),
        (dict(x=torch.ones(6, 96).double()), r"dtype torch.float64 of x \(6, 96\): expected bfloat16 or float16 or"),
        (dict(x=torch.ones(6, 96).int()), r"dtype torch.int32 of x \(6, 96\)"),
        (dict(weight=torch.ones(95)), r"weight \(95,\) of torch.float32: expected \(96,\)"),
        (dict(weight=torch.ones(1, 96)), r"weight \(1, 96\)"),
        (dict(weight=torch.ones(96).double()), r"weight \(96,\) of torch.float64"),
        (dict(residual=torch.ones(96)), r"residual \(96,\): expected a matrix"),
        (dict(residual=torch.ones(1, 96)), r"residual \(1, 96\) on .* does not go with x \(6, 96\)"),
        (dict(residual=torch.ones(6, 96).double()), r"dtype torch.float64 of residual \(6, 96\)"),
    ],
    ids=str,
)
def test_bad_input(device, changed, message):
    arguments = dict(x=torch.ones(6, 96), weight=torch.ones(96), eps=EPS, residual=torch.ones(6, 96))
    with pytest.raises(ValueError, match=message):
        rms_norm(**{**arguments, **{name: t.to(device) for name, t in changed.items()}})


@pytest.mark.parametrize("residual_dtype", [None, torch.float32])
def test_compiles_without_a_graph_break(residual_dtype, compile_backend):
    def run(x, weight, residual):
        y, rstd, total = rms_norm(x + x, weight, EPS, residual)
        return y * 2, rstd * 2, total * 2

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for rows in (2, 3, 5):  # from the second call on the number of rows is symbolic
        with torch.compiler.set_stance("fail_on_recompile" if rows == 5 else "default"):
            arguments = forward_inputs(rows, 96, torch.float32, torch.float32, residual_dtype)
            got = compiled(*arguments)
        assert_same_results(got, run(*arguments))


def test_custom_op_keeps_its_word():
    """Schema (no input is changed or returned) and fake (shapes, dtypes, strides)."""
    for weight_dtype, residual_dtype in ((None, torch.float32), (torch.float32, None)):
        x, weight, residual = forward_inputs(2, 96, torch.bfloat16, weight_dtype, residual_dtype)
        torch.library.opcheck(
            torch.ops.mxtrain.rms_norm.default,
            (x, residual, weight, EPS),
            test_utils=("test_schema", "test_faketensor"),
        )


@gpu_only
def test_past_32_bit_offsets(huge):
    (rows, columns), x = huge.shape, huge
    weight = draw(columns)
    y, rstd, _ = rms_norm(x, weight, EPS)
    for some in (slice(0, 32), slice(2**31 // columns - 32, 2**31 // columns + 32), slice(rows - 48, rows)):
        part = x[some]
        assert_is_rms_norm((y[some], rstd[some], part), part, weight, None)
