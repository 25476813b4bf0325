"""Every product gets a plan that its route can take, the same one for a whole range."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.kernels.integers import cdiv
from mxtrain.kernels.plan_table import GPU, H200
from mxtrain.kernels.router.decompose_k_plan import (
    ALONG_K,
    MIN_TENSOR_CORE_BLOCK,
    ROW_MAJOR,
    Plan,
    choose,
    chunk_of,
    depth_range,
    is_valid,
    kernel_plan,
    kernel_rule,
    key,
    ranges,
    reduction_tile,
    rule,
    softmax_tile,
    tensor_core_rule,
    untuned,
)
from mxtrain.kernels.tuned_plans import TunedPlan, save

CPU = torch.device("cpu")
AN_H200, AN_RTX = GPU("cpu", (H200,), 132, 227 * 1024), GPU("RTX", (), 58, 99 * 1024)
GOOD = Plan("triton", 8, 32, 64, 128, 4, 3)


def sizes(largest):
    """Sizes by their magnitude, so that small ones are as frequent as large ones."""
    return st.builds(lambda x: int(2**x), st.floats(0, largest))


@given(
    shape=st.tuples(sizes(31), sizes(13), sizes(31) | st.sampled_from([0, 2048, 5120, 7168])),
    along_k=st.booleans(),
    itemsize=st.sampled_from([2, 4]),
    gpu=st.sampled_from([AN_H200, AN_RTX]),
)
@settings(max_examples=500, deadline=None)
def test_every_product_gets_a_plan(shape, along_k, itemsize, gpu):
    """By table or rule, in shared memory, and with enough programs unless all of K is one step."""
    shape = ranges(*shape)
    plan, source, reason = untuned(*shape, along_k, itemsize, gpu)
    assert is_valid(plan, itemsize, gpu.shared) and source in ("rule", "table NVIDIA_H200") and reason
    kernels = kernel_rule(*shape, along_k, itemsize, gpu)
    for each in (kernels, tensor_core_rule(*shape, itemsize, gpu)):
        assert each.route == "triton" and is_valid(each, itemsize, gpu.shared)
    assert along_k or kernels.block_m >= MIN_TENSOR_CORE_BLOCK, "without tensor cores, whose loads would be scattered"
    assert rule(*shape, along_k, itemsize, gpu).plan in (kernels, Plan("mm"))
    if kernels.block_m >= MIN_TENSOR_CORE_BLOCK and 2048 <= shape[2] <= 2**20:
        tiles = cdiv(shape[0], kernels.block_m) * cdiv(shape[1], kernels.block_n)
        _, parts = chunk_of(kernels, shape[2])
        # At most 66 parts per tile; and rounding may cost half of the programs.
        assert tiles * parts >= min(gpu.sms / 2, 32 * tiles), "SMs without a program"
        assert parts == 1 or tiles * parts <= 4 * gpu.sms


@pytest.mark.parametrize(
    ("shape", "itemsize", "along_k", "plan"),
    [
        ((1, 256, 7168), 2, True, Plan("triton", 1, 1, 1, 8192, 16, 1)),
        ((2, 256, 7168), 2, True, Plan("triton", 1, 2, 2, 8192, 16, 1)),
        ((8, 64, 4096), 2, True, Plan("triton", 1, 1, 1, 4096, 8, 1)),
        ((64, 1, 2048), 2, True, Plan("triton", 1, 1, 1, 2048, 8, 1)),
        ((1024, 1, 2048), 2, True, Plan("triton", 1, 2, 1, 2048, 8, 1)),
        ((16, 256, 2048), 2, True, Plan("triton", 32, 16, 16, 64, 1, 2)),
        ((1, 64, 10240), 2, True, Plan("triton", 66, 16, 16, 64, 1, 4)),
        ((128, 256, 7168), 2, True, Plan("triton", 8, 64, 32, 64, 4, 8)),
        ((1024, 64, 2048), 2, True, Plan("triton", 4, 64, 32, 64, 4, 6)),
        ((16384, 64, 2048), 2, True, Plan("triton", 1, 64, 64, 64, 4, 5)),
        ((2**20, 32, 4096), 2, True, Plan("triton", 1, 64, 32, 64, 4, 3)),
        ((16, 256, 65536), 2, True, Plan("triton", 66, 16, 64, 64, 4, 6)),
        ((512, 256, 7168), 2, True, Plan("triton", 4, 64, 64, 64, 4, 8)),
        ((1024, 256, 7168), 2, True, Plan("mm")),  # outputs are tiles enough
        ((1024, 256, 2048), 2, True, Plan("mm")),
        ((64, 64, 512), 2, True, Plan("mm")),  # short K
        ((512, 256, 7168), 4, True, Plan("mm")),  # fp32
        ((1, 256, 2048), 4, True, Plan("triton", 1, 1, 1, 2048, 8, 1)),
        ((8192, 64, 2048), 2, False, Plan("mm")),  # narrow, but not along K
        ((8192, 64, 5120), 2, True, Plan("mm")),  # narrow, but b is large
        ((8192, 65, 2048), 2, True, Plan("mm")),
    ],
    ids=str,
)
def test_the_rule_on_an_h200(shape, itemsize, along_k, plan):
    assert rule(*shape, along_k, itemsize, AN_H200).plan == plan


def test_all_of_a_range_get_the_same_plan():
    for columns in (16, 256):
        for low, high in ((1, 1), (2, 2), (3, 4), (9, 16), (513, 1024), (4097, 8192)):
            for rows in (low, (low + high) // 2, high):
                choice = choose(rows, columns, 7168, torch.bfloat16, CPU)
                assert choice == choose(high, columns, 7168, torch.bfloat16, CPU)
        for low, high in ((1025, 1280), (6145, 7168), (7169, 8192), (28673, 32768)):
            assert depth_range(low) == depth_range(high) == high
            assert choose(16, columns, low, torch.bfloat16, CPU) == choose(16, columns, high, torch.bfloat16, CPU)
    assert ranges(0, 0, 0) == (1, 1, 1)
    for depth in (2048, 5120, 7168, *range(8192, 32769, 4096)):
        assert depth_range(depth) == depth, "usual widths are the largest of their range"


@pytest.mark.usefixtures("empty_cache")
def test_tuned_plans_win_over_the_table_and_the_table_over_the_rule():
    def source(rows=64, columns=256, depth=7168, dtype=torch.bfloat16, along_k=True):
        return choose(rows, columns, depth, dtype, CPU, along_k).source

    assert source() == source(dtype=torch.float16) == "table NVIDIA_H200"
    assert source(16, 16, 8192, along_k=False) == "table NVIDIA_H200"
    others = dict(dtype=torch.float32), dict(along_k=False), dict(rows=65), dict(columns=257), dict(depth=7169)
    assert {source(**other) for other in others} == {"rule"}
    assert untuned(64, 256, 7168, True, 2, AN_H200._replace(tables=())).source == "rule"
    assert untuned(64, 256, 7168, True, 2, AN_H200._replace(shared=64 * 1024)).source == "rule", "too many stages"
    for plan in (GOOD, Plan("bmm", 16), Plan("mm")):
        save(ALONG_K, "cpu", key(64, 256, 7168, torch.bfloat16), TunedPlan(plan._asdict(), 4.56, 9))
        for rows in (33, 64):
            chosen, where, reason = choose(rows, 256, 7168, torch.bfloat16, CPU)
            assert (chosen, where) == (plan, "tuned") and "9 plans" in reason and "4.6 us" in reason
        assert kernel_plan(64, 256, 7168, torch.bfloat16, CPU).route == "triton"
    assert source(dtype=torch.float16) == "table NVIDIA_H200" and {source(**other) for other in others} == {"rule"}
    save(ROW_MAJOR, "cpu", key(64, 256, 7168, torch.bfloat16), TunedPlan(GOOD._asdict(), 4.56, 9))
    assert source(along_k=False) == "tuned"
    save(ALONG_K, "cpu", key(64, 256, 7168, torch.bfloat16), TunedPlan(GOOD._replace(block_m=48)._asdict(), 4.56, 9))
    assert source() == "table NVIDIA_H200", "a plan that cannot run"


@given(depth=sizes(16), splits=st.integers(1, 256))
@settings(deadline=None)
def test_parts_make_up_the_whole(depth, splits):
    plan = GOOD._replace(splits=splits)
    chunk, parts = chunk_of(plan, depth)
    assert chunk % plan.block_k == 0 and 1 <= parts <= splits
    assert chunk * (parts - 1) < depth <= chunk * parts, "a part without any K, or K without a part"
    assert chunk_of(plan, 0) == (plan.block_k, 1)


@given(splits=st.integers(1, 256), outputs=sizes(31), columns=sizes(14))
@settings(deadline=None)
def test_sums_over_parts(splits, outputs, columns):
    width, at_once, warps = reduction_tile(splits, outputs, 132)
    assert all(n & (n - 1) == 0 for n in (width, at_once, warps))
    assert width * at_once <= 8192 and at_once < 2 * splits and 1 <= warps <= 8
    assert outputs < 4096 or cdiv(outputs, width) >= 64, "SMs have nothing to do"
    rows, width, at_once, warps = softmax_tile(splits, columns)
    assert all(n & (n - 1) == 0 for n in (rows, width, at_once, warps))
    assert columns <= width < 2 * columns and rows * width >= 128
    assert at_once == 1 or rows * width * at_once <= 8192


def test_plans_that_cannot_run():
    assert is_valid(GOOD, 2) and is_valid(Plan("mm"), 2) and is_valid(Plan("bmm", 8), 2)
    for change in (
        *(dict(route=route) for route in ("cublas", 3, "mm")),
        *(dict(splits=splits) for splits in (0, 257)),
        dict(block_m=8, block_k=512, block_n=16),
        *(dict(block_m=block) for block in (0, 48)),
        *(dict(block_n=block) for block in (0, 8)),
        dict(block_m=256, block_n=256, block_k=16),
        *(dict(warps=warps) for warps in (3, 32)),
        *(dict(stages=stages) for stages in (0, 8, 9)),
        dict(block_k=1024),
    ):
        assert not is_valid(GOOD._replace(**change), 2), change
    for plan in (Plan("bmm"), Plan("mm", 2), Plan("mm", 1, 16)):
        assert not is_valid(plan, 2)
    deep = GOOD._replace(stages=4)
    assert is_valid(deep, 2) and not is_valid(deep, 4) and not is_valid(deep, 2, 64 * 1024), "too much shared memory"


def test_the_rule_keeps_to_its_limits_at_the_corners():
    for shape in itertools.product((1, 2, 17, 8192, 2**31), (1, 17, 7168), (1, 2048, 2**31)):
        for along_k, itemsize in itertools.product((True, False), (2, 4)):
            assert is_valid(rule(*shape, along_k, itemsize, AN_RTX).plan, itemsize, AN_RTX.shared), shape
