"""The backward of RMSNorm and LayerNorm by kernel against fp64 autograd of the plain formula, element by element."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.launch.launch import INTERPRETED
from mxtrain.norms import kernels as row_norms
from mxtrain.norms.kernels import Plan, launch_backward, row_norm_backward
from tests.support.kernel_checks import LAYOUTS, assert_same_results, careful_call, draw, gpu_only, kernel_tests
from tests.support.row_norm_checks import (
    EPS,
    NORMS,
    WIDTHS,
    assert_is_backward,
    autograd_in_fp64,
    backward_by_plan,
    backward_inputs,
    pairs_of_dtypes,
    statistics,
)

pytestmark = kernel_tests

FP32 = torch.float32
DTYPES = (torch.bfloat16, torch.float16, FP32)
LOOPED = 16400
# Rows of 100 elements: held whole, and read twice in chunks; programs walk two tiles, the last tile is cut off.
HELD, CHUNKED = Plan(True, 2, 128, 1, 2, 2), Plan(False, 2, 64, 1, 2, 2)
# LayerNorm's kernel for wide rows, on rows of 100 elements.
WIDE = Plan(True, 1, 128, 1, 1, 2)
VARIANTS = pytest.mark.parametrize(
    ("plan", "centered"),
    [(HELD, False), (CHUNKED, False), (HELD, True), (CHUNKED, True), (WIDE, True)],
    ids=["held rms", "chunked rms", "held layer", "chunked layer", "wide layer"],
)
PLANS = [
    *(Plan(True, rows, 128, 2, 1 + rows % 3, programs) for rows, programs in ((1, 5), (64, 1))),
    *(Plan(False, rows, columns, 2, 2, programs) for rows, columns, programs in ((1, 64, 5), (4, 16, 1))),
]


def run(plan, arguments, dweight=FP32, dbias=None):
    """(dx, dweight or None, dbias or None) by a plan."""
    longest = 64 if plan == WIDE else row_norms.LONGEST_TILE_WITH_WEIGHT
    with mock.patch.object(row_norms, "LONGEST_TILE_WITH_WEIGHT", longest):
        return backward_by_plan(plan, arguments, dweight, dbias)


def check_by_plan(plan, arguments, dweight=FP32, dbias=None):
    results = run(plan, arguments, dweight, dbias)
    assert_is_backward(results, *arguments, dweight, dbias)
    return results


def check(arguments, dweight=FP32, dbias=None):
    with careful_call(*arguments):
        results = row_norm_backward(*arguments, dweight, dbias)
    assert_is_backward(results, *arguments, dweight, dbias)


@VARIANTS
def test_every_dtype_and_every_choice_of_gradients(plan, centered):
    optional = [None, *DTYPES]
    for index, (dtype, weight, dtotal) in list(enumerate(pairs_of_dtypes(DTYPES)))[:: 3 if centered else 2]:
        dweight, dbias = optional[index % 4], optional[index // 4] if centered else None
        if plan == WIDE:
            dweight, dbias = dweight or FP32, dbias or FP32
        check_by_plan(plan, backward_inputs(centered, 5, 100, dtype, weight, dtotal, DTYPES[index % 3]), dweight, dbias)


@NORMS
def test_every_width(centered):
    for columns in WIDTHS[:: 2 if centered else 3]:
        rows = min(3, max(1, 2**17 // columns))
        arguments = backward_inputs(centered, rows, columns, FP32, FP32 if columns < 4096 else None, torch.float16)
        check(arguments, FP32, torch.float16 if centered else None)


def test_wide_rows_with_both_sums_have_a_kernel_of_their_own():
    """The other kernel has registers for one sum. The wide rows' kernel walks one row at a time."""
    arguments = backward_inputs(True, 2, 8200, torch.bfloat16)
    for plan, dweight, dbias in (
        (None, FP32, FP32),
        (None, FP32, None),
        (None, None, None),
        (Plan(True, 2, 16384, 32, 1, 1), FP32, FP32),
        (Plan(False, 1, 4096, 8, 3, 1), FP32, FP32),
    ):
        launch, *_ = launch_backward(*arguments, dweight, dbias, plan)[1]
        assert (launch.kernel is row_norms._wide_rows_kernel) == (plan is None and dbias is not None)


