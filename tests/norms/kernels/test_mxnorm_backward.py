"""The norm's straight-through backward and that of a folded gain against the reference in fp64, by element."""

import itertools

import pytest
import torch

from mxtrain.launch.launch import next_power_of_2
from mxtrain.norms import mxnorm_backward as module
from mxtrain.norms.mxnorm_backward import fold_backward, norm_backward
from tests.support.kernel_checks import (
    DTYPES,
    assert_same_bits,
    assert_same_results,
    check_fold_backward,
    check_norm_backward,
    draw,
    gpu_only,
    kernel_tests,
)

pytestmark = kernel_tests

# Rows of more than 16384 elements are read twice.
LOOPED = 20480


def inputs(rows, columns, g_dtype=torch.float32, x_dtype=torch.float32, seed=0):
    """(g, x, rho). g has a component along xhat; otherwise the projection hardly shows."""
    x = draw(rows, columns, seed=seed, dtype=x_dtype) * 2.0 ** (torch.arange(rows) % 7 - 3)[:, None].to(x_dtype)
    rho = 1 / (x.float().square().mean(1) + 1e-5).sqrt() * (1 + 0.1 * draw(rows, seed=seed + 1))
    g = (draw(rows, columns, seed=seed + 2) + 0.7 * x.float() * rho[:, None]).to(g_dtype)
    return g, x, rho


@pytest.mark.parametrize("shape", [(37, 96), (2, LOOPED)], ids=str)
def test_every_dtype(shape):
    for dtypes in itertools.product(DTYPES, DTYPES):
        check_norm_backward(*inputs(*shape, *dtypes))


def test_every_shape():
    """One element, several programs, the longest row held in registers, and rows read twice."""
    for shape in ((1, 1), (5, 7), (130, 64), (70, 100), (3, 2049), (1, 16384), (1, 16400), (2, 65536)):
        check_norm_backward(*inputs(*shape))


@pytest.mark.parametrize(("columns", "bad"), [(96, float("nan")), (LOOPED, float("inf"))])
@pytest.mark.parametrize("where", ["g", "x", "rho"])
def test_nan_and_infinity_stay_in_their_row(where, bad, columns):
    g, x, rho = inputs(5, columns)
    clean = norm_backward(g, x, rho)
    {"g": g[2], "x": x[2], "rho": rho[2:]}[where][0] = bad
    dx = norm_backward(g, x, rho)
    assert not dx[2].isfinite().any()
    assert_same_bits(dx[:2], clean[:2])
    assert_same_bits(dx[3:], clean[3:])


def test_a_zero_row_and_rows_that_rho_makes_zero():
    g, x, rho = inputs(4, 96)
    x[0], rho[0] = 0, 1e-5**-0.5
    rho[1] = 0
    check_norm_backward(g, x, rho)
    assert not norm_backward(g, x, rho)[1].any()


@gpu_only
@pytest.mark.parametrize("shape", [(8192, 768), (512, LOOPED)], ids=str)
def test_the_same_bits_every_time(shape):
    arguments = inputs(*shape, torch.bfloat16, torch.bfloat16)
    first = norm_backward(*arguments)
    for _ in range(3):
        assert_same_bits(norm_backward(*arguments), first)


def test_compiles_without_a_graph_break(compile_backend):
    def run(g, x, rho):
        return norm_backward(g + g, x, rho) * 2

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for rows in (5, 9, 33):  # the row count is symbolic from the second call on
        arguments = inputs(rows, 96)
        assert_same_bits(compiled(*arguments), run(*arguments))


def test_op_matches_its_schema_and_fake():
    """No input is changed or returned; shapes, dtypes and strides are as the fake says."""
    arguments = inputs(5, 96, torch.bfloat16)
    torch.library.opcheck(
        torch.ops.mxtrain.norm_backward.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def fold_inputs(rows, columns, g_dtype=torch.float32, weight_dtype=torch.float32, gain_dtype=torch.float32, seed=0):
    """(g, weight, gain). g has a component along the weight, so sums over rows do not cancel."""
    weight = draw(rows, columns, seed=seed, dtype=weight_dtype)
    g = (draw(rows, columns, seed=seed + 1) + 0.5 * weight.float()).to(g_dtype)
    return g, weight, draw(columns, seed=seed + 2, dtype=gain_dtype)


def test_fold_every_dtype():
    for dtypes in itertools.product(DTYPES, DTYPES, DTYPES):
        check_fold_backward(*fold_inputs(50, 96, *dtypes))


def test_fold_every_shape():
    """One element, cut tiles in both directions, and several programs."""
    for shape in ((1, 1), (7, 40), (33, 257), (300, 8), (3, 2049)):
        check_fold_backward(*fold_inputs(*shape))


def test_many_rows(monkeypatch):
    """Each program walks down more rows than it holds at once."""
    assert module._rows_per_program(17500, 3) == 2 * module.FOLD_ROWS
    monkeypatch.setattr(module, "_rows_per_program", lambda rows, columns: 3 * module.FOLD_ROWS)
    check_fold_backward(*fold_inputs(110, 140))


def test_small_and_empty_weights(monkeypatch):
    """``next_power_of_2`` takes positive numbers only."""
    asked = []
    monkeypatch.setattr(module, "next_power_of_2", lambda n: asked.append(n) or next_power_of_2(n))
    for rows, columns in ((0, 96), (96, 0), (40, 96)):
        g, weight, gain = fold_inputs(rows, columns)
        d_weight, d_gain = fold_backward(g, weight, gain)
        assert d_weight.shape == weight.shape and d_gain.shape == gain.shape and (rows or not d_gain.any())
    assert asked == [module.FOLD_ROWS] * 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["g", "weight", "gain"])
def test_nan_and_infinity_stay_in_their_column(where, bad):
    g, weight, gain = fold_inputs(40, 96)
    clean = fold_backward(g, weight, gain)
    {"g": g[30], "weight": weight[30], "gain": gain}[where][5] = bad
    d_weight, d_gain = fold_backward(g, weight, gain)
    assert d_gain[5].isfinite() == (where == "gain")
    assert d_weight[30, 5].isfinite() == (where == "weight")
    others = torch.arange(96) != 5
    assert_same_bits(d_gain[others], clean[1][others])
    assert_same_bits(d_weight[:, others], clean[0][:, others])


@gpu_only
def test_fold_the_same_bits_every_time():
    arguments = fold_inputs(14336, 4096)
    first = fold_backward(*arguments)
    for _ in range(3):
        assert_same_results(fold_backward(*arguments), first)


def test_fold_compiles_without_a_graph_break(compile_backend):
    def run(g, weight, gain):
        d_weight, d_gain = fold_backward(g + g, weight, gain)
        return d_weight * 2, d_gain * 2

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for rows in (5, 40, 70):  # the row count is symbolic from the second call on
        arguments = fold_inputs(rows, 96)
        got, want = compiled(*arguments), run(*arguments)
        assert_same_bits(got[0], want[0])
        # Inductor may add the parts of the sum over rows in another order.
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-4)


def test_fold_op_matches_its_schema_and_fake():
    """No input is changed or returned; shapes, dtypes and strides are as the fake says."""
    for gain_dtype in DTYPES:
        arguments = fold_inputs(40, 96, torch.bfloat16, gain_dtype=gain_dtype)
        torch.library.opcheck(
            torch.ops.mxtrain.fold_backward.default, arguments, test_utils=("test_schema", "test_faketensor")
        )
