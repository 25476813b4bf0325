"""The backward of RMSNorm by kernel against fp64 autograd of the plain formula, element by element."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import mxtrain.kernels.norm.partial_sums
import mxtrain.kernels.norm.rms_norm_backward
from mxtrain.kernels.device import INTERPRETED
from mxtrain.kernels.norm.rms_norm_backward import rms_norm_backward, rms_norm_backward_by_plan
from mxtrain.kernels.norm.rms_norm_plan import DTYPES, Plan, choose_backward
from tests.support.kernel_checks import LAYOUTS, assert_same_bits, assert_same_results, draw, gpu_only, kernel_tests
from tests.support.rms_norm_checks import (
    EPS,
    WIDTHS,
    assert_is_backward,
    autograd_in_fp64,
    backward_inputs,
    by_plan,
    check_backward,
    exact_rstd,
    pairs_of_dtypes,
)

pytestmark = kernel_tests

FP32 = torch.float32
LOOPED = 16400
# Rows of 100 elements: held whole, and read twice in chunks; programs walk two tiles, the last tile is cut off.
HELD, CHUNKED = Plan(True, 2, 128, 1, 2, 2), Plan(False, 2, 64, 1, 2, 2)
VARIANTS = pytest.mark.parametrize("plan", [HELD, CHUNKED], ids=["held", "chunked"])
PLANS = [
    *(Plan(True, rows, 128, 2, 1 + rows % 3, programs) for rows, programs in ((1, 5), (2, 1), (16, 2), (64, 1))),
    *(Plan(False, rows, columns, 2, 2, programs) for rows, columns, programs in ((1, 64, 5), (4, 16, 1), (2, 128, 9))),
]


def check_by_plan(arguments, plan, needs_dweight=True):
    *_, weight, _ = arguments
    results = by_plan(rms_norm_backward_by_plan, (*arguments, needs_dweight and weight is not None), plan)
    assert_is_backward((*results, None)[:2], *arguments, needs_dweight)
    return results


@VARIANTS
def test_every_dtype(plan):
    for index, (dtype, weight_dtype, dtotal_dtype) in enumerate(pairs_of_dtypes(DTYPES)):
        check_by_plan(backward_inputs(5, 100, dtype, weight_dtype, dtotal_dtype, DTYPES[index % 3]), plan)


def test_every_width():
    for columns in WIDTHS:
        rows = min(3, max(1, 2**17 // columns))
        check_backward(*backward_inputs(rows, columns, FP32, FP32 if columns < 4096 else None, torch.float16))


def test_no_more_is_loaded_ahead_than_fits(monkeypatch):
    """Whatever the plan says: a shape may have been tuned on fewer or narrower tensors. On an H100."""
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


def test_many_rows():
    """More tiles than programs."""
    dy, x, rstd, weight, dtotal = backward_inputs(1200, 5, FP32, FP32, FP32)
    check_by_plan((dy, x, rstd, weight, dtotal), Plan(True, 128, 8, 1, 1, 4))


@settings(max_examples=10, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 300)),
    seed=st.integers(0, 2**31),
    dtypes=st.tuples(st.sampled_from(DTYPES), *[st.sampled_from([None, *DTYPES])] * 2, st.sampled_from(DTYPES)),
)
def test_any_shape(shape, seed, dtypes):
    check_backward(*backward_inputs(*shape, *dtypes, seed=seed))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_plan(plan):
    """Each within a few roundings of fp64; dx, which no two rows share, is the same without dweight."""
    arguments = backward_inputs(35, 100, FP32, FP32, FP32)
    dx, _ = check_by_plan(arguments, plan)
    (alone,) = check_by_plan(arguments, plan, needs_dweight=False)
    torch.testing.assert_close(alone, dx, rtol=1e-6, atol=1e-6)


def test_more_partial_rows_than_are_summed_at_once(monkeypatch):
    monkeypatch.setattr(mxtrain.kernels.norm.partial_sums, "reduction_tile", lambda *sizes: (4, 8, 1))
    check_by_plan(backward_inputs(11, 13, FP32, FP32), Plan(True, 1, 16, 1, 1, 11))


def test_dweight_is_computed_only_if_needed():
    arguments = backward_inputs(3, 96, FP32, FP32, FP32)
    check_backward(*arguments, needs_dweight=False)
    _, launches = rms_norm_backward_by_plan(*arguments, False)
    assert [launch.constants["DWEIGHT"] for launch in launches] == [False]


def test_the_launch_is_that_of_the_plan():
    arguments = backward_inputs(5, 100, FP32, FP32)
    for plan in (HELD, CHUNKED, None):
        walk, _ = rms_norm_backward_by_plan(*arguments, True, plan)[1]
        plan = plan or choose_backward(5, 100, FP32, True, arguments[0].device).plan
        assert walk.grid == (plan.programs,) and walk.constants["num_warps"] == plan.warps
        assert (walk.constants["ROWS"], walk.constants["COLUMNS"]) == (plan.rows, plan.columns)
        assert walk.constants["STAGES"] == plan.stages and ("HOLD_WEIGHT" in walk.constants) == plan.persistent


@VARIANTS
def test_the_same_bits_every_time(plan):
    arguments = backward_inputs(9, 100, torch.bfloat16, torch.bfloat16, torch.bfloat16)
    results = [by_plan(rms_norm_backward_by_plan, (*arguments, True), plan) for _ in range(2)]
    assert_same_results(*results)


@VARIANTS
@pytest.mark.parametrize("where", ["dy", "x", "rstd"])
def test_what_is_not_finite_stays_in_its_row(where, plan):
    dy, x, rstd, weight, _ = backward_inputs(5, 100, FP32, FP32)
    clean, _ = by_plan(rms_norm_backward_by_plan, (dy, x, rstd, weight, None, True), plan)
    for bad in (float("nan"), float("inf")):
        {"dy": dy[2], "x": x[2], "rstd": rstd[2:]}[where][0] = bad
        dx, dweight = by_plan(rms_norm_backward_by_plan, (dy, x, rstd, weight, None, True), plan)
        assert not dx[2].isfinite().any()
        assert_same_bits(dx[:2], clean[:2])
        assert_same_bits(dx[3:], clean[3:])
        assert not dweight[0].isfinite() and dweight[1:].isfinite().all() == (where != "rstd")


@VARIANTS
def test_ugly_rows(plan):
    """Zero rows, huge and tiny rows; rows whose squares overflow have rstd = 0 in the forward, and so no gradients."""
    dy, x, _, weight, dtotal = backward_inputs(5, 100, FP32, FP32, FP32)
    x[0] = 0
    for row, magnitude in ((2, 1e18), (3, 1e-18)):
        x[row] *= magnitude
    # Against fp64 and not PyTorch, whose rstd^3 underflows to 0 on a CPU.
    check_by_plan((dy, x, exact_rstd(x).float(), weight, dtotal), plan)
    dy[1] = 0
    dx, _ = by_plan(rms_norm_backward_by_plan, (dy, x, exact_rstd(x).float(), weight, dtotal, True), plan)
    assert_same_bits(dx[1], dtotal[1])
    for gradient in by_plan(rms_norm_backward_by_plan, (dy, x * 1e19, 0 * dtotal[:, 0], weight, None, True), plan):
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [FP32, torch.float16, pytest.param(torch.bfloat16, marks=gpu_only)], ids=str)
@pytest.mark.parametrize("shape", [(300, 96), (100, 1000)], ids=str)
def test_no_larger_an_error_than_torchs(shape, dtype):
    """(The interpreter truncates to bf16, and sums columns one number after another, where a GPU adds in pairs.)"""
    dy, x, rstd, weight, _ = backward_inputs(*shape, dtype, dtype)
    wants = autograd_in_fp64(dy, x, weight, None)
    leaves = x.requires_grad_(), weight.requires_grad_()
    torchs = torch.autograd.grad(F.rms_norm(x, shape[1:], weight, EPS), leaves, dy)
    for got, other, want in zip(rms_norm_backward(dy, x.detach(), rstd, weight.detach()), torchs, wants):
        ours, theirs = ((t.double() - want).square().mean().sqrt() for t in (got, other))
        assert ours <= (2 if INTERPRETED and dtype == FP32 and want.ndim == 1 else 1.05) * theirs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    for argument in range(5):
        arguments = list(backward_inputs(3, 40, torch.float16, torch.float16, torch.float16))
        arguments[argument] = layout(arguments[argument])
        check_backward(*arguments)


def test_no_rows():
    for weight_dtype in (None, torch.float16):
        dx, dweight = rms_norm_backward(*backward_inputs(0, 96, torch.bfloat16, weight_dtype, FP32))
        assert dx.shape == (0, 96) and dx.dtype == torch.bfloat16
        assert dweight is None or weight_dtype is not None
    assert_same_bits(dweight, torch.zeros(96, dtype=torch.float16))


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
    for rows in (2, 3, 5):  # from the second call on the number of rows is symbolic
        arguments = backward_inputs(rows, 40, FP32, weight_dtype, FP32)
        with torch.compiler.set_stance("fail_on_recompile" if rows == 5 else "default"):
            got = compiled(*arguments)
        assert_same_results(got, run(*arguments))


def test_custom_op_keeps_its_word():
    """Schema (no input is changed or returned) and fake (shapes, dtypes, strides)."""
    for dtotal_dtype, needs_dweight in ((None, True), (FP32, False)):
        arguments = backward_inputs(2, 40, torch.bfloat16, torch.bfloat16, dtotal_dtype)
        torch.library.opcheck(
            torch.ops.mxtrain.rms_norm_backward.default,
            (*arguments, needs_dweight),
            test_utils=("test_schema", "test_faketensor"),
        )


@gpu_only
def test_past_32_bit_offsets(huge):
    (rows, columns), x = huge.shape, huge
    weight = draw(columns)
    rstd = torch.linalg.vector_norm(x, dim=1, dtype=FP32).square().div(columns).add(EPS).rsqrt()
    dx, dweight = rms_norm_backward(x, x, rstd, weight)
    for some in (slice(0, 32), slice(2**31 // columns - 32, 2**31 // columns + 32), slice(rows - 48, rows)):
        assert_is_backward((dx[some], None), x[some], x[some], rstd[some], weight, None, needs_dweight=False)
    want = sum(
        (part.double().square() * r[:, None]).sum(0) for part, r in zip(x.split(65536), rstd.double().split(65536))
    )
    torch.testing.assert_close(dweight.double(), want, rtol=1e-5, atol=0)
