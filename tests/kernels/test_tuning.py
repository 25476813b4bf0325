"""The walk to the fastest plan, on times made up, and the file that keeps what was found."""

import json
import math
import os
from typing import NamedTuple

import pytest
import torch
import triton
from kernel_checks import gpu_only
from rms_norm_checks import backward_inputs, check_backward

from mxtrain.kernels import tuning
from mxtrain.kernels.device import INTERPRETED
from mxtrain.kernels.launch import Launch
from mxtrain.kernels.norm.rms_norm_backward import rms_norm_backward_by_plan
from mxtrain.kernels.norm.rms_norm_plan import choose_backward, choose_forward
from mxtrain.kernels.norm.rms_norm_tuning import tune_backward, tune_forward
from mxtrain.kernels.tuning import Entry

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MXTRAIN_CACHE", str(tmp_path))
    tuning.tuned_plans.cache_clear()
    yield tmp_path
    tuning.tuned_plans.cache_clear()


class Point(NamedTuple):
    x: int
    y: int = 1


class Other(NamedTuple):
    x: int


def neighbour(point, field, double):
    """Of points between 1 and 1024."""
    value = getattr(point, field)
    value = value * 2 if double else value // 2
    return point._replace(**{field: value}) if 1 <= value <= 1024 else None


def log2(value, of):
    return math.log2(value / of)


@pytest.mark.parametrize("start", [1, 8, 64, 512, 1024])
@pytest.mark.parametrize("best", [1, 4, 64, 1024])
def test_the_bottom_of_a_parabola(start, best):
    best_point, times = tuning.walk(Point(start), ("x",), neighbour, lambda p: 3 + log2(p.x, best) ** 2)
    assert best_point == Point(best)
    # The way there, a step beyond it, and one the other way.
    assert len(times) <= abs(log2(start, best)) + 3
    assert min(times, key=times.get) == best_point


def test_only_a_step_up_and_a_step_down_where_the_start_is_best():
    _, times = tuning.walk(Point(64), ("x",), neighbour, lambda p: log2(p.x, 64) ** 2)
    assert set(times) == {Point(64), Point(128), Point(32)}


def test_it_ends_where_the_time_turns():
    """A second, deeper valley further on is not looked for."""
    times = {64: 5, 128: 4, 256: 6, 512: 1, 1024: 0, 32: 9}
    assert tuning.walk(Point(64), ("x",), neighbour, lambda p: times[p.x])[0] == Point(128)


@pytest.mark.parametrize("start", [Point(1, 1), Point(1024, 1), Point(32, 1024)], ids=str)
def test_fields_that_depend_on_each_other(start):
    """The best x is another one for every y: a single round would miss it."""

    def time(p):
        return log2(p.x, 64) ** 2 + log2(p.y, 16) ** 2 + 0.7 * log2(p.x, 64) * log2(p.y, 16)

    assert tuning.walk(start, ("x", "y"), neighbour, time)[0] == Point(64, 16)


def test_every_plan_is_timed_once():
    timed = []

    def time(p):
        timed.append(p)
        return log2(p.x, 64) ** 2 + log2(p.y, 16) ** 2

    tuning.walk(Point(4, 256), ("x", "y"), neighbour, time)
    assert len(timed) == len(set(timed))


def test_plans_that_cannot_run():
    def time(p):
        return math.inf if p.x > 100 else 1 / p.x

    assert tuning.walk(Point(8), ("x",), neighbour, time)[0] == Point(64)
    assert tuning.walk(Point(512), ("x",), neighbour, time)[1][Point(512)] == math.inf


def test_equal_times_do_not_go_round_in_circles():
    assert tuning.walk(Point(8, 8), ("x", "y"), neighbour, lambda p: 1.0)[0] == Point(8, 8)


FAMILY = tuning.Family("family", version=3, words=("route",))


def entry(programs=7, **fields):
    return Entry({"programs": programs, **fields}, 1.5, 4)


