"""Every product gets a plan that its route can take, the same one for a whole range, for a reason that can be read."""

import functools
import itertools

import pytest
import torch
import triton
from kernel_checks import gpu_only

from mxtrain.kernels import tuning
from mxtrain.kernels.device import INTERPRETED, sm_count
from mxtrain.kernels.router import decompose_k_plan
from mxtrain.kernels.router.decompose_k import decompose_k
from mxtrain.kernels.router.decompose_k_plan import (
    DTYPES,
    FIELDS,
    ROUTES,
    TUNED,
    Plan,
    choose,
    chunk_of,
    depth_range,
    is_valid,
    kernel_plan,
    key,
    neighbour,
    reduction_tile,
    row_range,
    softmax_tile,
    starts,
    tune,
)
from mxtrain.reference.decompose_k import decompose_k_mm

CPU = torch.device("cpu")
ROWS = [1, 2, 16, 17, 64, 300, 1024, 8192, 16384, 2**31]
COLUMNS = [1, 16, 17, 64, 256, 2048, 7168]
DEPTHS = [0, 1, 100, 2048, 7168, 8192, 32768, 2**31]
SHAPES = list(itertools.product(ROWS, COLUMNS, DEPTHS))
GOOD = Plan("triton", 8, 32, 64, 128, 4, 3)


@pytest.fixture(autouse=True)
def no_tuned_plans(monkeypatch, tmp_path):
    monkeypatch.setenv("MXTRAIN_CACHE", str(tmp_path))
    tuning.tuned_plans.cache_clear()
    yield
    tuning.tuned_plans.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("along_k", [True, False])
def test_every_product_gets_a_plan(dtype, along_k):
    for shape in SHAPES:
        plan, source, reason = choose(*shape, dtype, CPU, along_k)
        assert is_valid(plan, dtype.itemsize) and source == "heuristic" and len(reason) > 40, shape
        kernels = kernel_plan(*shape, dtype, CPU, along_k)
        assert kernels.route == "triton" and is_valid(kernels, dtype.itemsize), shape
        assert plan in (kernels, Plan("mm")), shape
        assert along_k or kernels.block_m >= 16, "without tensor cores, whose loads would be scattered"


def test_what_is_loaded_ahead_fits_in_shared_memory(monkeypatch):
    """Of GPUs of compute capability 8.6, 8.9 and 12.0."""
    monkeypatch.setattr(decompose_k_plan, "shared_memory", lambda device: 99 * 1024)
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        plan = kernel_plan(*shape, dtype, CPU)
        assert is_valid(plan, dtype.itemsize), shape
        if plan.block_m >= 16:
            assert plan.stages * (plan.block_m + plan.block_n) * plan.block_k * dtype.itemsize <= 99 * 1024, shape


