"""The straight-through norm backward against the reference in fp64, element by element."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.kernels.norm.straight_through import norm_backward
from tests.support.kernel_checks import (
    DTYPES,
    assert_same_bits,
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


def test_it_is_the_gradient_of_rms_norm():
    x = draw(5, 96).double().requires_grad_()
    g = draw(5, 96, seed=1)
    (want,) = torch.autograd.grad(torch.nn.functional.rms_norm(x, (96,), eps=0.0), x, g.double())
    rho = x.detach().square().mean(1).rsqrt()
    got = norm_backward(g, x.detach().float(), rho.float())
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [96, LOOPED])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
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


@settings(max_examples=20, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 700)),
    seed=st.integers(0, 2**31),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
)
def test_any_shape(shape, seed, dtypes):
    check_norm_backward(*inputs(*shape, *dtypes, seed=seed))


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
