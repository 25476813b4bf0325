"""The backward of folding a gain into a weight against the reference in fp64, element by element."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, assert_same_bits, assert_same_results, check_fold_backward, draw, kernel_tests

from mxtrain.kernels.device import INTERPRETED
from mxtrain.kernels.norm.fold_backward import fold_backward

pytestmark = kernel_tests


def inputs(rows, columns, g_dtype=torch.float32, weight_dtype=torch.float32, gain_dtype=torch.float32, seed=0):
    """(g, weight, gain); g has a part along the weight, so that sums over rows do not cancel."""
    weight = draw(rows, columns, seed=seed, dtype=weight_dtype)
    g = (draw(rows, columns, seed=seed + 1) + 0.5 * weight.float()).to(g_dtype)
    return g, weight, draw(columns, seed=seed + 2, dtype=gain_dtype)


@pytest.mark.parametrize("gain_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("g_dtype", DTYPES)
def test_every_dtype(g_dtype, weight_dtype, gain_dtype):
    check_fold_backward(*inputs(150, 96, g_dtype, weight_dtype, gain_dtype))


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1),
        (1, 32),
        (7, 40),
        (8, 256),
        (129, 300),
        (128, 257),
        (257, 33),
        (300, 512),
        (1000, 8),
        (3, 2049),
    ],
    ids=str,
)
def test_every_shape(shape):
    check_fold_backward(*inputs(*shape))
    check_fold_backward(*inputs(*shape, torch.bfloat16, torch.bfloat16, torch.bfloat16))


def test_many_rows():
    """Programs walk down more rows than they hold at once."""
    check_fold_backward(*inputs(17500, 3))


def test_it_is_the_gradient_of_the_product():
    g, weight, gain = inputs(33, 96)
    leaves = weight.double().requires_grad_(), gain.double().requires_grad_()
    want = torch.autograd.grad(leaves[0] * leaves[1], leaves, g.double())
    for one, other in zip(fold_backward(g, weight, gain), want):
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["g", "weight", "gain"])
def test_what_is_not_finite_stays_in_its_column(where, bad):
    g, weight, gain = inputs(140, 96)
    clean = fold_backward(g, weight, gain)
    {"g": g[130], "weight": weight[130], "gain": gain}[where][5] = bad
    d_weight, d_gain = fold_backward(g, weight, gain)
    assert d_gain[5].isfinite() == (where == "gain")
    assert d_weight[130, 5].isfinite() == (where == "weight")
    others = torch.arange(96) != 5
    assert_same_bits(d_gain[others], clean[1][others])
    assert_same_bits(d_weight[:, others], clean[0][:, others])


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 280), st.integers(1, 300)),
    seed=st.integers(0, 2**31),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 3),
)
def test_any_shape(shape, seed, dtypes):
    check_fold_backward(*inputs(*shape, *dtypes, seed=seed))


def test_the_same_bits_every_time():
    arguments = inputs(*(300, 257) if INTERPRETED else (14336, 4096))
    first = fold_backward(*arguments)
    for _ in range(3):
        assert_same_results(fold_backward(*arguments), first)


def test_compiles_without_a_graph_break(compile_backend):
    def run(g, weight, gain):
        d_weight, d_gain = fold_backward(g + g, weight, gain)
        return d_weight * 2, d_gain * 2

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for rows in (5, 140, 300):  # from the second on the row count is symbolic
        arguments = inputs(rows, 96)
        got, want = compiled(*arguments), run(*arguments)
        assert_same_bits(got[0], want[0])
        # The shares of the sum over rows may be added up in another order.
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-4)


def test_custom_op_keeps_its_word():
    """Schema (no input is changed or returned) and fake (shapes, dtypes, strides)."""
    for gain_dtype in DTYPES:
        arguments = inputs(140, 96, torch.bfloat16, gain_dtype=gain_dtype)
        torch.library.opcheck(
            torch.ops.mxtrain.fold_backward.default, arguments, test_utils=("test_schema", "test_faketensor")
        )
