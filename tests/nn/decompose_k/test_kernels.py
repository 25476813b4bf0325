"""Decompose-K by kernel against fp64, element by element, for every way to split and to store."""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.nn.decompose_k import kernels as module
from mxtrain.nn.decompose_k.kernels import Plan, decompose_k, decompose_k_by_plan, kernel_plan, lie_along_k, ranges
from mxtrain.nn.decompose_k.reference import EPILOGUES, decompose_k_mm
from tests.formats.kernels.conftest import device  # noqa: F401
from tests.support.kernel_checks import (
    assert_same_bits,
    careful_call,
    draw,
    every_second,
    gpu_only,
    kernel_tests,
    sliced_rows,
    transposed,
)
from tests.support.row_norm_checks import SUM_ERROR, assert_near

pytestmark = kernel_tests

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Tiles of 16 x 16 and K in blocks of 32 are cut off.
ODD = (18, 17, 70)
PLAN = Plan(3, 16, 16, 32, 4, 2)
PLANS = {
    "one part": PLAN._replace(splits=1),
    "two launches": PLAN,
    "whole rows": PLAN._replace(block_n=32, splits=1),
    "large tiles": Plan(4, 64, 32, 16, 8, 3),
    "more parts than K": PLAN._replace(splits=256),
    "no tensor cores": Plan(1, 8, 8, 128, 4, 2),
    "no tensor cores, two launches": Plan(2, 8, 4, 32, 2, 2),
}
by_plan = pytest.mark.parametrize("plan", ["two launches", "whole rows", "no tensor cores, two launches"])


def inputs(m, n, k, dtype=torch.float32, bias_dtype=None, seed=0):
    """(a, b, bias) whose product has elements of about 1."""
    bias = None if bias_dtype is None else draw(n, seed=seed + 2, dtype=bias_dtype)
    a, b = draw(m, k, seed=seed), draw(k, n, seed=seed + 1) * max(k, 1) ** -0.5
    return a.to(dtype), b.to(dtype), bias


def plan_of(a, b):
    """The kernels' plan for this product, on an H100."""
    return kernel_plan(*ranges(a.shape[0], b.shape[1], a.shape[1]), lie_along_k(a, b), a.element_size())


def assert_is_product(c, a, b, bias, epilogue, out_dtype):
    wide = [None if x is None else x.double() for x in (a, b, bias)]
    want = decompose_k_mm(*wide, epilogue)
    terms = decompose_k_mm(*(None if x is None else x.abs() for x in wide))
    assert c.dtype == (out_dtype or a.dtype)
    error = terms.amax(1, keepdim=True).expand_as(terms) * want if epilogue == "softmax" else terms
    # The last term: denormal results may be 0.
    assert_near(c, want, 4 * SUM_ERROR * error + SUM_ERROR * want.abs() + 2.0**-126)


def check(a, b, bias=None, epilogue=None, out_dtype=torch.float32, plan=None):
    plan = plan or plan_of(a, b)
    with careful_call(a, b, bias):
        c = decompose_k(a, b, bias, epilogue, out_dtype, plan)
    assert_is_product(c, a, b, bias, epilogue, out_dtype)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_plan_and_epilogue(plan):
    check(*inputs(*ODD), "relu", plan=plan)
    check(*inputs(*ODD, bias_dtype=torch.float32), "softmax", plan=plan)


def test_every_epilogue():
    for epilogue in (None, "sigmoid"):
        check(*inputs(*ODD, bias_dtype=torch.float32), epilogue, plan=PLAN)


