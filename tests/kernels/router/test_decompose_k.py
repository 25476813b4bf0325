"""Decompose-K by kernel against fp64, element by element, for every way to split and to store."""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import (
    assert_same_bits,
    careful_call,
    draw,
    every_second,
    gpu_only,
    kernel_tests,
    sliced_rows,
    transposed,
)
from rms_norm_checks import SUM_ERROR, assert_near

from mxtrain.kernels.device import INTERPRETED
from mxtrain.kernels.router import decompose_k as module
from mxtrain.kernels.router.decompose_k import EPILOGUES, decompose_k, decompose_k_by_plan
from mxtrain.kernels.router.decompose_k_plan import DTYPES, Plan
from mxtrain.reference import decompose_k as reference
from mxtrain.reference.decompose_k import decompose_k_mm

pytestmark = kernel_tests

ODD = (37, 21, 150)
PLAN = Plan("triton", 3, 16, 16, 32, 4, 2)
PLANS = {
    "one part": PLAN._replace(splits=1),
    "two launches": PLAN,
    "whole rows": PLAN._replace(block_n=32, splits=1),
    "large tiles": Plan("triton", 4, 64, 32, 16, 8, 3),
    "more parts than K": PLAN._replace(splits=256),
    "no tensor cores": Plan("triton", 1, 4, 4, 128, 4, 2),
    "no tensor cores, two launches": Plan("triton", 2, 8, 4, 32, 2, 2),
}
by_every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
with_tensor_cores_or_without = pytest.mark.parametrize(
    "plan", [PLAN, PLANS["no tensor cores, two launches"]], ids=["tensor cores", "no tensor cores"]
)


def inputs(m, n, k, dtype=torch.float32, bias_dtype=None, seed=0):
    """(a, b, bias) whose product has numbers of about 1."""
    bias = None if bias_dtype is None else draw(n, seed=seed + 2, dtype=bias_dtype)
    a, b = draw(m, k, seed=seed), draw(k, n, seed=seed + 1) * max(k, 1) ** -0.5
    return a.to(dtype), b.to(dtype), bias


def assert_is_product(c, a, b, bias, epilogue, out_dtype):
    wide = [None if x is None else x.double() for x in (a, b, bias)]
    want = decompose_k_mm(*wide, epilogue)
    terms = decompose_k_mm(*(None if x is None else x.abs() for x in wide))
    assert c.dtype == (out_dtype or a.dtype)
    error = terms.amax(1, keepdim=True).expand_as(terms) * want if epilogue == "softmax" else terms
    # The last term: what is below the smallest normal number may be 0.
    assert_near(c, want, 4 * SUM_ERROR * error + SUM_ERROR * want.abs() + 2.0**-126)


def check(a, b, bias=None, epilogue=None, out_dtype=torch.float32, plan=None):
    with careful_call(a, b, bias):
        c = decompose_k(a, b, bias, epilogue, out_dtype, plan)
    assert_is_product(c, a, b, bias, epilogue, out_dtype)


def test_epilogues_are_those_of_the_reference():
    assert EPILOGUES == reference.EPILOGUES


@by_every_plan
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32], ids=str)
def test_every_plan_and_epilogue(bias_dtype, epilogue, plan):
    check(*inputs(*ODD, bias_dtype=bias_dtype), epilogue, plan=plan)


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plan", ["one part", "two launches", "no tensor cores"])
def test_every_dtype(plan, dtype, out_dtype):
    for bias_dtype in (dtype, torch.float32):
        check(*inputs(*ODD, dtype, bias_dtype), "sigmoid", out_dtype, PLANS[plan])


@with_tensor_cores_or_without
@pytest.mark.parametrize(
    "shape", [(1, 16, 128), (16, 1, 64), (1, 1, 1), (2, 3, 5), (64, 48, 96), (130, 70, 33)], ids=str
)
def test_every_shape(shape, plan):
    for epilogue in (None, "softmax"):
        check(*inputs(*shape, bias_dtype=torch.float32), epilogue, plan=plan)


@by_every_plan
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_nothing_to_sum_up(plan, epilogue):
    check(*inputs(5, 7, 0, bias_dtype=torch.float32), epilogue, plan=plan)
    check(*inputs(5, 7, 0), epilogue, plan=plan)


