"""Every shape gets a plan that the kernels can walk, for a reason that can be read."""

import itertools

import pytest
import torch
from rms_norm_checks import forward_inputs

from mxtrain.kernels import tuning
from mxtrain.kernels.norm import rms_norm_plan
from mxtrain.kernels.norm.rms_norm import rms_norm_by_plan
from mxtrain.kernels.norm.rms_norm_plan import (
    BACKWARD_FIELDS,
    BACKWARD_HELD,
    DTYPES,
    FORWARD_HELD,
    FORWARD_HELD_OF_MANY_ROWS,
    MANY_ROWS_OF_AN_SM,
    TUNED,
    Plan,
    choose_backward,
    choose_forward,
    is_valid,
    key,
    neighbour,
    reduction_tile,
    sm_count,
    starts,
    tiles,
)

CPU = torch.device("cpu")
ROWS = [1, 2, 3, 131, 132, 133, 4096, 32768, 1152000, 2**31 // 4096 + 1]
COLUMNS = [1, 2, 3, 31, 96, 256, 257, 768, 3072, 4096, 7168, 8192, 12288, 16384, 16385, 20480, 65536]
NEARLY_FULL_ROWS = [31, 7168]


@pytest.fixture(autouse=True)
def no_tuned_plans(monkeypatch, tmp_path):
    monkeypatch.setenv("MXTRAIN_CACHE", str(tmp_path))
    tuning.tuned_plans.cache_clear()
    yield
    tuning.tuned_plans.cache_clear()


def choices(rows, columns):
    """(choice, whether rows are held whole)"""
    many = rows >= MANY_ROWS_OF_AN_SM * 132
    held = columns <= (FORWARD_HELD_OF_MANY_ROWS if many else FORWARD_HELD) or columns in NEARLY_FULL_ROWS
    yield choose_forward(rows, columns, torch.bfloat16, CPU), held
    for dtype, has_weight in itertools.product(DTYPES, (True, False)):
        yield choose_backward(rows, columns, dtype, has_weight, CPU), columns <= BACKWARD_HELD


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", ROWS)
def test_every_shape_gets_a_plan(rows, columns):
    for (plan, source, reason), held in choices(rows, columns):
        assert is_valid(plan, rows, columns)
        assert source == "heuristic" and len(reason) > 40
        assert plan.persistent == held
        assert plan.rows * plan.columns <= 32 * 64 * plan.warps, "more than 64 elements a thread"


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", ROWS)
def test_the_backward_shares_the_rows_out_evenly(rows, columns):
    plan, _, reason = choose_backward(rows, columns, torch.bfloat16, True, CPU)
    count = tiles(plan, rows)
    longest = -(-count // plan.programs)
    assert plan.programs <= 8 * sm_count(CPU)
    assert longest >= min(2, count), "a partial row for a single tile"
    assert plan.programs == -(-count // longest), "fewer programs would take no longer"
    assert f"{plan.programs} programs" in reason and f"{longest} tiles" in reason


@pytest.mark.parametrize(
    ("rows", "columns", "plan"),
    [
        (400, 256, Plan(True, 4, 256, 1, 2, 50)),
        (32768, 256, Plan(True, 4, 256, 1, 3, 1024)),
        (1152000, 384, Plan(True, 2, 512, 1, 3, 1055)),
        (32768, 768, Plan(True, 2, 1024, 4, 4, 391)),
        (16384, 1536, Plan(True, 1, 2048, 4, 4, 391)),
        (16384, 3072, Plan(True, 1, 4096, 8, 4, 261)),
        (8192, 4096, Plan(True, 2, 4096, 8, 3, 128)),
        (8192, 7168, Plan(True, 1, 8192, 8, 4, 131)),
        (4096, 16384, Plan(True, 1, 16384, 32, 1, 128)),
        (4096, 20480, Plan(False, 1, 4096, 8, 3, 256)),
    ],
)
def test_some_backward_plans(rows, columns, plan):
    assert choose_backward(rows, columns, torch.bfloat16, True, CPU).plan == plan


@pytest.mark.parametrize(
    ("rows", "columns", "plan"),
    [
        (32768, 256, Plan(True, 8, 256, 2, 1, 4096)),
        (32768, 768, Plan(True, 2, 1024, 2, 1, 16384)),
        (16384, 2048, Plan(True, 1, 2048, 4, 1, 16384)),
        (8192, 4096, Plan(True, 1, 4096, 8, 1, 8192)),
        (32768, 4096, Plan(False, 1, 2048, 8, 1, 32768)),
        (8192, 5120, Plan(False, 1, 1024, 4, 1, 8192)),
        (8192, 8192, Plan(False, 1, 4096, 16, 1, 8192)),
        (8192, 7168, Plan(True, 1, 8192, 4, 1, 8192)),
        (8192, 8191, Plan(True, 1, 8192, 4, 1, 8192)),
        (8192, 12288, Plan(False, 1, 4096, 16, 1, 8192)),
        (8192, 14336, Plan(True, 1, 16384, 8, 1, 8192)),
        (16384, 3072, Plan(True, 1, 4096, 4, 1, 16384)),
    ],
)
def test_some_forward_plans(rows, columns, plan):
    assert choose_forward(rows, columns, torch.bfloat16, CPU).plan == plan


@pytest.mark.parametrize(("capability", "kibibytes", "stages"), [("8.6", 99, 2), ("8.0", 163, 4), ("9.0", 227, 4)])
def test_what_is_loaded_ahead_fits_in_shared_memory(monkeypatch, capability, kibibytes, stages):
    monkeypatch.setattr(rms_norm_plan, "shared_memory", lambda device: kibibytes * 1024)
    assert choose_backward(8192, 7168, torch.bfloat16, True, CPU).plan.stages == stages
    for columns, dtype in itertools.product(COLUMNS, DTYPES):
        plan, _, _ = choose_backward(32768, columns, dtype, True, CPU)
        streams = 3 * dtype.itemsize if plan.persistent else 4 * dtype.itemsize + 4
        assert (plan.stages - 1) * plan.rows * plan.columns * streams <= (kibibytes - 12) * 1024


@pytest.mark.parametrize("shape", [(0, 96), (-1, 96), (5, 0), (5, 65537)], ids=str)
def test_shapes_without_a_plan(shape):
    with pytest.raises(ValueError, match=r"shape \(.*\): expected a row or more of 1 to 65536 elements"):
        choose_forward(*shape, torch.float32, CPU)
    with pytest.raises(ValueError, match=r"shape \(.*\): expected a row or more of 1 to 65536 elements"):
        choose_backward(*shape, torch.float32, True, CPU)


GOOD = Plan(True, 4, 128, 4, 2, 16)


@pytest.mark.parametrize(
    "change",
    [
        dict(rows=3),
        dict(rows=0),
        dict(rows=128),
        dict(columns=64),
        dict(columns=256),
        dict(persistent=False, columns=96),
        dict(warps=3),
        dict(warps=64),
        dict(stages=0),
        dict(stages=9),
        dict(programs=0),
        dict(programs=17),
    ],
    ids=str,
)
def test_plans_that_kernels_cannot_walk(change):
    assert is_valid(GOOD, 64, 100) and is_valid(GOOD._replace(persistent=False, columns=32), 64, 100)
    assert not is_valid(GOOD._replace(**change), 64, 100)


def test_tiles_that_registers_cannot_hold():
    assert is_valid(Plan(True, 2, 16384, 32, 1, 1), 64, 16384)
    assert not is_valid(Plan(True, 4, 16384, 32, 1, 1), 64, 16384)


def test_neighbours():
    def step(field, double, plan=GOOD):
        return neighbour(plan, field, double, 64, 100)

    assert step("programs", False) == GOOD._replace(programs=8)
    assert step("programs", True) is None, "there are 16 tiles"
    assert step("programs", True, GOOD._replace(programs=10)) == GOOD, "no more programs than tiles"
    assert step("rows", True) == GOOD._replace(rows=8, programs=8), "there are 8 tiles then"
    assert step("rows", False) == GOOD._replace(rows=2, programs=32), "still a program for every tile"
    assert step("rows", False, GOOD._replace(programs=9)) == GOOD._replace(rows=2, programs=9)
    assert step("rows", False, GOOD._replace(rows=1)) is None
    assert step("columns", False) is None and step("columns", True) is None
    assert step("columns", False, GOOD._replace(persistent=False)) == GOOD._replace(persistent=False, columns=64)
    assert step("stages", False, GOOD._replace(stages=1)) is None
    for rows, columns in itertools.product(ROWS, COLUMNS):
        for ((plan, _, _), _), field, double in itertools.product(
            choices(rows, columns), BACKWARD_FIELDS, (True, False)
        ):
            other = neighbour(plan, field, double, rows, columns)
            assert other is None or (is_valid(other, rows, columns) and other != plan)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", ROWS)
def test_both_variants_of_long_rows_are_starts(rows, columns):
    for (plan, _, _), _ in choices(rows, columns):
        plans = starts(plan, rows, columns)
        assert plans[0] == plan and all(is_valid(p, rows, columns) for p in plans)
        assert {p.persistent for p in plans} == ({True, False} if 1024 < columns <= 32768 else {plan.persistent})


@pytest.mark.parametrize("programs", [1, 5, 132, 528, 100000])
@pytest.mark.parametrize("columns", COLUMNS)
def test_the_sum_of_partial_rows(programs, columns):
    height, width, warps = reduction_tile(programs, columns, 132)
    assert all(n & (n - 1) == 0 for n in (height, width, warps))
    assert height * width <= 4096 and height < 2 * programs
    assert columns < 1024 or -(-columns // width) >= 66, "half of the SMs have nothing to do"


def save(plan: Plan, **changes):
    shape = key("rms_norm", 64, 100, torch.float32, True)
    fields = {**plan._asdict(), **changes}
    tuning.save(TUNED, "cpu", shape, tuning.Entry(fields, 12.3, 9))


def test_a_tuned_plan_goes_first():
    heuristic = choose_forward(64, 100, torch.float32, CPU)
    save(GOOD)
    plan, source, reason = choose_forward(64, 100, torch.float32, CPU)
    assert (plan, source) == (GOOD, "tuned") and "9 plans" in reason and "12.3 us" in reason
    assert plan != heuristic.plan and isinstance(plan.persistent, bool)
    x, weight, _ = forward_inputs(64, 100, weight_dtype=torch.float32)
    _, launch = rms_norm_by_plan(x, None, weight, 1e-5)
    assert launch.grid == (16,) and launch.constants["ROWS"] == 4 and launch.constants["num_warps"] == 4
    for other in ((63, 100, torch.float32), (64, 99, torch.float32), (64, 100, torch.float16)):
        assert choose_forward(*other, CPU).source == "heuristic"
    assert choose_backward(64, 100, torch.float32, True, CPU).source == "heuristic"


@pytest.mark.parametrize("changes", [dict(programs=1000), dict(unroll=2), dict(rows=3)], ids=str)
def test_a_tuned_plan_that_kernels_cannot_walk_is_ignored(changes):
    save(GOOD, **changes)
    assert choose_forward(64, 100, torch.float32, CPU).source == "heuristic"
