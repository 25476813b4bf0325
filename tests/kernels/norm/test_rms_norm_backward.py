"""The backward of RMSNorm by kernel against fp64 autograd of the plain formula, element by element."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import LAYOUTS, assert_same_bits, assert_same_results, draw, gpu_only, kernel_tests
from rms_norm_checks import (
    EPS,
    WIDTHS,
    assert_is_backward,
    autograd_in_fp64,
    backward_inputs,
    by_plan,
    check_backward,
    exact_rstd,
)

import mxtrain.kernels.norm.rms_norm_backward
from mxtrain.kernels.device import INTERPRETED
from mxtrain.kernels.norm.rms_norm_backward import rms_norm_backward, rms_norm_backward_by_plan
from mxtrain.kernels.norm.rms_norm_plan import DTYPES, Plan

pytestmark = kernel_tests

FP32 = torch.float32
LOOPED = 16400
PLANS = [
    *(Plan(True, rows, 128, 2, 1 + rows % 3, programs) for rows in (1, 2, 16, 64) for programs in (1, 2, 5, 70)),
    *(Plan(False, rows, 64, 2, 2, programs) for rows in (1, 4) for programs in (1, 5, 70)),
    *(Plan(False, 2, columns, 2, 1, 9) for columns in (16, 128)),
]


@pytest.mark.parametrize("dtotal_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("weight_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype, weight_dtype, dtotal_dtype):
    for dy_dtype in DTYPES:
        check_backward(*backward_inputs(37, 96, dtype, weight_dtype, dtotal_dtype, dy_dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_rows_that_are_read_twice(dtype):
    check_backward(*backward_inputs(2, LOOPED, dtype, dtype, dtype, dtype))
    check_backward(*backward_inputs(2, LOOPED, dtype, FP32))


@pytest.mark.parametrize("columns", [*WIDTHS, 65536])
@pytest.mark.parametrize("rows", [1, 9])
def test_every_width(rows, columns):
    rows = min(rows, max(1, 2**17 // columns))
    check_backward(*backward_inputs(rows, columns, FP32, FP32, FP32))
    check_backward(*backward_inputs(rows, columns, torch.float16, torch.float16))
    check_backward(*backward_inputs(rows, columns))


def test_no_more_is_loaded_ahead_than_fits(monkeypatch):
    """Whatever the plan says: a shape may have been tuned on fewer or narrower tensors. As of an H100."""
    monkeypatch.setattr(mxtrain.kernels.norm.rms_norm_backward, "shared_memory", lambda device: 227 * 1024)

    def stages(plan, dtype, weight_dtype, dtotal_dtype, columns):
        dy, x, rstd, weight, dtotal = backward_inputs(2, columns, dtype, weight_dtype, dtotal_dtype)
        (walk, _) = rms_norm_backward_by_plan(dy, x, rstd, weight, dtotal, True, plan)[1]
        return walk.constants["STAGES"]

    held = Plan(True, 1, 8192, 8, 6, 2)
    assert stages(held, torch.bfloat16, torch.bfloat16, None, 8192) == 6, "five tiles of 32 KiB"
    assert stages(held, torch.bfloat16, torch.bfloat16, torch.bfloat16, 8192) == 5, "four of 48"
    assert stages(held, FP32, torch.bfloat16, FP32, 8192) == 3, "two of 96"
    looped = Plan(False, 1, 4096, 8, 6, 2)
    assert stages(looped, torch.bfloat16, torch.bfloat16, None, LOOPED) == 6, "five chunks of 40 KiB"
    assert stages(looped, torch.bfloat16, FP32, torch.bfloat16, LOOPED) == 4, "three of 56"


@pytest.mark.parametrize("shape", [(17500, 3), (1200, 257)], ids=str)
def test_many_rows(shape):
    """More tiles than programs."""
    check_backward(*backward_inputs(*shape, FP32, FP32))


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 700)),
    seed=st.integers(0, 2**31),
    dtypes=st.tuples(st.sampled_from(DTYPES), *[st.sampled_from([None, *DTYPES])] * 2, st.sampled_from(DTYPES)),
)
def test_any_shape(shape, seed, dtypes):
    check_backward(*backward_inputs(*shape, *dtypes, seed=seed))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_plan(plan):
    """Each within a few roundings of fp64, and so of the others; dx, which no two rows share, more closely."""
    arguments = backward_inputs(70, 100, FP32, FP32, FP32)
    results = by_plan(rms_norm_backward_by_plan, (*arguments, True), plan)
    assert_is_backward(results, *arguments)
    torch.testing.assert_close(results[0], rms_norm_backward(*arguments)[0], rtol=1e-5, atol=1e-6)
    (dx,) = by_plan(rms_norm_backward_by_plan, (*arguments, False), plan)
    torch.testing.assert_close(dx, results[0], rtol=1e-6, atol=1e-6)


def test_more_partial_rows_than_are_summed_at_once():
    arguments = backward_inputs(600, 5, FP32, FP32)
    plan = Plan(True, 1, 8, 1, 1, 600)
    _, launches = rms_norm_backward_by_plan(*arguments, True, plan)
    assert launches[1].constants["PROGRAMS"] < 600
    assert_is_backward(by_plan(rms_norm_backward_by_plan, (*arguments, True), plan), *arguments)


@pytest.mark.parametrize("columns", [96, LOOPED])
def test_dweight_that_is_not_wanted(columns):
    check_backward(*backward_inputs(5, columns, FP32, FP32, FP32), needs_dweight=False)
    _, launches = rms_norm_backward_by_plan(*backward_inputs(5, columns, FP32, FP32), False)
    assert [launch.constants["DWEIGHT"] for launch in launches] == [False]


@pytest.mark.parametrize("shape", [(300, 96), (9, 4096), (3, LOOPED)], ids=str)
def test_the_same_bits_every_time(shape):
    arguments = backward_inputs(*shape, torch.bfloat16, torch.bfloat16, torch.bfloat16)
    first = rms_norm_backward(*arguments)
    for _ in range(3):
        assert_same_results(rms_norm_backward(*arguments), first)


@pytest.mark.parametrize("columns", [96, LOOPED])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["dy", "x", "rstd"])
def test_what_is_not_finite_stays_in_its_row(where, bad, columns):
    dy, x, rstd, weight, _ = backward_inputs(5, columns, FP32, FP32)
    clean, _ = rms_norm_backward(dy, x, rstd, weight)
    {"dy": dy[2], "x": x[2], "rstd": rstd[2:]}[where][0] = bad
    dx, dweight = rms_norm_backward(dy, x, rstd, weight)
    assert not dx[2].isfinite().any()
    assert_same_bits(dx[:2], clean[:2])
    assert_same_bits(dx[3:], clean[3:])
    assert not dweight[0].isfinite() and dweight[1:].isfinite().all() == (where != "rstd")


@pytest.mark.parametrize("columns", [96, LOOPED])
def test_zero_rows(columns):
    dy, x, _, weight, dtotal = backward_inputs(4, columns, FP32, FP32, FP32)
    x[0] = 0
    check_backward(dy, x, exact_rstd(x).float(), weight, dtotal)
    dy[1] = 0
    dx, _ = rms_norm_backward(dy, x, exact_rstd(x).float(), weight, dtotal)
    assert_same_bits(dx[1], dtotal[1])


@pytest.mark.parametrize("columns", [96, LOOPED])
@pytest.mark.parametrize("magnitude", [1e18, 1e-18])
def test_huge_and_tiny_rows(magnitude, columns):
    """Against fp64 and not torch, whose rstd^3 underflows to 0 on a CPU."""
    dy, x, _, weight, _ = backward_inputs(5, columns, FP32, FP32)
    x *= magnitude
    check_backward(dy, x, exact_rstd(x).float(), weight)


@pytest.mark.parametrize("columns", [96, LOOPED])
def test_rows_whose_squares_overflow(columns):
    """The forward's rstd is 0: so are the gradients."""
    dy, x, rstd, weight, _ = backward_inputs(5, columns, FP32, FP32)
    for gradient in rms_norm_backward(dy, x * 1e30, rstd * 0, weight):
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [FP32, torch.float16, pytest.param(torch.bfloat16, marks=gpu_only)], ids=str)
@pytest.mark.parametrize("shape", [(300, 96), (100, 1000), (4, 16400)], ids=str)
def test_no_larger_an_error_than_torchs(shape, dtype):
    """(The interpreter truncates to bf16, and adds up columns one number after another, where a GPU adds in pairs.)"""
    dy, x, rstd, weight, _ = backward_inputs(*shape, dtype, dtype)
    wants = autograd_in_fp64(dy, x, weight, None)
    leaves = x.requires_grad_(), weight.requires_grad_()
    torchs = torch.autograd.grad(F.rms_norm(x, shape[1:], weight, EPS), leaves, dy)
    for got, other, want in zip(rms_norm_backward(dy, x.detach(), rstd, weight.detach()), torchs, wants):
        ours, theirs = ((t.double() - want).square().mean().sqrt() for t in (got, other))
        assert ours <= (2 if INTERPRETED and dtype == FP32 and want.ndim == 1 else 1.05) * theirs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("argument", range(5))
