"""RMSNorm by kernel against the formula in fp64, element by element."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import LAYOUTS, assert_same_bits, assert_same_results, draw, gpu_only, kernel_tests
from rms_norm_checks import (
    EPS,
    WIDTHS,
    assert_is_rms_norm,
    by_plan,
    check_forward,
    forward_inputs,
)

from mxtrain.kernels.norm.rms_norm import rms_norm, rms_norm_by_plan
from mxtrain.kernels.norm.rms_norm_plan import DTYPES, Plan

pytestmark = kernel_tests

LOOPED = 16400
PLANS = [
    *(Plan(True, rows, 128, warps, 1, -(-70 // rows)) for rows in (1, 2, 16, 64) for warps in (1, 4)),
    *(Plan(False, rows, columns, 2, 1, -(-70 // rows)) for rows in (1, 4) for columns in (16, 32, 64, 128)),
]


@pytest.mark.parametrize("residual_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("weight_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(37, 96), (2, LOOPED)], ids=str)
def test_every_dtype(shape, dtype, weight_dtype, residual_dtype):
    check_forward(*forward_inputs(*shape, dtype, weight_dtype, residual_dtype))


@pytest.mark.parametrize("columns", [*WIDTHS, 65536])
@pytest.mark.parametrize("rows", [1, 9])
def test_every_width(rows, columns):
    check_forward(*forward_inputs(min(rows, max(1, 2**17 // columns)), columns, torch.float32, torch.float32))
    check_forward(*forward_inputs(1, columns, torch.float16, torch.float16, torch.float16))


def test_many_rows():
    check_forward(*forward_inputs(3000, 3, torch.float32, torch.float32))


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 700)),
    seed=st.integers(0, 2**31),
    dtypes=st.tuples(st.sampled_from(DTYPES), *[st.sampled_from([None, *DTYPES])] * 2),
)
def test_any_shape(shape, seed, dtypes):
    check_forward(*forward_inputs(*shape, *dtypes, seed=seed))


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("residual_dtype", [None, torch.float32], ids=str)
def test_every_plan(plan, residual_dtype):
    x, weight, residual = forward_inputs(70, 100, torch.float32, torch.float32, residual_dtype)
    y, rstd, *total = by_plan(rms_norm_by_plan, (x, residual, weight, EPS), plan)
    assert_is_rms_norm((y, rstd, *(total or [x])), x, weight, residual)


@pytest.mark.parametrize("columns", [96, LOOPED])
def test_the_same_bits_every_time_and_whatever_the_other_rows(columns):
    x, weight, residual = forward_inputs(5, columns, torch.bfloat16, torch.bfloat16, torch.bfloat16)
    first = rms_norm(x, weight, EPS, residual)
    for _ in range(3):
        assert_same_results(rms_norm(x, weight, EPS, residual), first)
    alone = rms_norm(x[3:4], weight, EPS, residual[3:4])
    torch.testing.assert_close(alone[0], first[0][3:4])


@pytest.mark.parametrize("columns", [96, LOOPED])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad, columns):
    x, weight, _ = forward_inputs(5, columns, torch.float32, torch.float32)
    clean, _, _ = rms_norm(x, weight, EPS)
    x[2, 0] = bad
    y, _, _ = rms_norm(x, weight, EPS)
    assert y[2, 0].isnan()
    assert_same_bits(y[:2], clean[:2])
    assert_same_bits(y[3:], clean[3:])


@pytest.mark.parametrize("columns", [96, LOOPED])
def test_zero_rows(columns):
    x = torch.zeros(3, columns)
    y, rstd, _ = rms_norm(x, torch.ones(columns), EPS)
    assert_same_bits(y, x)
    torch.testing.assert_close(rstd, torch.full((3,), EPS**-0.5))
    assert rms_norm(x, None, 0.0)[1].isinf().all()


@pytest.mark.parametrize("magnitude", [1e18, 1e-18, 1e30])
def test_huge_and_tiny_rows_are_as_torch_has_them(magnitude):
    """The squares of 1e30 overflow: rstd is 0, here as there."""
    x, weight, _ = forward_inputs(5, 96, torch.float32, torch.float32)
    x *= magnitude
    for eps in (EPS, 1e-38):
        y, rstd, _ = rms_norm(x, weight, eps)
        torch.testing.assert_close(y, F.rms_norm(x, (96,), weight, eps), rtol=1e-5, atol=0)
        assert (rstd == 0).all() == (magnitude == 1e30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=gpu_only)], ids=str)
@pytest.mark.parametrize("columns", [96, 1000])
def test_no_larger_an_error_than_torchs(columns, dtype):
    """(The interpreter truncates to bf16.)"""
    x, weight, _ = forward_inputs(100, columns, dtype, dtype)
    want = F.rms_norm(x.double(), (columns,), weight.double(), EPS)
    ours, torchs = (
        (y.double() - want).square().mean().sqrt()
        for y in (rms_norm(x, weight, EPS)[0], F.rms_norm(x, (columns,), weight, EPS))
    )
    assert ours <= 1.05 * torchs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("argument", range(3))
def test_layouts(argument, layout):
    arguments = list(forward_inputs(35, 96, torch.float16, torch.float16, torch.float16))
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
    for rows in (5, 9, 33):  # from the second on the row count is symbolic
        with torch.compiler.set_stance("fail_on_recompile" if rows == 33 else "default"):
            arguments = forward_inputs(rows, 96, torch.float32, torch.float32, residual_dtype)
            got = compiled(*arguments)
        assert_same_results(got, run(*arguments))


@pytest.mark.parametrize("residual_dtype", [None, torch.float32])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_custom_op_keeps_its_word(weight_dtype, residual_dtype):
    """Schema (no input is changed or returned) and fake (shapes, dtypes, strides)."""
    x, weight, residual = forward_inputs(5, 96, torch.bfloat16, weight_dtype, residual_dtype)
    torch.library.opcheck(
        torch.ops.mxtrain.rms_norm.default, (x, residual, weight, EPS), test_utils=("test_schema", "test_faketensor")
    )


@gpu_only
def test_past_32_bit_offsets():
    rows, columns = 524304, 4128
    x, weight = torch.randn(rows, columns, dtype=torch.bfloat16), draw(columns)
    y, rstd, _ = rms_norm(x, weight, EPS)
    for some in (slice(0, 32), slice(2**31 // columns - 32, 2**31 // columns + 32), slice(rows - 48, rows)):
        part = x[some]
        assert_is_rms_norm((y[some], rstd[some], part), part, weight, None)
