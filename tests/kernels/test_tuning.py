"""The walk to the fastest settings, on made-up times, and the file that keeps what was found."""

import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
import triton

from mxtrain.kernels import tuned_plans, tuning
from mxtrain.kernels.device import INTERPRETED
from mxtrain.kernels.launch import Launch
from mxtrain.kernels.norm.rms_norm_backward import rms_norm_backward_by_plan
from mxtrain.kernels.norm.rms_norm_plan import choose_backward, choose_forward
from mxtrain.kernels.norm.rms_norm_tuning import tune_backward, tune_forward
from mxtrain.kernels.plan_table import Operation
from mxtrain.kernels.tuned_plans import TunedPlan, file_of, save, tuned
from tests.support.kernel_checks import gpu_only
from tests.support.rms_norm_checks import backward_inputs, check_backward

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(empty_cache):
    return empty_cache


class Point(NamedTuple):
    x: int
    y: int = 1


def neighbour(point, field, double):
    """Of points between 1 and 1024."""
    value = getattr(point, field)
    value = value * 2 if double else value // 2
    return point._replace(**{field: value}) if 1 <= value <= 1024 else None


def log2(value, of):
    return math.log2(value / of)


def test_the_walk_ends_at_the_bottom_of_a_parabola():
    for start in (1, 8, 64, 512, 1024):
        for best in (1, 4, 64, 1024):
            time = lambda p, best=best: 3 + log2(p.x, best) ** 2  # noqa: E731
            point, times = tuning.walk(Point(start), ("x",), neighbour, time)
            assert point == Point(best) == min(times, key=times.get)
            # The way there, one step beyond, and one step in the other direction.
            assert len(times) <= abs(log2(start, best)) + 3
    _, times = tuning.walk(Point(64), ("x",), neighbour, lambda p: log2(p.x, 64) ** 2)
    assert set(times) == {Point(64), Point(128), Point(32)}, "one step up and one down where the start is best"


def test_the_walk_ends_where_the_time_turns():
    """A second, deeper valley further on is not searched for."""
    times = {64: 5, 128: 4, 256: 6, 512: 1, 1024: 0, 32: 9}
    assert tuning.walk(Point(64), ("x",), neighbour, lambda p: times[p.x])[0] == Point(128)


def test_fields_that_depend_on_each_other():
    """The best x differs for every y: a single round would miss it. Every point is timed once."""
    for start in (Point(1, 1), Point(1024, 1), Point(32, 1024)):
        timed = []

        def time(p, timed=timed):
            timed.append(p)
            return log2(p.x, 64) ** 2 + log2(p.y, 16) ** 2 + 0.7 * log2(p.x, 64) * log2(p.y, 16)

        assert tuning.walk(start, ("x", "y"), neighbour, time)[0] == Point(64, 16)
        assert len(timed) == len(set(timed))


def test_points_that_cannot_run_and_equal_times():
    def time(p):
        return math.inf if p.x > 100 else 1 / p.x

    assert tuning.walk(Point(8), ("x",), neighbour, time)[0] == Point(64)
    assert tuning.walk(Point(512), ("x",), neighbour, time)[1][Point(512)] == math.inf
    assert tuning.walk(Point(8, 8), ("x", "y"), neighbour, lambda p: 1.0)[0] == Point(8, 8), "no circles"


def test_the_best_of_all_walks():
    times = {1: 2, 2: 3, 512: 1, 1024: 9, 256: 9}
    search = tuning.Search(None, "", (Point(1), Point(512)), ("x",), neighbour, None)
    best, tried = tuning.walk_all(search, lambda p: times[p.x])
    assert best == Point(512) and {p.x: time for p, time in tried.items()} == times


class Settings(NamedTuple):
    programs: int
    route: str = "mm"


OPERATION = Operation("op", 3, (), Settings)


def entry(programs=7, **fields):
    return TunedPlan({"programs": programs, "route": "mm", **fields}, 1.5, 4)


def in_file(entry, version=OPERATION.version):
    return {**entry._asdict(), "version": version}


def read_afresh(name="NVIDIA H200", operation=OPERATION):
    """As another process would read the file."""
    tuned_plans.tuned_plans.cache_clear()
    return tuned_plans.tuned_plans(operation, name)


def test_what_is_saved_is_found_again(cache):
    assert tuned_plans.tuned_plans(OPERATION, "NVIDIA H200") == {}
    save(OPERATION, "NVIDIA H200", "one", entry(1))
    assert tuned_plans.tuned_plans(OPERATION, "NVIDIA H200") == {"one": entry(1)}, "also in the process that saved it"
    save(OPERATION, "NVIDIA H200", "two", entry(2))
    save(OPERATION, "NVIDIA H200", "one", entry(3))
    assert read_afresh() == {"one": entry(3), "two": entry(2)}
    assert tuned(OPERATION, "NVIDIA H200", "one") == (Settings(3), "the fastest of 4 plans timed on this GPU, 1.5 us")
    assert tuned(OPERATION, "NVIDIA H200", "three") is None
    assert read_afresh("NVIDIA H100") == {} and read_afresh(operation=OPERATION._replace(name="other")) == {}
    assert [path.name for path in (cache / "op").iterdir()] == ["NVIDIA_H200.json"]
    file_of(OPERATION, "NVIDIA H200").unlink()
    assert tuned_plans.tuned_plans(OPERATION, "NVIDIA H200") == {}, "read once per process"


