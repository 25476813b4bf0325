"""Tuning a product: the plans to try, and the walk on made-up times."""

import itertools

import pytest
import torch

from mxtrain.ops.hardware import HAS_TRITON, runs_kernels

if not HAS_TRITON:
    pytest.skip("without Triton there is one route", allow_module_level=True)

import triton

from mxtrain.kernels import tuning
from mxtrain.kernels.router.decompose_k_plan import ROUTES, SHARED_BYTES, Plan, choose, is_valid, kernel_plan
from mxtrain.kernels.tuned_plans import tuned_plans
from mxtrain.ops import decompose_k_tuning
from mxtrain.ops.decompose_k_tuning import FIELDS, neighbour, starts, tune

CPU = torch.device("cpu")
GOOD = Plan("triton", 8, 32, 64, 128, 4, 3)
gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_neighbours():
    def step(field, double, plan=GOOD):
        return neighbour(plan, field, double, 2, SHARED_BYTES)

    assert step("splits", True) == GOOD._replace(splits=16)
    assert step("splits", False, GOOD._replace(splits=1)) is None
    assert step("stages", True) == GOOD._replace(stages=4) and step("stages", False) == GOOD._replace(stages=2)
    assert step("block_m", False) == GOOD._replace(block_m=16)
    assert step("block_m", False, GOOD._replace(block_m=16)) is None
    assert neighbour(GOOD, "stages", True, 2, 3 * 2 * 128 * (32 + 64)) is None, "too little shared memory"
    assert step("splits", True, Plan("bmm", 8)) == Plan("bmm", 16) and step("splits", False, Plan("bmm", 2)) is None
    for field, double in itertools.product(FIELDS, (True, False)):
        other = step(field, double)
        assert other is None or (is_valid(other, 2) and other != GOOD)
        assert step(field, double, Plan("mm")) is None
        assert field == "splits" or step(field, double, Plan("bmm", 8)) is None


@pytest.mark.usefixtures("empty_cache")
def test_every_route_is_a_start():
    products = itertools.product((1, 16, 300, 16384), (1, 64, 2048), (100, 2048, 8192, 32768))
    for shape, dtype, along_k in itertools.product(products, (torch.bfloat16, torch.float32), (True, False)):
        plans = starts(*shape, dtype, CPU, along_k)
        assert all(is_valid(plan, dtype.itemsize) for plan in plans) and len(set(plans)) == len(plans)
        assert plans[0] == choose(*shape, dtype, CPU, along_k).plan
        assert kernel_plan(*shape, dtype, CPU, along_k) in plans
        assert {plan.route for plan in plans} == set(ROUTES)


@pytest.mark.skipif(not runs_kernels("emulated", "cpu"), reason="on a GPU times are real")
@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("along_k", [True, False])
def test_tuning_a_product(along_k, monkeypatch):
    """On made-up times. The first plan of every route is run as well."""
    rows, columns, depth = 3, 4, 256
    seen = []
    by_plan = decompose_k_tuning.by_plan

    def recording(a, b, bias, epilogue, out_dtype, plan):
        assert a.shape == (rows, depth) and b.shape == (depth, columns) and out_dtype == torch.float32
        assert (a.stride(1) == b.stride(0) == 1) == along_k and (a.stride(0) == b.stride(1) == 1) != along_k
        seen.append(plan)
        if plan.stages > 3:
            raise triton.runtime.errors.OutOfResources(2, 1, "shared memory")
        if plan.route not in [before.route for before in seen[:-1]]:
            c = by_plan(a, b, bias, epilogue, out_dtype, plan)
            torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)

    def do_bench(function, return_mode):
        function()
        plan = seen[-1]
        return 1e-3 * ((2 if plan.route == fastest else 50) + abs(plan.splits - 4) + plan.warps)

    monkeypatch.setattr(decompose_k_tuning, "by_plan", recording)
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    monkeypatch.setattr(tuning, "gpu", lambda: CPU)
    monkeypatch.setattr(tuning, "recorded", lambda run: run)
    for fastest in ROUTES:
        seen.clear()
        choice = tune(rows, columns, depth, torch.float32, along_k)
        assert choice.plan.route == fastest and choice.source == "tuned"
        assert fastest == "mm" or choice.plan.splits == 4
        assert fastest != "triton" or choice.plan.warps == 1
        assert {plan.route for plan in seen} == set(ROUTES)
    tuned_plans.cache_clear()
    assert choose(4, columns, depth, torch.float32, CPU, along_k) == choice
    assert choose(4, columns, depth, torch.float32, CPU, not along_k).source == "rule"


def test_tuning_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="there is none here"):
        tune(16, 16, 8192, torch.bfloat16)


@gpu_only
@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("along_k", [True, False])
def test_tuning_on_this_gpu(along_k):
    here = torch.device("cuda", torch.cuda.current_device())
    tuned = tune(16, 64, 8192, torch.bfloat16, along_k)
    assert tuned.source == "tuned" and choose(9, 64, 8192, torch.bfloat16, here, along_k) == tuned
    assert choose(9, 64, 8192, torch.bfloat16, here, not along_k).source != "tuned"