def test_layouts(argument, layout):
    arguments = list(backward_inputs(35, 96, torch.float16, torch.float16, torch.float16))
    arguments[argument] = layout(arguments[argument])
    check_backward(*arguments)


@pytest.mark.parametrize("weight_dtype", [None, *DTYPES], ids=str)
def test_no_rows(weight_dtype):
    arguments = backward_inputs(0, 96, torch.bfloat16, weight_dtype, FP32)
    dx, dweight = rms_norm_backward(*arguments)
    assert dx.shape == (0, 96) and dx.dtype == torch.bfloat16
    if weight_dtype is None:
        assert dweight is None
    else:
        assert_same_bits(dweight, torch.zeros(96, dtype=weight_dtype))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(x=torch.ones(96)), r"x \(96,\): expected a matrix"),
        (dict(x=torch.ones(6, 0)), r"x \(6, 0\): expected rows of 1 to 65536 elements"),
        (dict(x=torch.ones(2, 65537)), r"x \(2, 65537\): expected rows of 1 to 65536 elements"),
        (dict(x=torch.ones(6, 96).double()), r"dtype torch.float64 of x \(6, 96\): expected bfloat16 or float16 or"),
        (dict(dy=torch.ones(6, 95)), r"dy \(6, 95\) on .* does not go with x \(6, 96\)"),
        (dict(dy=torch.ones(6, 96).int()), r"dtype torch.int32 of dy \(6, 96\)"),
        (dict(dtotal=torch.ones(96)), r"dtotal \(96,\): expected a matrix"),
        (dict(dtotal=torch.ones(1, 96)), r"dtotal \(1, 96\) on .* does not go with x \(6, 96\)"),
        (dict(rstd=torch.ones(5)), r"rstd \(5,\) of torch.float32: expected \(6,\) of float32"),
        (dict(rstd=torch.ones(6, 1)), r"rstd \(6, 1\)"),
        (dict(rstd=torch.ones(6).bfloat16()), r"rstd \(6,\) of torch.bfloat16"),
        (dict(weight=torch.ones(95)), r"weight \(95,\) of torch.float32: expected \(96,\)"),
        (dict(weight=torch.ones(1, 96)), r"weight \(1, 96\)"),
        (dict(weight=torch.ones(96).double()), r"weight \(96,\) of torch.float64"),
    ],
    ids=str,
)
def test_bad_input(device, changed, message):
    ones = torch.ones(6, 96)
    arguments = dict(dy=ones, x=ones, rstd=torch.ones(6), weight=torch.ones(96), dtotal=ones)
    with pytest.raises(ValueError, match=message):
        rms_norm_backward(**{**arguments, **{name: t.to(device) for name, t in changed.items()}})