@pytest.mark.parametrize("columns", [16, 256])
def test_all_of_a_range_get_the_same_plan(columns):
    for low, high in ((1, 1), (2, 2), (3, 4), (9, 16), (513, 1024), (4097, 8192)):
        for rows in (low, (low + high) // 2, high):
            choice = choose(rows, columns, 7168, torch.bfloat16, CPU)
            assert choice == choose(high, columns, 7168, torch.bfloat16, CPU)
    for low, high in ((1025, 1280), (6145, 7168), (7169, 8192), (28673, 32768)):
        assert depth_range(low) == depth_range(high) == high
        assert choose(16, columns, low, torch.bfloat16, CPU) == choose(16, columns, high, torch.bfloat16, CPU)
    assert row_range(0) == depth_range(0) == 1


@pytest.mark.parametrize("depth", [2048, 5120, 7168, *range(8192, 32769, 4096)])
def test_usual_widths_are_the_largest_of_their_range(depth):
    assert depth_range(depth) == depth


@pytest.mark.parametrize(
    ("shape", "dtype", "route"),
    [
        ((1, 256, 7168), torch.bfloat16, "triton"),
        ((16, 16, 32768), torch.bfloat16, "triton"),
        ((512, 256, 7168), torch.float16, "triton"),
        ((1024, 256, 7168), torch.float16, "mm"),
        ((16384, 256, 7168), torch.bfloat16, "mm"),
        ((4096, 4096, 4096), torch.bfloat16, "mm"),
        ((64, 64, 512), torch.bfloat16, "mm"),
        ((1, 256, 7168), torch.float32, "triton"),
        ((512, 256, 7168), torch.float32, "mm"),
        ((1024, 256, 2048), torch.bfloat16, "mm"),  # tiles enough without a split
        ((8192, 64, 2048), torch.bfloat16, "triton"),
        ((2**20, 16, 16384), torch.float16, "triton"),
        ((8192, 64, 2048), torch.float32, "mm"),
        ((8192, 64, 4097), torch.bfloat16, "mm"),  # of b there is too much to be read by every tile
        ((8192, 65, 2048), torch.bfloat16, "mm"),
        ((8192, 64, 1024), torch.bfloat16, "mm"),
    ],
    ids=str,
)
def test_routes(shape, dtype, route):
    assert choose(*shape, dtype, CPU).plan.route == route


def test_many_rows_of_operands_that_do_not_lie_along_k():
    assert choose(8192, 64, 2048, torch.bfloat16, CPU, along_k=False).plan == Plan("mm")


@pytest.mark.parametrize(
    ("shape", "plan"),
    [
        ((1, 256, 7168), Plan("triton", 1, 1, 1, 8192, 16, 1)),
        ((2, 256, 7168), Plan("triton", 1, 2, 2, 8192, 16, 1)),
        ((16, 16, 5120), Plan("triton", 1, 1, 1, 8192, 16, 1)),
        ((8, 64, 4096), Plan("triton", 1, 1, 1, 4096, 8, 1)),
        ((32, 64, 2880), Plan("triton", 1, 2, 2, 4096, 8, 1)),
        ((64, 1, 2048), Plan("triton", 1, 1, 1, 2048, 8, 1)),
        ((1024, 1, 2048), Plan("triton", 1, 2, 1, 2048, 8, 1)),
        ((16, 128, 2048), Plan("triton", 1, 2, 2, 2048, 8, 1)),
        ((16, 256, 2048), Plan("triton", 32, 16, 16, 64, 1, 2)),
        ((1, 64, 10240), Plan("triton", 66, 16, 16, 64, 1, 4)),
        ((16, 128, 8192), Plan("triton", 66, 16, 16, 64, 1, 3)),
        ((128, 256, 7168), Plan("triton", 8, 64, 32, 64, 4, 8)),
        ((1024, 128, 5120), Plan("triton", 4, 64, 64, 64, 4, 8)),
        ((1024, 16, 5120), Plan("triton", 8, 64, 16, 64, 4, 8)),
        ((1024, 64, 2048), Plan("triton", 4, 64, 32, 64, 4, 6)),  # no more than eight steps
        ((4096, 64, 2048), Plan("triton", 2, 64, 64, 64, 4, 8)),
        ((8192, 64, 2048), Plan("triton", 1, 64, 64, 64, 4, 8)),
        ((16384, 64, 2048), Plan("triton", 1, 64, 64, 64, 4, 5)),  # two programs for an SM
        ((32768, 32, 4096), Plan("triton", 1, 64, 32, 64, 4, 3)),
        ((2**20, 32, 4096), Plan("triton", 1, 64, 32, 64, 4, 3)),
        ((16, 256, 65536), Plan("triton", 66, 16, 64, 64, 4, 6)),  # few rows: for any number of steps
    ],
    ids=str,
)
def test_some_plans(shape, plan):
    assert choose(*shape, torch.bfloat16, CPU).plan == plan


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 256, 7168), (64, 64, 32768), (256, 256, 7168), (1024, 128, 5120)], ids=str)
def test_most_sms_have_a_program(shape, dtype):
    rows, columns, depth = shape
    plan = kernel_plan(*shape, dtype, CPU)
    _, parts = chunk_of(plan, depth)
    programs = triton.cdiv(rows, plan.block_m) * triton.cdiv(columns, plan.block_n) * parts
    assert 64 <= programs <= 3 * sm_count(CPU)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 256])