def in_file(entry, version=FAMILY.version):
    return {**entry._asdict(), "version": version}


def read_afresh(name="NVIDIA H200", family=FAMILY):
    """As another process would."""
    tuning.tuned_plans.cache_clear()
    return tuning.tuned_plans(family, name)


def test_what_is_saved_is_found_again(cache):
    assert tuning.tuned_plans(FAMILY, "NVIDIA H200") == {}
    tuning.save(FAMILY, "NVIDIA H200", "one", entry(1))
    assert tuning.tuned_plans(FAMILY, "NVIDIA H200") == {"one": entry(1)}, "in the process that saved it, too"
    tuning.save(FAMILY, "NVIDIA H200", "two", entry(2))
    tuning.save(FAMILY, "NVIDIA H200", "one", entry(3))
    assert read_afresh() == {"one": entry(3), "two": entry(2)}
    assert read_afresh("NVIDIA H100") == {}
    assert [path.name for path in (cache / "family").iterdir()] == ["NVIDIA_H200.json"]


def test_every_family_has_files_of_its_own(cache):
    other = tuning.Family("other", version=1)
    tuning.save(FAMILY, "gpu", "one", entry(1, route="mm"))
    tuning.save(other, "gpu", "one", entry(2))
    assert read_afresh("gpu") == {"one": entry(1, route="mm")} and read_afresh("gpu", other) == {"one": entry(2)}
    assert sorted(path.name for path in cache.iterdir()) == ["family", "other"]


def test_a_plan_is_taken_if_the_kernels_can_walk_it():
    def plan(is_valid=lambda point: True, shape="one", point=Point):
        return tuning.tuned_plan(FAMILY, shape, CPU, point, is_valid)

    tuning.save(FAMILY, "cpu", "one", Entry({"x": 4, "y": 8}, 12.34, 9))
    assert plan() == (Point(4, 8), "tuned", "the fastest of 9 plans timed on this GPU, 12.3 us")
    assert plan(lambda point: point.x > 4) is None and plan(shape="two") is None and plan(point=Other) is None


def test_the_file_is_read_once_a_process(cache):
    tuning.save(FAMILY, "gpu", "one", entry(1))
    assert tuning.tuned_plans(FAMILY, "gpu")
    tuning.file_of(FAMILY, "gpu").unlink()
    assert tuning.tuned_plans(FAMILY, "gpu") == {"one": entry(1)}


def test_what_another_process_saved_meanwhile_is_kept():
    tuning.save(FAMILY, "gpu", "one", entry(1))
    assert tuning.tuned_plans(FAMILY, "gpu")
    theirs = {"one": in_file(entry(1)), "theirs": in_file(entry(2))}
    tuning.file_of(FAMILY, "gpu").write_text(json.dumps(theirs))
    tuning.save(FAMILY, "gpu", "two", entry(3))
    assert read_afresh("gpu") == {"one": entry(1), "theirs": entry(2), "two": entry(3)}


def test_other_versions_of_the_kernels_are_ignored():
    tuning.save(FAMILY._replace(version=2), "gpu", "old", entry(1))
    tuning.save(FAMILY, "gpu", "new", entry(2))
    entries = json.loads(tuning.file_of(FAMILY, "gpu").read_text())
    entries["of other fields"] = {"version": FAMILY.version + 1}
    tuning.file_of(FAMILY, "gpu").write_text(json.dumps(entries))
    assert read_afresh("gpu") == {"new": entry(2)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"one": ',
        "[]",
        "3",
        '{"one": 3}',
        '{"one": {}}',
        json.dumps({"one": {"version": FAMILY.version}}),
        json.dumps({"one": {**in_file(entry()), "plan": [1, 2]}}),
        json.dumps({"one": {**in_file(entry()), "plan": {"programs": "7"}}}),
        json.dumps({"one": {**in_file(entry()), "plan": {"route": "mm", "programs": None}}}),
        json.dumps({"one": {**in_file(entry()), "plan": {"route": "mm", "programs": 2.0}}}),
        json.dumps({"one": {**in_file(entry()), "plan": {"route": "mm", "programs": float("nan")}}}),
        json.dumps({"one": {**in_file(entry()), "microseconds": None}}),
        "\udcff",
    ],
)
def test_a_corrupt_file_is_ignored_with_a_warning(text):
    path = tuning.file_of(FAMILY, "gpu")
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.warns(UserWarning, match=r"tuned plans in .*gpu\.json' are ignored"):
        assert read_afresh("gpu") == {}
    with pytest.warns(UserWarning, match="are ignored"):
        tuning.save(FAMILY, "gpu", "one", entry())
    assert read_afresh("gpu") == {"one": entry()}