def test_no_process_writes_while_another_one_does(monkeypatch):
    """Every process reads the file, and writes it with one shape more."""
    write, keys = tuned_plans.replace_file, [str(number) for number in range(8)]
    monkeypatch.setattr(tuned_plans, "replace_file", lambda *args: (time.sleep(0.01), write(*args)))
    with ThreadPoolExecutor(len(keys)) as pool:  # every call opens the folder anew, as another process would
        list(pool.map(lambda key: save(OPERATION, "gpu", key, entry(1)), keys))
    assert tuned_plans.tuned_plans(OPERATION, "gpu").keys() == set(keys)


def test_what_another_process_saved_meanwhile_is_kept():
    save(OPERATION, "gpu", "one", entry(1))
    assert tuned_plans.tuned_plans(OPERATION, "gpu")
    theirs = {"one": in_file(entry(1)), "theirs": in_file(entry(2))}
    file_of(OPERATION, "gpu").write_text(json.dumps(theirs))
    save(OPERATION, "gpu", "two", entry(3))
    assert read_afresh("gpu") == {"one": entry(1), "theirs": entry(2), "two": entry(3)}


def test_other_versions_of_the_kernels_are_ignored():
    save(OPERATION._replace(version=2), "gpu", "old", entry(1))
    save(OPERATION, "gpu", "new", entry(2))
    entries = json.loads(file_of(OPERATION, "gpu").read_text())
    entries["with other fields"] = {"version": OPERATION.version + 1}
    file_of(OPERATION, "gpu").write_text(json.dumps(entries))
    assert read_afresh("gpu") == {"new": entry(2)}


CORRUPT = [
    *("", '{"one": ', "[]", "3", '{"one": 3}', '{"one": {}}', json.dumps({"one": {"version": 3}}), "\udcff"),
    *(
        json.dumps({"one": {**in_file(entry()), **changed}})
        for changed in (
            *(dict(settings=s) for s in ([1, 2], {"programs": 1}, {"programs": 1, "route": "mm", "unroll": 2})),
            *(dict(settings={"route": "mm", "programs": n}) for n in (None, "7", 2.0, math.nan)),
            dict(settings={"route": 3, "programs": 1}),
            dict(microseconds=None),
            dict(tried=2.5),
        )
    ),
]


@pytest.mark.parametrize("text", CORRUPT)
def test_a_corrupt_file_is_ignored_with_a_warning(text):
    path = file_of(OPERATION, "gpu")
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.warns(UserWarning, match=r"tuned plans in .*gpu\.json' are ignored"):
        assert read_afresh("gpu") == {}
    with pytest.warns(UserWarning, match="are ignored"):
        save(OPERATION, "gpu", "one", entry())
    assert read_afresh("gpu") == {"one": entry()}


def test_a_file_is_replaced_as_a_whole(monkeypatch):
    save(OPERATION, "gpu", "one", entry(1))
    before = file_of(OPERATION, "gpu").read_bytes()
    seen = []

    def replace(source, target):
        seen.append(file_of(OPERATION, "gpu").read_bytes() == before and json.loads(source.read_text()).keys())
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        save(OPERATION, "gpu", "two", entry(2))
    assert seen == [{"one": 0, "two": 0}.keys()]
    assert read_afresh("gpu") == {"one": entry(1)}


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU times are real")
@pytest.mark.parametrize("has_weight", [True, False])
def test_tuning_a_shape(has_weight, monkeypatch):
    """The kernel is the faster, the closer it comes to 8 warps; 32 are out of resources. Every plan is launched too."""
    warps = []
    run = Launch.run

    def recording_run(launch, device):
        if "PROGRAMS" not in launch.constants:
            warps.append(launch.constants["num_warps"])
        run(launch, device)

    def do_bench(function, return_mode):
        assert return_mode == "median"
        function()
        if warps[-1] == 32:
            raise triton.runtime.errors.OutOfResources(2, 1, "shared memory")
        return 1e-3 * (2 + log2(warps[-1], 8) ** 2)

    monkeypatch.setattr(Launch, "run", recording_run)
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    monkeypatch.setattr(tuning, "recorded", lambda run: run)
    monkeypatch.setattr(tuning, "gpu", lambda: CPU)
    shape = (3, 520, torch.float32)
    assert choose_backward(*shape, has_weight, CPU).source != "tuned"
    plan, source, reason = tune_backward(*shape, has_weight)
    assert plan.warps == 8 and source == "tuned" and "2.0 us" in reason
    tuned_plans.tuned_plans.cache_clear()
    assert choose_backward(*shape, has_weight, CPU) == (plan, source, reason)
    assert choose_backward(*shape, not has_weight, CPU).source != "tuned"
    arguments = backward_inputs(3, 520, torch.float32, torch.float32 if has_weight else None)
    _, launches = rms_norm_backward_by_plan(*arguments, has_weight)
    assert launches[0].constants["num_warps"] == 8
    check_backward(*arguments)
    plan, source, _ = tune_forward(*shape)
    assert plan.warps == 8 and source == choose_forward(*shape, CPU).source == "tuned"


def test_tuning_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for tune in (tune_forward, tune_backward):
        with pytest.raises(RuntimeError, match="there is none here"):
            tune(64, 96, torch.float32)
        with pytest.raises(ValueError, match=r"shape \(0, 96\)"):
            tune(0, 96, torch.float32)


@gpu_only
def test_tuning_on_this_gpu():
    here = torch.device("cuda", torch.cuda.current_device())
    assert choose_backward(4096, 1024, torch.bfloat16, True, here).source != "tuned"
    tuned_choice = tune_backward(4096, 1024, torch.bfloat16)
    assert tuned_choice.source == "tuned" == tune_forward(4096, 1024, torch.bfloat16).source
    assert choose_backward(4096, 1024, torch.bfloat16, True, here) == tuned_choice