@pytest.mark.parametrize("weight_dtype", [None, FP32])
def test_compiles_without_a_graph_break(weight_dtype, compile_backend):
    def run(dy, x, rstd, weight, dtotal):
        dx, dweight = rms_norm_backward(dy + dy, x, rstd, weight, dtotal)
        return dx * 2, dweight if dweight is None else dweight * 2

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for rows in (5, 9, 33):  # from the second on the row count is symbolic
        arguments = backward_inputs(rows, 96, FP32, weight_dtype, FP32)
        with torch.compiler.set_stance("fail_on_recompile" if rows == 33 else "default"):
            got = compiled(*arguments)
        assert_same_results(got, run(*arguments))


@pytest.mark.parametrize("needs_dweight", [True, False])
@pytest.mark.parametrize("dtotal_dtype", [None, FP32])
def test_custom_op_keeps_its_word(dtotal_dtype, needs_dweight):
    """Schema (no input is changed or returned) and fake (shapes, dtypes, strides)."""
    arguments = backward_inputs(5, 96, torch.bfloat16, torch.bfloat16, dtotal_dtype)
    torch.library.opcheck(
        torch.ops.mxtrain.rms_norm_backward.default,
        (*arguments, needs_dweight),
        test_utils=("test_schema", "test_faketensor"),
    )


@gpu_only
def test_past_32_bit_offsets():
    rows, columns = 524304, 4128
    x, weight = torch.randn(rows, columns, dtype=torch.bfloat16), draw(columns)
    rstd = torch.linalg.vector_norm(x, dim=1, dtype=FP32).square().div(columns).add(EPS).rsqrt()
    dx, dweight = rms_norm_backward(x, x, rstd, weight)
    for some in (slice(0, 32), slice(2**31 // columns - 32, 2**31 // columns + 32), slice(rows - 48, rows)):
        assert_is_backward((dx[some], None), x[some], x[some], rstd[some], weight, None, needs_dweight=False)
    want = sum(
        (part.double().square() * r[:, None]).sum(0) for part, r in zip(x.split(65536), rstd.double().split(65536))
    )
    torch.testing.assert_close(dweight.double(), want, rtol=1e-5, atol=0)
