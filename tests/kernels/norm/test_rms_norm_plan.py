"""Every shape gets a plan that the kernels can walk, from the tuned plans, the table or the rule."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.kernels.norm.rms_norm import rms_norm_by_plan
from mxtrain.kernels.norm.rms_norm_plan import (
    BACKWARD,
    DTYPES,
    FORWARD,
    BackwardSettings,
    ForwardSettings,
    Plan,
    choose_backward,
    choose_forward,
    choose_settings,
    fit,
    is_valid,
    key,
    reduction_tile,
    tiles,
)
from mxtrain.kernels.norm.rms_norm_tuning import FIELDS, neighbour, starts
from mxtrain.kernels.plan_table import GPU, H200
from mxtrain.kernels.tuned_plans import TunedPlan, save
from tests.support.rms_norm_checks import forward_inputs

CPU = torch.device("cpu")
AN_H200, AN_RTX = GPU("cpu", (H200,), 132, 227 * 1024), GPU("RTX", (), 58, 99 * 1024)
# Sizes by their magnitude, so that small ones are as frequent as large ones.
ROWS = st.builds(lambda x: int(2**x), st.floats(0, 31.1))
COLUMNS = st.builds(lambda x: int(2**x), st.floats(0, 16)) | st.sampled_from([1, 256, 4096, 5120, 7168, 16384, 65536])
SHAPES = dict(rows=ROWS, columns=COLUMNS, itemsize=st.sampled_from([2, 4]), gpu=st.sampled_from([AN_H200, AN_RTX]))


def chosen(operation, rows, columns, gpu):
    dtype = torch.bfloat16
    return choose_settings(operation, rows, columns, dtype, True, gpu).plan


@given(**SHAPES)
@settings(max_examples=300, deadline=None)
def test_every_shape_gets_a_plan(rows, columns, itemsize, gpu):
    """By table on an H200 and by rule elsewhere. Registers and shared memory hold it, and all SMs work."""
    for operation in (FORWARD, BACKWARD):
        found = chosen(operation, rows, columns, gpu)
        plan = fit(operation, found, rows, columns, itemsize, gpu)
        assert is_valid(plan, rows, columns) and plan.persistent == found.persistent
        assert plan.rows * plan.columns <= 32 * 64 * plan.warps, "more than 64 elements a thread"
        count = tiles(plan, rows)
        assert count >= min(rows, gpu.sms) / 2, "SMs without a tile"
        if operation is FORWARD:
            assert plan.programs == count and plan.stages == 1
            continue
        streams = 3 * itemsize if plan.persistent else 4 * itemsize + 4
        assert (plan.stages - 1) * plan.rows * plan.columns * streams <= gpu.shared - 12 * 1024
        longest = -(-count // plan.programs)
        assert longest >= min(2, count), "a partial row for a single tile"
        assert plan.programs == -(-count // longest), "fewer programs would take no longer"
        assert plan.programs >= min(count // 2, gpu.sms) / 2, "SMs without a program"


@given(**SHAPES, operation=st.sampled_from([FORWARD, BACKWARD]))
@settings(max_examples=200, deadline=None)
def test_neighbours_and_starts(operation, rows, columns, itemsize, gpu):
    """All can be walked, and each is another plan."""
    found = chosen(operation, rows, columns, gpu)
    first, *others = starts(operation, found, columns)
    assert first == found and [each.persistent for each in others] == [not found.persistent] * (1024 < columns <= 32768)
    for each in (first, *others):
        plan = fit(operation, each, rows, columns, itemsize, gpu)
        assert is_valid(plan, rows, columns)
        for field, double in itertools.product(FIELDS[operation], (True, False)):
            if other := neighbour(operation, each, field, double, rows, columns, itemsize, gpu):
                assert (
                    sum(a != b for a, b in zip(each, other)) == 1
                    and (getattr(other, field) > getattr(each, field)) == double
                )
                other_plan = fit(operation, other, rows, columns, itemsize, gpu)
                assert is_valid(other_plan, rows, columns) and other_plan != plan


def test_steps_of_the_walk():
    def step(field, double, each, operation=BACKWARD):
        return neighbour(operation, each, field, double, 32768, 1024, 2, AN_H200)

    each = BackwardSettings(True, 2048, 2, 3, 4)
    assert step("stages", True, each) == each._replace(stages=4) and step("stages", False, each).stages == 2
    assert step("programs_per_sm", True, each).programs_per_sm == 8
    assert step("programs_per_sm", False, each._replace(programs_per_sm=1)) is None
    assert step("tile", False, each) == each._replace(tile=1024)
    assert step("tile", False, each._replace(tile=1024)) is None, "less than a row"
    assert step("stages", True, each._replace(stages=8)) is None
    forward = ForwardSettings(False, 512, 4)
    assert step("tile", False, forward, FORWARD) == forward._replace(tile=256)
    assert step("warps", False, forward._replace(warps=1), FORWARD) is None


@pytest.mark.parametrize(
    ("rows", "columns", "backward", "forward"),
    [
        (32768, 256, Plan(True, 4, 256, 1, 3, 1024), Plan(True, 8, 256, 2, 1, 4096)),
        (400, 256, Plan(True, 4, 256, 1, 2, 50), Plan(True, 4, 256, 2, 1, 100)),
        (132, 4096, Plan(True, 1, 4096, 4, 2, 66), Plan(True, 1, 4096, 8, 1, 132)),
        (4096, 20480, Plan(False, 1, 4096, 8, 3, 256), Plan(False, 1, 4096, 16, 1, 4096)),
        (8192, 5120, Plan(True, 1, 8192, 8, 4, 131), Plan(False, 1, 1024, 4, 1, 8192)),
    ],
)
def test_settings_become_the_plan_of_a_shape(rows, columns, backward, forward):
    """Few rows: smaller tiles, and no SM without one. Long rows: chunks that divide them."""
    tile = max(1024, min(8192, 2 * columns))
    persistent = columns <= 16384
    wide = BackwardSettings(
        persistent, tile if persistent else 4096, 8 if tile > 1024 else 1, 4 if columns == 5120 else 3, 1
    )
    wide = wide._replace(programs_per_sm=8192 // tile if persistent else 2)
    assert fit(BACKWARD, wide, rows, columns, 2, AN_H200) == backward
    narrow = ForwardSettings(
        forward.persistent, 4096 if columns >= 4096 else 2048, 16 if columns > 4096 else forward.warps
    )
    assert fit(FORWARD, narrow, rows, columns, 2, AN_H200) == forward


@pytest.mark.parametrize("shape", [(0, 96), (-1, 96), (5, 0), (5, 65537)], ids=str)
def test_shapes_without_a_plan(shape):
    for choose in (choose_forward, lambda *args: choose_backward(*args[:3], True, CPU)):
        with pytest.raises(ValueError, match=r"shape \(.*\): expected a row or more of 1 to 65536 elements"):
            choose(*shape, torch.float32, CPU)


GOOD = Plan(True, 4, 128, 4, 2, 16)


def test_plans_that_kernels_cannot_walk():
    assert is_valid(GOOD, 64, 100) and is_valid(GOOD._replace(persistent=False, columns=32), 64, 100)
    for change in (
        *(dict(rows=rows) for rows in (0, 3, 128)),
        *(dict(columns=columns) for columns in (64, 256)),
        dict(persistent=False, columns=96),
        *(dict(warps=warps) for warps in (3, 64)),
        *(dict(stages=stages) for stages in (0, 9)),
        *(dict(programs=programs) for programs in (0, 17)),
    ):
        assert not is_valid(GOOD._replace(**change), 64, 100), change
    assert is_valid(Plan(True, 2, 16384, 32, 1, 1), 64, 16384)
    assert not is_valid(Plan(True, 4, 16384, 32, 1, 1), 64, 16384), "more than registers hold"


@given(programs=st.integers(1, 100000), columns=COLUMNS)
def test_the_sum_of_partial_rows(programs, columns):
    height, width, warps = reduction_tile(programs, columns, 132)
    assert all(n & (n - 1) == 0 for n in (height, width, warps))
    assert height * width <= 4096 and height < 2 * programs
    assert columns < 1024 or -(-columns // width) >= 66, "half of the SMs have nothing to do"


@pytest.mark.usefixtures("empty_cache")
def test_tuned_plans_win_over_the_table_and_the_table_over_the_rule():
    def sources(*shape):
        return [choose_forward(*shape, CPU).source, choose_backward(*shape, True, CPU).source]

    shape = (64, 100, torch.float32)
    by_table = choose_forward(*shape, CPU).plan
    assert sources(*shape) == ["table NVIDIA_H200"] * 2
    found = ForwardSettings(True, 256, 1)
    save(FORWARD, "cpu", key(*shape, True), TunedPlan(found._asdict(), 12.3, 9))
    plan, source, reason = choose_forward(*shape, CPU)
    assert plan == Plan(True, 1, 128, 1, 1, 64) != by_table
    assert source == "tuned" and "9 plans" in reason and "12.3 us" in reason
    x, weight, _ = forward_inputs(64, 100, weight_dtype=torch.float32)
    _, launch = rms_norm_by_plan(x, None, weight, 1e-5)
    assert launch.grid == (64,) and launch.constants["ROWS"] == 1 and launch.constants["num_warps"] == 1
    for other in ((63, 100, torch.float32), (64, 99, torch.float32), (64, 100, torch.float16)):
        assert sources(*other) == ["table NVIDIA_H200"] * 2
    assert sources(*shape) == ["tuned", "table NVIDIA_H200"]
    # Three warps are no power of two.
    save(FORWARD, "cpu", key(*shape, True), TunedPlan(found._replace(warps=3)._asdict(), 12.3, 9))
    assert sources(*shape) == ["table NVIDIA_H200"] * 2
    assert choose_settings(FORWARD, *shape, True, AN_RTX).source == "rule"
    assert choose_settings(BACKWARD, *shape, True, AN_H200._replace(tables=())).source == "rule"


def test_rows_of_every_dtype_share_the_table():
    for dtype in DTYPES:
        assert choose_forward(8192, 4096, dtype, CPU) == choose_forward(8192, 4096, torch.bfloat16, CPU)
        assert choose_backward(8192, 4096, dtype, True, CPU).source == "table NVIDIA_H200"