def test_no_more_is_loaded_ahead_than_fits(monkeypatch):
    """Whatever the plan says: it does not know of wider tensors. On an H100."""
    monkeypatch.setattr(row_norms, "shared_memory", lambda device: 227 * 1024)

    def stages(plan, dtype, weight_dtype, dtotal_dtype, columns):
        arguments = backward_inputs(False, 2, columns, dtype, weight_dtype, dtotal_dtype)
        return launch_backward(*arguments, weight_dtype, None, plan)[1][0].constants["STAGES"]

    held = Plan(True, 1, 8192, 8, 6, 2)
    assert stages(held, torch.bfloat16, torch.bfloat16, None, 8192) == 6, "five tiles of 32 KiB"
    assert stages(held, torch.bfloat16, torch.bfloat16, torch.bfloat16, 8192) == 5, "four of 48"
    assert stages(held, FP32, torch.bfloat16, FP32, 8192) == 3, "two of 96"
    looped = Plan(False, 1, 4096, 8, 6, 2)
    assert stages(looped, torch.bfloat16, torch.bfloat16, None, LOOPED) == 6, "five chunks of 40 KiB"
    assert stages(looped, torch.bfloat16, FP32, torch.bfloat16, LOOPED) == 4, "three of 56"


def test_more_tiles_than_programs():
    check_by_plan(Plan(True, 128, 8, 1, 1, 4), backward_inputs(False, 1200, 5, FP32, FP32, FP32))


@settings(max_examples=10, deadline=None)
@given(
    centered=st.booleans(),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 300)),
    seed=st.integers(0, 2**31),
    dtypes=st.tuples(st.sampled_from(DTYPES), *[st.sampled_from([None, *DTYPES])] * 2, st.sampled_from(DTYPES)),
)
def test_any_shape(centered, shape, seed, dtypes):
    check(backward_inputs(centered, *shape, *dtypes, seed=seed), FP32, FP32 if centered else None)


@NORMS
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_plan(plan, centered):
    """Each within a few roundings of fp64; dx, which no two rows share, is the same without the sums."""
    arguments = backward_inputs(centered, 35, 100, FP32, FP32, FP32)
    dx, *_ = check_by_plan(plan, arguments, FP32, FP32 if centered else None)
    alone, *_ = check_by_plan(plan, arguments, None)
    torch.testing.assert_close(alone, dx, rtol=1e-6, atol=1e-6)


@NORMS
def test_more_partial_rows_than_are_summed_at_once(centered, monkeypatch):
    monkeypatch.setattr(row_norms, "_partials_tile", lambda *sizes: (4, 8, 1))
    arguments = backward_inputs(centered, 11, 13, FP32, FP32)
    check_by_plan(Plan(True, 1, 16, 1, 1, 11), arguments, FP32, torch.float16 if centered else None)


def test_one_launch_sums_the_gradients_that_are_needed():
    arguments = backward_inputs(True, 5, 100, FP32, FP32)
    for dweight, dbias, grids in ((FP32, FP32, [2, 2]), (FP32, None, [2, 1]), (None, FP32, [2, 1]), (None, None, [2])):
        _, launches = launch_backward(*arguments, dweight, dbias, HELD)
        assert [launch.grid[-1] for launch in launches] == grids
        assert launches[0].constants["DWEIGHT"] == (dweight is not None)


@VARIANTS
@pytest.mark.parametrize("where", ["dy", "rstd"])
def test_what_is_not_finite_stays_in_its_row(where, plan, centered):
    dy, x, mean, rstd, weight, _ = backward_inputs(centered, 5, 100, FP32, FP32)
    dbias = FP32 if centered else None
    clean, *_ = run(plan, (dy, x, mean, rstd, weight, None), FP32, dbias)
    for bad in (float("nan"), float("inf")):
        {"dy": dy[2], "rstd": rstd[2:]}[where][0] = bad
        dx, *sums = run(plan, (dy, x, mean, rstd, weight, None), FP32, dbias)
        assert not dx[2].isfinite().any()
        assert_same_results([dx[:2], dx[3:]], [clean[:2], clean[3:]])
        assert not sums[0][0].isfinite() and sums[0][1:].isfinite().all() == (where != "rstd")
        if centered:
            assert sums[1][0].isfinite() == (where != "dy") and sums[1][1:].isfinite().all()


@pytest.mark.parametrize("plan", [HELD, CHUNKED], ids=["held", "chunked"])
def test_ugly_rows_of_rms_norm(plan):
    """Zero rows, huge and tiny rows; rows whose squares overflow have rstd = 0 in the forward, and so no gradients."""
    dy, x, _, _, weight, dtotal = backward_inputs(False, 5, 100, FP32, FP32, FP32)
    x[0] = 0
    for row, magnitude in ((2, 1e18), (3, 1e-18)):
        x[row] *= magnitude
    rstd = statistics(x, False)[1].float()
    # Against fp64 and not PyTorch, whose rstd^3 underflows to 0 on a CPU.
    check_by_plan(plan, (dy, x, None, rstd, weight, dtotal))
    dy[1] = 0
    dx, *_ = run(plan, (dy, x, None, rstd, weight, dtotal))
    assert_same_results([dx[1]], [dtotal[1]])
    dx, dweight, _ = run(plan, (dy, x * 1e19, None, 0 * dtotal[:, 0], weight, None))
    assert not dx.any() and not dweight.any()