@pytest.mark.parametrize("depth", [1, 31, 128, 129, 2880, 7168])
def test_parts_make_up_the_whole(depth, splits):
    plan = GOOD._replace(splits=splits)
    chunk, parts = chunk_of(plan, depth)
    assert chunk % plan.block_k == 0 and 1 <= parts <= splits
    assert chunk * (parts - 1) < depth <= chunk * parts, "a part without any K, or K without a part"
    assert chunk_of(plan, 0) == (plan.block_k, 1)


@pytest.mark.parametrize("splits", [1, 2, 5, 33, 256])
@pytest.mark.parametrize("outputs", [1, 256, 4096, 65536, 2**31])
def test_the_sum_over_parts(outputs, splits):
    width, at_once, warps = reduction_tile(splits, outputs, 132)
    assert all(n & (n - 1) == 0 for n in (width, at_once, warps))
    assert width * at_once <= 8192 and at_once < 2 * splits and 1 <= warps <= 8
    assert outputs < 4096 or triton.cdiv(outputs, width) >= 128, "SMs have nothing to do"


@pytest.mark.parametrize("splits", [1, 5, 256])
@pytest.mark.parametrize("columns", [1, 3, 16, 256, 300, 10000])
def test_the_sum_over_parts_of_whole_rows(columns, splits):
    rows, width, at_once, warps = softmax_tile(splits, columns)
    assert all(n & (n - 1) == 0 for n in (rows, width, at_once, warps))
    assert columns <= width < 2 * columns and 128 <= rows * width or width > 128
    assert at_once == 1 or rows * width * at_once <= 8192


@pytest.mark.parametrize(
    "change",
    [
        dict(route="cublas"),
        dict(route=3),
        dict(route="mm"),
        dict(splits=0),
        dict(splits=257),
        dict(block_m=8, block_k=512, block_n=16),
        dict(block_m=48),
        dict(block_n=0),
        dict(block_m=256, block_n=256, block_k=16),
        dict(warps=3),
        dict(warps=32),
        dict(stages=0),
        dict(stages=9),
        dict(stages=8),
        dict(block_k=1024),
    ],
    ids=str,
)
def test_plans_that_cannot_run(change):
    assert is_valid(GOOD, 2)
    assert not is_valid(GOOD._replace(**change), 2)


def test_plans_of_other_routes():
    assert is_valid(Plan("mm"), 2) and is_valid(Plan("bmm", 8), 2)
    assert not is_valid(Plan("bmm"), 2) and not is_valid(Plan("mm", 2), 2)
    assert not is_valid(Plan("mm", 1, 16), 2)
    deep = GOOD._replace(stages=4)
    assert is_valid(deep, 2) and not is_valid(deep, 4), "too much shared memory"


def test_neighbours():
    def step(field, double, plan=GOOD):
        return neighbour(plan, field, double, 2)

    assert step("splits", True) == GOOD._replace(splits=16)
    assert step("splits", False, GOOD._replace(splits=1)) is None
    assert step("stages", True) == GOOD._replace(stages=4) and step("stages", False) == GOOD._replace(stages=2)
    assert step("block_m", False) == GOOD._replace(block_m=16)
    assert step("block_m", False, GOOD._replace(block_m=16)) is None
    assert step("splits", True, Plan("bmm", 8)) == Plan("bmm", 16)
    assert step("splits", False, Plan("bmm", 2)) is None and step("splits", True, Plan("mm")) is None
    for field, double in itertools.product(FIELDS, (True, False)):
        other = step(field, double)
        assert other is None or (is_valid(other, 2) and other != GOOD)


@pytest.mark.parametrize("plan", [Plan("mm"), Plan("bmm", 8)], ids=str)
def test_other_routes_have_nothing_else_to_vary(plan):
    for field, double in itertools.product(set(FIELDS) - {"splits"}, (True, False)):
        assert neighbour(plan, field, double, 2) is None


