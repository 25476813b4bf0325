"""Every shape gets a plan that the kernels can walk."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.norms.kernels import _partials_tile, backward_plan, forward_plan

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


@given(programs=st.integers(1, 100000), columns=COLUMNS)
def test_the_sum_of_partial_rows(programs, columns):
    height, width, warps = _partials_tile(programs, columns, 132)
    assert all(n & (n - 1) == 0 for n in (height, width, warps))
    assert height * width <= 4096 and height < 2 * programs
    assert columns < 1024 or -(-columns // width) >= 66, "half of the SMs have nothing to do"