@pytest.mark.parametrize("plan", ["two launches", "no tensor cores"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_dtype(plan, dtype):
    for bias_dtype, out_dtype in ((dtype, torch.float32), (torch.float32, dtype)):
        check(*inputs(*ODD, dtype, bias_dtype), "sigmoid", out_dtype, PLANS[plan])


def test_every_shape():
    """One of everything, and tiles that nothing is cut off from."""
    for plan in (PLAN, PLANS["no tensor cores, two launches"]):
        for shape in ((1, 16, 64), (16, 1, 64), (1, 1, 1), (2, 3, 5), (16, 32, 96)):
            check(*inputs(*shape, bias_dtype=torch.float32), "softmax", plan=plan)


@by_plan
def test_nothing_to_sum_up(plan):
    plan = PLANS[plan]
    for epilogue in EPILOGUES:
        check(*inputs(5, 7, 0, bias_dtype=torch.float32), epilogue, plan=plan)
    check(*inputs(5, 7, 0), None, plan=plan)
    for shape in ((0, 7, 64), (5, 0, 64), (0, 0, 0)):
        a, b, bias = inputs(*shape, torch.float16, torch.float32)
        c = decompose_k(a, b, bias, "softmax", torch.float32, plan)
        assert c.shape == shape[:2] and c.dtype == torch.float32


@settings(max_examples=10, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 150)),
    splits=st.integers(1, 5),
    plan=st.sampled_from([PLAN, PLANS["no tensor cores"]]),
    epilogue=st.sampled_from(EPILOGUES),
    dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 2**31),
)
def test_any_product(shape, splits, plan, epilogue, dtype, layouts, seed):
    a, b, bias = inputs(*shape, dtype, torch.float32, seed)
    a, b = (transposed(x) if is_transposed else x for x, is_transposed in zip((a, b), layouts))
    check(a, b, bias, epilogue, plan=plan._replace(splits=splits))


def test_the_plan_that_is_chosen():
    for shape, dtype in (((1, 20, 2048), torch.float16), ((3, 7, 2048), torch.float32), ((40, 16, 300), torch.float16)):
        a, b, bias = inputs(*shape, dtype, torch.float32)
        check(a, transposed(b), bias, "softmax")


@pytest.mark.parametrize("layout", [transposed, sliced_rows, every_second, lambda x: sliced_rows(x.t()).t()])
def test_layouts(layout):
    """Shapes that tiles divide, and others."""
    plans = itertools.cycle((PLAN, PLANS["no tensor cores"]))
    for argument, shape, plan in zip((0, 1, 2, 0, 1), (ODD, ODD, ODD, (16, 16, 64), (16, 16, 64)), plans):
        arguments = list(inputs(*shape, torch.float16, torch.float32))
        arguments[argument] = layout(arguments[argument])
        check(*arguments, "relu", plan=plan)


def test_transposed_views_are_not_copied(monkeypatch):
    seen = []

    def by_plan(a, b, *others):
        seen.extend((a, b))
        return decompose_k_by_plan(a, b, *others)

    monkeypatch.setattr(module, "decompose_k_by_plan", by_plan)
    a, b, _ = inputs(40, 20, 64)
    a, b = transposed(a), transposed(b)
    decompose_k(a, b, None, None, torch.float32, PLAN)
    assert [x.data_ptr() for x in seen] == [a.data_ptr(), b.data_ptr()]


def test_every_plan_sums_in_fp32():
    """Exact sums of whole numbers, whatever their order."""
    a = torch.randint(-8, 9, (18, 70), device="cpu", generator=torch.Generator("cpu").manual_seed(0))
    a, b = a.float().to(torch.get_default_device()), torch.ones(70, 17)
    for plan in PLANS.values():
        assert torch.equal(decompose_k(a, b, None, None, a.dtype, plan), a.sum(1, keepdim=True).expand(-1, 17))


@by_plan
def test_what_is_not_finite_stays_in_its_row_and_is_as_torch_has_it(plan):
    plan = PLANS[plan]
    a, b, _ = inputs(*ODD)
    b, bad = b.abs(), a.clone()
    bad[5, 40], bad[6, 69], bad[7, 0] = float("nan"), float("inf"), -float("inf")
    others = [row for row in range(18) if row not in (5, 6, 7)]
    for epilogue in (None, "softmax"):
        clean, c = (decompose_k(x, b, None, epilogue, torch.float32, plan) for x in (a, bad))
        want = decompose_k_mm(bad, b, None, epilogue)
        torch.testing.assert_close(c[5:8], want[5:8], equal_nan=True)
        assert_same_bits(c[others], clean[others])


def test_large_numbers_in_an_epilogue():
    a, b = torch.tensor([[1000.0], [-1000.0], [88.0], [-88.0]]), torch.tensor([[1.0, -1.0, 0.5]])
    for epilogue in EPILOGUES:
        check(a, b, None, epilogue, plan=PLAN)


