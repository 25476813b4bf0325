"""Every product gets a plan that the kernels can run, or torch.mm; the same one for a whole range."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mxtrain.launch.launch import cdiv
from mxtrain.nn.decompose_k.kernels import (
    MIN_TENSOR_CORE_BLOCK,
    Plan,
    choose,
    choose_for_range,
    chunk_of,
    kernel_plan,
    ranges,
    reduction_tile,
    softmax_tile,
)

CPU = torch.device("cpu")
# SMs and bytes of shared memory per program.
AN_H200, AN_RTX = (132, 227 * 1024), (58, 99 * 1024)


def sizes(largest):
    """Sizes by their magnitude, so that small ones are as frequent as large ones."""
    return st.builds(lambda x: int(2**x), st.floats(0, largest))


def assert_can_run(plan, itemsize, shared):
    """Registers and shared memory hold the tiles."""
    blocks = (plan.block_m, plan.block_n, plan.block_k)
    assert all(n > 0 and n & (n - 1) == 0 for n in (*blocks, plan.warps)) and plan.warps <= 16
    assert 1 <= plan.splits <= 256 and 1 <= plan.stages <= 8
    if plan.block_m >= MIN_TENSOR_CORE_BLOCK:
        assert min(blocks) >= MIN_TENSOR_CORE_BLOCK and plan.block_m * plan.block_n <= 128 * 256
        assert plan.stages * (plan.block_m + plan.block_n) * plan.block_k * itemsize <= min(shared, 144 * 1024)
    else:
        assert plan.block_m * plan.block_n * plan.block_k <= 32768


@given(
    shape=st.tuples(sizes(31), sizes(13), sizes(31) | st.sampled_from([0, 2048, 5120, 7168])),
    along_k=st.booleans(),
    itemsize=st.sampled_from([2, 4]),
    gpu=st.sampled_from([AN_H200, AN_RTX]),
)
@settings(max_examples=500, deadline=None)
def test_every_product_gets_a_plan(shape, along_k, itemsize, gpu):
    """In shared memory, and with enough programs unless all of K is one step."""
    shape, (sms, shared) = ranges(*shape), gpu
    plan, why = choose_for_range(*shape, along_k, itemsize, *gpu)
    kernels = kernel_plan(*shape, along_k, itemsize, *gpu)
    assert plan in (kernels, None) and why
    assert_can_run(kernels, itemsize, shared)
    assert along_k or kernels.block_m >= MIN_TENSOR_CORE_BLOCK, "without tensor cores, whose loads would be scattered"
    if kernels.block_m >= MIN_TENSOR_CORE_BLOCK and 2048 <= shape[2] <= 2**20:
        tiles = cdiv(shape[0], kernels.block_m) * cdiv(shape[1], kernels.block_n)
        _, parts = chunk_of(kernels, shape[2])
        # At most 66 parts per tile; and rounding may cost half of the programs.
        assert tiles * parts >= min(sms / 2, 32 * tiles), "SMs without a program"
        assert parts == 1 or tiles * parts <= 4 * sms


@pytest.mark.parametrize(
    ("shape", "itemsize", "along_k", "plan"),
    [
        ((1, 256, 7168), 2, True, Plan(1, 1, 1, 8192, 16, 1)),
        ((16, 256, 2048), 2, True, Plan(32, 16, 16, 64, 1, 2)),
        ((1, 64, 10240), 2, True, Plan(66, 16, 16, 64, 1, 4)),
        ((1024, 64, 2048), 2, True, Plan(4, 64, 32, 64, 4, 6)),
        ((1024, 256, 7168), 2, True, Plan(4, 64, 128, 64, 4, 6)),
        ((2048, 256, 7168), 2, True, None),  # outputs are tiles enough
        ((64, 64, 512), 2, True, None),  # short K
        ((512, 256, 7168), 4, True, None),  # fp32
        ((8192, 64, 2048), 2, False, None),  # narrow, but not along K
        ((8192, 64, 5120), 2, True, None),  # narrow, but b is large
    ],
    ids=str,
)
def test_the_plans_of_an_h200(shape, itemsize, along_k, plan):
    assert choose_for_range(*shape, along_k, itemsize, *AN_H200).plan == plan


def test_all_of_a_range_get_the_same_plan():
    for columns in (16, 256):
        for low, high in ((1, 1), (2, 2), (3, 4), (9, 16), (513, 1024), (4097, 8192)):
            for rows in (low, (low + high) // 2, high):
                choice = choose(rows, columns, 7168, torch.bfloat16, CPU)
                assert choice == choose(high, columns, 7168, torch.bfloat16, CPU)
        for low, high in ((1025, 1280), (6145, 7168), (7169, 8192), (28673, 32768)):
            assert ranges(1, 1, low)[2] == ranges(1, 1, high)[2] == high
            assert choose(16, columns, low, torch.bfloat16, CPU) == choose(16, columns, high, torch.bfloat16, CPU)
    assert ranges(0, 0, 0) == (1, 1, 1)
    for depth in (2048, 5120, 7168, *range(8192, 32769, 4096)):
        assert ranges(1, 1, depth)[2] == depth, "usual widths are the largest of their range"


@given(depth=sizes(16), splits=st.integers(1, 256))
@example(depth=257, splits=2)
@settings(deadline=None)
def test_parts_make_up_the_whole(depth, splits):
    plan = Plan(splits, 32, 64, 128, 4, 3)
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