@pytest.mark.parametrize("plan", [HELD, CHUNKED, WIDE], ids=["held", "chunked", "wide"])
def test_ugly_rows_of_layer_norm(plan):
    """Large means, equal numbers, an outlier, huge and tiny rows."""
    dy, x, _, _, weight, dtotal = backward_inputs(True, 9, 100, FP32, FP32, FP32)
    x[0], x[1], x[2], x[3] = draw(100) + 1e3, draw(100) - 3e4, 0, 1000.1
    x[4, 7], x[5], x[6] = 1e4, x[5] * 1e15, x[6] * 1e-15
    mean, rstd = (each.float() for each in statistics(x, True))
    check_by_plan(plan, (dy, x, mean, rstd, weight, dtotal), FP32, FP32)
    # A constant along the row changes only the mean, and has no gradient.
    dy[7] = 1
    dx, *_ = run(plan, (dy, x, mean, rstd, None, None), FP32, FP32)
    assert dx[7].abs().max() <= 1e-5 * rstd[7]


@NORMS
@pytest.mark.parametrize("dtype", [FP32, torch.float16, pytest.param(torch.bfloat16, marks=gpu_only)], ids=str)
def test_no_larger_an_error_than_torchs(dtype, centered):
    """(The interpreter truncates to bf16, and sums columns one number after another, where a GPU adds in pairs.)"""
    dy, x, mean, rstd, weight, _ = backward_inputs(centered, 200, 96, dtype, dtype)
    wants = autograd_in_fp64(centered, dy, x, weight, None)
    leaves = [each.requires_grad_() for each in (x, weight, torch.zeros(96, dtype=dtype))]
    y = F.layer_norm(x, (96,), *leaves[1:], EPS) if centered else F.rms_norm(x, (96,), weight, EPS) + leaves[2]
    torchs = torch.autograd.grad(y, leaves, dy)
    results = row_norm_backward(dy, x.detach(), mean, rstd, weight.detach(), None, dtype, dtype if centered else None)
    for got, other, want in zip(results, torchs, wants):
        if got is not None:
            ours, theirs = ((t.double() - want).square().mean().sqrt() for t in (got, other))
            assert ours <= (3 if INTERPRETED and dtype == FP32 and want.ndim == 1 else 1.05) * theirs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    for argument in range(6):
        arguments = list(backward_inputs(True, 3, 40, *[torch.float16] * 3))
        arguments[argument] = layout(arguments[argument])
        check(arguments, FP32, FP32)


@NORMS
def test_no_rows(centered):
    dbias = FP32 if centered else None
    dx, *sums = row_norm_backward(*backward_inputs(centered, 0, 96, torch.bfloat16, FP32), torch.float16, dbias)
    assert dx.shape == (0, 96) and dx.dtype == torch.bfloat16
    want = torch.zeros(96, dtype=torch.float16), torch.zeros(96) if centered else None
    assert_same_results(sums, want)


@NORMS
def test_compiles_without_a_graph_break_for_any_number_of_rows(centered, compile_backend):
    def run(dy, *others):
        results = row_norm_backward(dy + dy, *others, FP32, FP32 if centered else None)
        return [None if result is None else result * 2 for result in results]

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for rows in (2, 3, 5):  # from the second call on the number of rows is symbolic
        arguments = backward_inputs(centered, rows, 16, FP32, FP32, FP32)
        with torch.compiler.set_stance("fail_on_recompile" if rows == 5 else "default"):
            got = compiled(*arguments)
        assert_same_results(got, run(*arguments))


@NORMS
def test_custom_op_keeps_its_word(centered):
    """Schema (no input is changed or returned) and fake (shapes, dtypes, strides)."""
    for dtotal_dtype, dweight in ((None, torch.float16), (FP32, None)):
        arguments = backward_inputs(centered, 2, 40, torch.bfloat16, torch.bfloat16, dtotal_dtype)
        torch.library.opcheck(
            torch.ops.mxtrain.row_norm_backward.default,
            (*arguments, dweight, dweight if centered else None),
            test_utils=("test_schema", "test_faketensor"),
        )


@gpu_only
def test_past_32_bit_offsets(huge):
    (rows, columns), x = huge.shape, huge
    weight = draw(columns)
    rstd = torch.linalg.vector_norm(x, dim=1, dtype=FP32).square().div(columns).add(EPS).rsqrt()
    dx, dweight, _ = row_norm_backward(x, x, None, rstd, weight, None, FP32)
    for some in (slice(0, 32), slice(2**31 // columns - 32, 2**31 // columns + 32), slice(rows - 48, rows)):
        assert_is_backward((dx[some], None, None), x[some], x[some], None, rstd[some], weight, None)
    want = sum(
        (part.double().square() * r[:, None]).sum(0) for part, r in zip(x.split(65536), rstd.double().split(65536))
    )
    torch.testing.assert_close(dweight.double(), want, rtol=1e-5, atol=0)