def test_a_file_is_replaced_as_a_whole(monkeypatch):
    tuning.save(FAMILY, "gpu", "one", entry(1))
    before = tuning.file_of(FAMILY, "gpu").read_bytes()
    seen = []

    def replace(source, target):
        seen.append(tuning.file_of(FAMILY, "gpu").read_bytes() == before and json.loads(source.read_text()).keys())
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        tuning.save(FAMILY, "gpu", "two", entry(2))
    assert seen == [{"one": 0, "two": 0}.keys()]
    assert read_afresh("gpu") == {"one": entry(1)}


@pytest.fixture
def made_up_times(monkeypatch):
    """A kernel is the faster, the nearer it comes to 8 programs; 64 do not fit. Every plan is launched as well."""
    programs = []
    run = Launch.run

    def recording_run(launch, device):
        if "PROGRAMS" not in launch.constants:
            programs.append(launch.grid[0])
        run(launch, device)

    def do_bench(function, return_mode):
        assert return_mode == "median"
        function()
        if programs[-1] == 64:
            raise triton.runtime.errors.OutOfResources(2, 1, "shared memory")
        return 1e-3 * (2 + log2(programs[-1], 8) ** 2)

    monkeypatch.setattr(Launch, "run", recording_run)
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    monkeypatch.setattr(tuning, "gpu", lambda: CPU)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU times are real")
@pytest.mark.parametrize("has_weight", [True, False])
def test_tuning_a_shape(made_up_times, has_weight):
    assert choose_backward(64, 96, torch.float32, has_weight, CPU).source == "heuristic"
    plan, source, reason = tune_backward(64, 96, torch.float32, has_weight)
    assert plan.programs == 8 and source == "tuned" and "2.0 us" in reason
    tuning.tuned_plans.cache_clear()
    assert choose_backward(64, 96, torch.float32, has_weight, CPU) == (plan, source, reason)
    assert choose_backward(64, 96, torch.float32, not has_weight, CPU).source == "heuristic"
    arguments = backward_inputs(64, 96, torch.float32, torch.float32 if has_weight else None)
    _, launches = rms_norm_backward_by_plan(*arguments, has_weight)
    assert launches[0].grid == (8,)
    check_backward(*arguments)
    plan, source, _ = tune_forward(64, 96, torch.float32)
    assert plan.programs == 8 and source == choose_forward(64, 96, torch.float32, CPU).source == "tuned"


def test_tuning_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for tune in (tune_forward, tune_backward):
        with pytest.raises(RuntimeError, match="there is none here"):
            tune(64, 96, torch.float32)
        with pytest.raises(ValueError, match=r"shape \(0, 96\)"):
            tune(0, 96, torch.float32)


@gpu_only
def test_tuning_on_this_gpu():
    heuristic = choose_backward(4096, 1024, torch.bfloat16, True, torch.device("cuda"))
    assert heuristic.source == "heuristic"
    tuned = tune_backward(4096, 1024, torch.bfloat16)
    assert tuned.source == "tuned"
    assert choose_backward(4096, 1024, torch.bfloat16, True, torch.device("cuda")) == tuned
