"""Every shape gets a plan that the kernels can walk, and the ladders' steps are as measured."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.norms.kernels import Plan, _partials_tile, backward_plan, forward_plan

# Sizes by their magnitude, so that small ones are as frequent as large ones.
ROWS = st.builds(lambda x: int(2**x), st.floats(0, 31.1))
COLUMNS = st.builds(lambda x: int(2**x), st.floats(0, 16)) | st.sampled_from([1, 256, 4096, 5120, 7168, 16384, 65536])


def assert_can_be_walked(plan, rows, columns):
    assert all(n > 0 and n & (n - 1) == 0 for n in (plan.rows, plan.columns, plan.warps))
    assert plan.warps <= 32 and plan.rows * plan.columns <= 16384
    assert plan.rows < 2 * rows and plan.columns < 2 * columns
    assert plan.columns >= columns or not plan.persistent
    assert plan.rows * plan.columns <= 32 * 64 * plan.warps, "more than 64 elements a thread"
    assert -(-rows // plan.rows) >= min(rows, 58) / 2, "SMs without a tile"


@given(rows=ROWS, columns=COLUMNS, sms=st.sampled_from([132, 58]))
@settings(max_examples=300, deadline=None)
def test_every_shape_gets_a_plan(rows, columns, sms):
    """Registers hold it, and all SMs work."""
    for centered in (False, True):
        plan = forward_plan(rows, columns, centered, sms)
        assert_can_be_walked(plan, rows, columns)
        assert plan.programs == -(-rows // plan.rows) and plan.stages == 1
        plan = backward_plan(rows, columns, centered, sms)
        assert_can_be_walked(plan, rows, columns)
        count = -(-rows // plan.rows)
        longest = -(-count // plan.programs)
        assert longest >= min(2, count), "a partial row for a single tile"
        assert plan.programs == -(-count // longest), "fewer programs would take no longer"
        assert plan.programs >= min(count // 2, sms) / 2, "SMs without a program"


@pytest.mark.parametrize(
    ("rows", "columns", "rms", "layer"),
    [
        (32768, 256, Plan(True, 8, 256, 4, 1, 4096), Plan(True, 8, 256, 4, 1, 4096)),
        (400, 256, Plan(True, 4, 256, 4, 1, 100), Plan(True, 4, 256, 4, 1, 100)),  # few rows, and no SM without a tile
        (1, 3, Plan(True, 1, 4, 1, 1, 1), Plan(True, 1, 4, 1, 1, 1)),
        (32768, 768, Plan(True, 2, 1024, 2, 1, 16384), Plan(True, 2, 1024, 1, 1, 16384)),
        (132, 4096, Plan(True, 1, 4096, 8, 1, 132), Plan(True, 1, 4096, 4, 1, 132)),
        (8192, 5120, Plan(True, 1, 8192, 8, 1, 8192), Plan(True, 1, 8192, 4, 1, 8192)),
        (8192, 8192, Plan(False, 1, 4096, 16, 1, 8192), Plan(False, 1, 2048, 8, 1, 8192)),
        (8192, 10240, Plan(False, 1, 2048, 16, 1, 8192), Plan(False, 1, 2048, 8, 1, 8192)),  # chunks divide the row
        (4096, 17408, Plan(False, 1, 1024, 8, 1, 4096), Plan(False, 1, 1024, 8, 1, 4096)),
    ],
)
def test_steps_of_the_forwards_ladders(rows, columns, rms, layer):
    assert [forward_plan(rows, columns, centered) for centered in (False, True)] == [rms, layer]


@pytest.mark.parametrize(
    ("rows", "columns", "rms", "layer"),
    [
        (32768, 256, Plan(True, 4, 256, 1, 3, 1024), Plan(True, 4, 256, 1, 3, 1024)),
        (400, 256, Plan(True, 4, 256, 1, 2, 50), Plan(True, 4, 256, 1, 2, 50)),
        (32768, 1024, Plan(True, 2, 1024, 2, 4, 261), Plan(True, 2, 1024, 2, 4, 261)),
        (16384, 2048, Plan(True, 2, 2048, 4, 3, 256), Plan(True, 4, 2048, 8, 3, 128)),
        (132, 4096, Plan(True, 1, 4096, 4, 2, 66), Plan(True, 1, 4096, 4, 2, 66)),
        (8192, 5120, Plan(True, 1, 8192, 8, 4, 131), Plan(True, 1, 8192, 8, 4, 131)),
        (8192, 7168, Plan(True, 1, 8192, 8, 3, 131), Plan(True, 1, 8192, 8, 3, 131)),
        (8192, 12288, Plan(True, 1, 16384, 32, 1, 131), Plan(True, 1, 16384, 16, 1, 131)),
        (4096, 20480, Plan(False, 1, 4096, 16, 4, 128), Plan(False, 1, 4096, 16, 4, 128)),
    ],
)
def test_steps_of_the_backwards_ladders(rows, columns, rms, layer):
    assert [backward_plan(rows, columns, centered) for centered in (False, True)] == [rms, layer]


@given(programs=st.integers(1, 100000), columns=COLUMNS)
def test_the_sum_of_partial_rows(programs, columns):
    height, width, warps = _partials_tile(programs, columns, 132)
    assert all(n & (n - 1) == 0 for n in (height, width, warps))
    assert height * width <= 4096 and height < 2 * programs
    assert columns < 1024 or -(-columns // width) >= 66, "half of the SMs have nothing to do"