@pytest.mark.parametrize("plan", [None, *PLANS.values()], ids=str)
@pytest.mark.parametrize("shape", [(0, 7, 64), (5, 0, 64), (0, 0, 0)], ids=str)
def test_empty_results(shape, plan):
    a, b, bias = inputs(*shape, torch.float16, torch.float32)
    c = decompose_k(a, b, bias, "softmax", torch.float32, plan)
    assert c.shape == shape[:2] and c.dtype == torch.float32


@settings(max_examples=20, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 40), st.integers(0, 300)),
    splits=st.integers(1, 9),
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


@pytest.mark.parametrize("shape", [(1, 64, 512), (16, 16, 1024), (48, 48, 640), (200, 16, 512)], ids=str)
@pytest.mark.parametrize("epilogue", [None, "softmax"])
def test_the_plan_that_is_chosen(shape, epilogue):
    for dtype in (torch.float16, torch.float32):
        check(*inputs(*shape, dtype, torch.float32), epilogue)


@with_tensor_cores_or_without
@pytest.mark.parametrize("shape", [(32, 32, 96), (48, 40, 100)], ids=str)
@pytest.mark.parametrize("layout", [transposed, sliced_rows, every_second, lambda x: sliced_rows(x.t()).t()])
@pytest.mark.parametrize("argument", range(3))
def test_layouts(argument, layout, shape, plan):
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
    decompose_k(a, b, plan=PLAN)
    assert [x.data_ptr() for x in seen] == [a.data_ptr(), b.data_ptr()]


@by_every_plan
def test_the_same_bits_every_time(plan):
    arguments = inputs(*ODD, torch.float16, torch.float32)
    first = decompose_k(*arguments, "sigmoid", torch.float32, plan)
    for _ in range(3):
        assert_same_bits(decompose_k(*arguments, "sigmoid", torch.float32, plan), first)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_every_plan_sums_in_fp32(epilogue):
    """Exact sums: of whole numbers, whatever their order."""
    a = torch.randint(-8, 9, (37, 150), device="cpu", generator=torch.Generator("cpu").manual_seed(0))
    a, b = a.float().to(torch.get_default_device()), torch.ones(150, 21)
    results = [decompose_k(a, b, None, epilogue, None, plan) for plan in PLANS.values()]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-6, atol=0)
    if epilogue is None:
        assert torch.equal(results[0], a.sum(1, keepdim=True).expand(-1, 21))


@by_every_plan
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row_and_is_as_torch_has_it(bad, epilogue, plan):
    a, b, _ = inputs(*ODD)
    b = b.abs()
    clean = decompose_k(a, b, None, epilogue, None, plan)
    a[5, 70] = bad
    c = decompose_k(a, b, None, epilogue, None, plan)
    torch.testing.assert_close(c[5], decompose_k_mm(a, b, None, epilogue)[5], equal_nan=True)
    others = torch.arange(37) != 5
    assert_same_bits(c[others], clean[others])


def test_large_numbers_in_an_epilogue():
    a, b = torch.tensor([[1000.0], [-1000.0], [88.0], [-88.0]]), torch.tensor([[1.0, -1.0, 0.5]])
    for epilogue in EPILOGUES:
        check(a, b, None, epilogue, plan=PLAN)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("plan", [None, PLANS["two launches"], PLANS["no tensor cores"]], ids=str)
def test_no_larger_an_error_than_torchs(dtype, plan):
    """Whose product is one sum over K in fp32 too; of tensor cores, which cut sums off, it is one by them."""
    a, b, _ = inputs(13, 12, 4096, dtype)
    want = a.double() @ b.double()
    if a.is_cuda and dtype != torch.float32:
        # cuBLAS splits a small product as well: of a large one every output is one sum.
        many = a.repeat(320, 1)
        torchs = torch.mm(many, b.repeat(1, 28), out_dtype=torch.float32)[:13, :12]
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
    """A softmax needs whole rows: a second launch has them where a tile has not."""
    a, b, bias = inputs(*ODD)
    _, launched = decompose_k_by_plan(a, b, bias, epilogue, torch.float32, PLANS[plan])
    assert len(launched) == launches