@pytest.mark.parametrize(("plan", "dtype"), zip((None, PLANS["no tensor cores"], None), DTYPES), ids=str)
def test_no_larger_an_error_than_torchs(dtype, plan):
    """PyTorch also sums over K in fp32. On tensor cores, which truncate sums, its product uses them too."""
    a, b, _ = inputs(7, 6, 4096, dtype)
    want = a.double() @ b.double()
    if a.is_cuda and dtype != torch.float32:
        # cuBLAS splits a small product as well; in a large one every output is one sum.
        many = a.repeat(640, 1)
        torchs = torch.mm(many, b.repeat(1, 56), out_dtype=torch.float32)[:7, :6]
    else:
        torchs = a.float() @ b.float()
        plan = plan and plan._replace(splits=32)
    ours = decompose_k(a, b, None, None, torch.float32, plan or PLAN._replace(splits=32))
    ours, torchs = ((c.double() - want).square().mean().sqrt() for c in (ours, torchs))
    assert ours <= 1.5 * torchs


@pytest.mark.parametrize(
    ("plan", "epilogue", "launches"),
    [
        ("one part", "relu", 1),
        ("two launches", "relu", 2),
        ("no tensor cores", "relu", 1),
        ("one part", "softmax", 2),
        ("no tensor cores", "softmax", 2),
        ("whole rows", "softmax", 1),
    ],
)
def test_launches(plan, epilogue, launches):
    """A softmax needs whole rows: without whole rows in a tile, a second launch loads them."""
    a, b, bias = inputs(*ODD)
    _, launched = decompose_k_by_plan(a, b, bias, epilogue, torch.float32, PLANS[plan])
    assert len(launched) == launches


def test_the_number_of_rows_is_no_reason_to_compile():
    """For a router's operands, both along K."""
    constants = []
    for rows in (1, 5, 16, 17, 32):
        a, b, _ = inputs(rows, 32, 128)
        _, launches = decompose_k_by_plan(a, transposed(b), None, None, torch.float32, PLAN)
        constants.append([launch.constants for launch in launches])
    first = constants[0]
    assert all(each[0] == first[0] for each in constants)


def test_what_is_cut_off_is_not_read():
    """A tile that is cut off is loaded under a mask: memory behind an operand may not exist."""
    for rows, columns, depth in itertools.product((1, 3, 4), (1, 6, 8), (100, 128)):
        for plan in (Plan(1, 1, 2, 128, 4, 1), Plan(1, 2, 2, 128, 4, 1), PLAN):
            a, b, _ = inputs(rows, columns, depth)
            for x in (a, transposed(a)):
                launch = decompose_k_by_plan(x, b, None, None, torch.float32, plan)[1][0]
                whole = [launch.constants[name] for name in ("WHOLE_ROWS", "WHOLE_COLUMNS", "WHOLE_DEPTH")]
                blocks = (plan.block_m, plan.block_n, plan.block_k)
                sizes = zip((rows, columns, depth), blocks, whole, strict=True)
                assert not any(is_whole and size % block for size, block, is_whole in sizes)


@gpu_only
@pytest.mark.parametrize("plan", [None, PLAN, PLANS["large tiles"]], ids=str)
@pytest.mark.parametrize("shape", [(1, 256, 7168), (64, 64, 32768), (5000, 64, 2048)], ids=str)
def test_tensor_cores(shape, plan):
    a, b, bias = inputs(*shape, torch.bfloat16, torch.float32)
    for epilogue, layouts in itertools.product(EPILOGUES, ((False, True), (True, False))):
        x, y = (transposed(t) if is_transposed else t for t, is_transposed in zip((a, b), layouts))
        taken = plan or plan_of(x, y)
        first = decompose_k(x, y, bias, epilogue, torch.float32, taken)
        assert_is_product(first, a, b, bias, epilogue, torch.float32)
        for _ in range(10):
            assert_same_bits(decompose_k(x, y, bias, epilogue, torch.float32, taken), first)


@gpu_only
def test_graphs_replayed_side_by_side():
    """Two graphs and eager launches at the same time, each on its own stream."""
    arguments = inputs(256, 256, 4096, torch.bfloat16, torch.float32)
    run = functools.partial(decompose_k, *arguments, "sigmoid", torch.float32, PLAN._replace(splits=16))
    want = run()
    torch.cuda.synchronize()
    graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append(run())
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(20):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = []
        for stream in streams[2:]:
            with torch.cuda.stream(stream):
                eager.append(run())
        torch.cuda.synchronize()
        for result in (*results, *eager):
            assert_same_bits(result, want)