def test_every_route_is_a_start():
    for shape, itemsize, along_k in itertools.product(SHAPES, (2, 4), (True, False)):
        plans = starts(*shape, along_k, itemsize, 132, 227 * 1024)
        assert all(is_valid(plan, itemsize) for plan in plans) and len(set(plans)) == len(plans)
        assert kernel_plan(*shape, torch.bfloat16 if itemsize == 2 else torch.float32, CPU, along_k) in plans
        assert {plan.route for plan in plans} == set(ROUTES)


def save(plan: Plan, **changes):
    fields = {**plan._asdict(), **changes}
    tuning.save(TUNED, "cpu", key(64, 256, 7168, torch.bfloat16), tuning.Entry(fields, 4.56, 9))


@pytest.mark.parametrize("plan", [GOOD, Plan("bmm", 16), Plan("mm")], ids=str)
def test_a_tuned_plan_goes_first(plan):
    save(plan)
    tuning.tuned_plans.cache_clear()
    for rows in (33, 64):
        chosen, source, reason = choose(rows, 256, 7168, torch.bfloat16, CPU)
        assert (chosen, source) == (plan, "tuned") and "9 plans" in reason and "4.6 us" in reason
    assert choose(65, 256, 7168, torch.bfloat16, CPU).source == "heuristic"
    assert choose(64, 256, 7168, torch.float16, CPU).source == "heuristic"
    assert kernel_plan(64, 256, 7168, torch.bfloat16, CPU).route == "triton"


@pytest.mark.parametrize("changes", [dict(route="cublas"), dict(unroll=2), dict(block_m=48)], ids=str)
def test_a_tuned_plan_that_cannot_run_is_ignored(changes):
    save(GOOD, **changes)
    assert choose(64, 256, 7168, torch.bfloat16, CPU).source == "heuristic"


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU times are real")
@pytest.mark.parametrize("fastest", ["mm", "bmm", "triton"])
def test_tuning_a_product(fastest, monkeypatch):
    """On times made up. Every plan is run as well."""
    rows, columns, depth = 3, 4, 256
    seen = []

    def run(a, b, plan):
        assert a.shape == (rows, depth) and b.shape == (depth, columns) and a.stride(1) == b.stride(0) == 1
        seen.append(plan)
        if plan.route == "triton":
            if plan.stages > 3:
                raise triton.runtime.errors.OutOfResources(2, 1, "shared memory")
            torch.testing.assert_close(decompose_k(a, b, plan=plan), decompose_k_mm(a, b), rtol=1e-4, atol=1e-4)

    def do_bench(function, return_mode):
        function()
        plan = seen[-1]
        return 1e-3 * ((2 if plan.route == fastest else 50) + abs(plan.splits - 4) + plan.warps)

    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    monkeypatch.setattr(tuning, "gpu", lambda: CPU)
    monkeypatch.setattr(tuning, "recorded", lambda run: run)
    choice = tune(rows, columns, depth, torch.float32, run)
    assert choice.plan.route == fastest and choice.source == "tuned"
    assert fastest == "mm" or choice.plan.splits == 4
    assert fastest != "triton" or choice.plan.warps == 1
    assert {plan.route for plan in seen} == set(ROUTES)
    tuning.tuned_plans.cache_clear()
    assert choose(4, columns, depth, torch.float32, CPU) == choice


def test_tuning_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="there is none here"):
        tune(16, 16, 8192, torch.bfloat16, lambda a, b, plan: None)


@gpu_only
@pytest.mark.parametrize("along_k", [True, False])
def test_tuning_on_this_gpu(along_k):
    def run(a, b, plan):
        return decompose_k(a, b, None, None, torch.float32, plan) if plan.route == "triton" else torch.mm(a, b)

    here = torch.device("cuda", torch.cuda.current_device())
    tuned = functools.partial(tune, run=run, along_k=along_k)(16, 64, 8192, torch.bfloat16)
    assert tuned.source == "tuned" and choose(9, 64, 8192, torch.bfloat16, here, along_k) == tuned
    assert choose(9, 64, 8192, torch.bfloat16, here, not along_k).source == "heuristic"