def test_the_number_of_rows_is_no_reason_to_compile():
    """Not for operands as a router has them, both along K."""
    constants = []
    for rows in (1, 5, 16, 17, 32):
        a, b, _ = inputs(rows, 32, 128)
        _, launches = decompose_k_by_plan(a, transposed(b), None, None, torch.float32, PLAN)
        constants.append([launch.constants for launch in launches])
    first = constants[0]
    assert all(each[0] == first[0] for each in constants)


def test_what_is_cut_off_is_not_read():
    """A tile that is cut is loaded under a mask: what lies behind an operand may belong to nobody."""
    for rows, columns, depth in itertools.product((1, 3, 4), (1, 6, 8), (100, 128)):
        for plan in (Plan("triton", 1, 1, 2, 128, 4, 1), Plan("triton", 1, 2, 2, 128, 4, 1), PLAN):
            a, b, _ = inputs(rows, columns, depth)
            for x in (a, transposed(a)):
                launch = decompose_k_by_plan(x, b, None, None, torch.float32, plan)[1][0]
                whole = [launch.constants[name] for name in ("WHOLE_ROWS", "WHOLE_COLUMNS", "WHOLE_DEPTH")]
                blocks = (plan.block_m, plan.block_n, plan.block_k)
                sizes = zip((rows, columns, depth), blocks, whole, strict=True)
                assert not any(is_whole and size % block for size, block, is_whole in sizes)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(a=torch.ones(96)), r"a \(96,\): expected a matrix"),
        (dict(a=torch.ones(2, 96).double()), r"dtype torch.float64 of a \(2, 96\): expected bfloat16 or float16 or"),
        (dict(a=torch.ones(2, 96).half()), r"dtype torch.float32 of b \(96, 8\): expected float16"),
        (dict(b=torch.ones(95, 8)), r"b \(95, 8\) on .* does not go with a \(2, 96\)"),
        (dict(b=torch.ones(1, 96, 8)), r"b \(1, 96, 8\): expected a matrix"),
        (dict(bias=torch.ones(7)), r"bias \(7,\) of torch.float32: expected \(8,\)"),
        (dict(bias=torch.ones(8).half()), r"bias \(8,\) of torch.float16: expected \(8,\) of float32"),
        (dict(epilogue="gelu"), r"epilogue 'gelu': expected one of \(None, 'relu', 'sigmoid', 'softmax'\)"),
        (dict(out_dtype=torch.float16), r"out_dtype torch.float16 of operands of torch.float32"),
        (dict(plan=Plan("mm")), r"plan Plan\(route='mm'.*: expected the route 'triton'"),
    ],
    ids=str,
)
def test_bad_arguments(changed, message):
    arguments = dict(a=torch.ones(2, 96), b=torch.ones(96, 8)) | changed
    device = torch.get_default_device()
    arguments = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(ValueError, match=message):
        decompose_k(**arguments)


@pytest.mark.parametrize("other", ["meta"] if INTERPRETED else ["meta", "cpu"])
def test_other_devices(other):
    a = torch.ones(2, 96, device=other)
    with pytest.raises(ValueError, match=rf"a \(2, 96\) is on {other}: expected a CUDA device"):
        decompose_k(a, a.t())


@gpu_only
@pytest.mark.parametrize("plan", [None, *PLANS.values()], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 256, 7168), (64, 64, 32768), (1000, 128, 5120), (5000, 64, 2048), (256, 2048, 8192)], ids=str
)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_tensor_cores(shape, epilogue, plan):
    a, b, bias = inputs(*shape, torch.bfloat16, torch.float32)
    for layouts in ((False, True), (True, False)):
        x, y = (transposed(t) if is_transposed else t for t, is_transposed in zip((a, b), layouts))
        first = decompose_k(x, y, bias, epilogue, torch.float32, plan)
        assert_is_product(first, a, b, bias, epilogue, torch.float32)
        for _ in range(20):
            assert_same_bits(decompose_k(x, y, bias, epilogue, torch.float32, plan), first)


@gpu_only
def test_graphs_replayed_side_by_side():
    """Two graphs and eager launches at the same time, each on a stream of its own."""
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
