"""``router.py`` on a CPU: peers, checks, ratios, tables. Nothing is timed, and Inductor tunes nothing."""

import argparse
import json

import benchmarking
import pytest
import router as bench_router
import router_cases
import torch
import tune_ahead
from router_cases import SECTIONS, Options, Shape

# Gets a Triton plan, and is small enough for the interpreter.
SHAPE = Shape(16, 32, 2048)
PEERS = {
    "router": ["eager", "eager, fp32 out", "max-autotune", "custom-op"],
    "study": ["eager", "max-autotune", "custom-op"],
    "gate": ["eager bf16", "eager fp32", "max-autotune"],
    "dispatch": ["eager", "Inductor by range"],
}


@pytest.fixture
def uncompiled(monkeypatch):
    """torch.compile returns functions unchanged."""
    router_cases.dynamic_function.cache_clear()
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: function)
    yield
    router_cases.dynamic_function.cache_clear()


@pytest.fixture
def args():
    return argparse.Namespace(device="cpu", check=False, bandwidth=4e12, options=Options("cpu"))


@pytest.fixture
def timed(monkeypatch):
    """The rows of the study take 8, 6, 4 and 2 us. PyTorch computes ours, too: the interpreter is slow."""
    monkeypatch.setattr(router_cases, "our_relu_mm", router_cases.relu_mm)
    times = iter(range(8, 0, -2))
    monkeypatch.setattr(bench_router, "graph_us", lambda run, new_inputs, inputs: float(next(times)))
    monkeypatch.setattr(bench_router, "kernel_us", lambda run, inputs: 0.5)


def entries_of(section):
    return {entry.name: entry for entry in SECTIONS[section].entries(SHAPE, Options("cpu"))}


class TestCases:
    @pytest.mark.parametrize("section", list(SECTIONS))
    def test_entries_are_complete_and_right(self, section, uncompiled):
        torch.manual_seed(0)
        entries = entries_of(section)
        assert list(entries) == [*PEERS[section], "mxtrain"]
        if section == "dispatch":
            del entries["mxtrain"]  # uncompiled, the same as in section router
        inputs = SECTIONS[section].inputs(SHAPE, "cpu")
        for name, entry in entries.items():
            result = entry.make()(*inputs)
            judged = SECTIONS[section].judge(inputs, result)
            assert judged["check"] == "ok", (name, judged)
            if name == "mxtrain" and section != "study":
                logits = result[0] if section == "gate" else result
                assert logits.dtype == torch.float32 and judged["flips"] == 0
                assert judged["error"] < 1e-6

    def test_every_peer_of_a_ratio_is_an_entry(self):
        for name, section in SECTIONS.items():
            assert {peer for peers in section.ratios.values() for peer in peers} <= set(PEERS[name])
            assert section.reach.keys() <= section.ratios.keys()
            assert set(section.quick) <= set(section.shapes)

    def test_the_note_names_the_plan(self):
        assert " parts, " in entries_of("router")["mxtrain"].note()
        assert entries_of("gate")["mxtrain"].note().count(";") == 1


class TestJudging:
    def test_a_wrong_result_fails_the_check(self):
        torch.manual_seed(0)
        x, weight = router_cases.router_inputs(SHAPE, "cpu")
        right = x.float() @ weight.float().t()
        assert router_cases.judge_router((x, weight), right)["check"] == "ok"
        wrong = right.clone()
        wrong[3, 5] += 1e-3 * right.abs().max()
        judged = router_cases.judge_router((x, weight), wrong)
        assert judged["check"] == "differs" and judged["error"] == pytest.approx(1e-3, rel=1e-2)
        assert router_cases.judge_router((x, weight), right[:1])["check"] != "ok"
        assert router_cases.judge_router((x, weight), torch.full_like(right, torch.nan))["check"] == "differs"

    def test_a_wrong_gradient_fails_the_check(self):
        torch.manual_seed(0)
        inputs = router_cases.gate_inputs(SHAPE, "cpu")
        logits, dx, dweight = router_cases.gate_step(router_cases.wide_logits)(*inputs)
        judged = router_cases.judge_gate(inputs, (logits, dx * 1.01, dweight))
        assert judged["check"] == "differs"
        assert judged["dx error"] == pytest.approx(0.01, rel=0.1) and judged["dw error"] < 0.003

    def test_flips(self):
        expected = torch.arange(32.0, dtype=torch.float64).repeat(4, 1) / 8
        result = expected.float()
        assert router_cases.flips(result, expected) == 0
        result[1, 0] = 9.0
        result[2, 31] = 8.0  # another place in the same set
        assert router_cases.flips(result, expected) == 0.25


class TestMeasuring:
    def test_ratios(self, args, timed, uncompiled):
        rows = bench_router.measure_shape("study", SHAPE, args, bench_router.TuningTime(60))
        eager, autotuned, custom, ours = rows
        assert ours["x eager"] == 4 and ours["x best"] == 3 and ours["x custom-op"] == 2
        assert ours["all peers"] and ours["kernel us"] == 0.5 and "compile s" not in ours
        assert autotuned["compile s"] > 0 and "compile s" not in eager
        moved = 2 * (16 * 2048 + 2048 * 32 + 16 * 32)
        assert ours["MB"] == moved / 1e6 and ours["of copy"] == pytest.approx(moved / 2e-6 / 4e12)
        mean = {line["ratio"]: line for line in bench_router.summarise(rows)}
        assert mean["x eager"]["geomean"] == pytest.approx(4) and mean["x eager"]["reached"] == "yes"
        assert mean["x eager"]["all peers"] == 1 and "reached" not in mean["x best"]

    def test_a_wrong_result_of_ours_is_marked(self, args, timed, uncompiled, monkeypatch):
        monkeypatch.setattr(router_cases, "our_relu_mm", lambda a, b: router_cases.relu_mm(a, b) + 1)
        rows = bench_router.measure_shape("study", SHAPE, args, bench_router.TuningTime(60))
        assert rows[-1]["check"] == "WRONG"
        assert all(line["check"] == "WRONG" for line in bench_router.summarise(rows))

    def test_tuning_stops_at_its_limit(self, args, timed, uncompiled):
        budget = bench_router.TuningTime(0)
        budget.ahead = {("study", SHAPE): {"max-autotune": 9.0, "custom-op": "RuntimeError: none"}}
        _, autotuned, custom, ours = bench_router.measure_shape("study", SHAPE, args, budget)
        assert autotuned["compile s"] == 9.0 and autotuned["check"] == "ok", "tuned ahead, so it is measured"
        assert custom["check"] == "not tuned" and not ours["all peers"]

    def test_inputs_of_a_graph_exceed_the_l2_cache(self, monkeypatch):
        seen = []
        monkeypatch.setattr(benchmarking, "graph_ms", lambda calls: seen.extend(calls) or 0.001)
        x = torch.zeros(2**20, dtype=torch.uint8)
        assert bench_router.graph_us(lambda y: y, lambda: (x.clone(),), (x,)) == 1
        assert len(seen) == 192 == len({call.args[0].data_ptr() for call in seen})
        seen.clear()
        large = x.new_empty(2**28)
        bench_router.graph_us(lambda y: y, lambda: (large,), (large,))
        assert len(seen) == bench_router.CALLS


class TestTuningAhead:
    JOBS = [tune_ahead.Job("router", Shape(1, 16, 32), Options("cpu")), tune_ahead.Job("study", SHAPE, Options("none"))]

    def test_a_job(self, uncompiled, capsys):
        job, outcome = tune_ahead.tune(self.JOBS[0])
        assert job is self.JOBS[0] and list(outcome) == ["max-autotune", "custom-op"]
        assert all(seconds > 0 for seconds in outcome.values())
        _, outcome = tune_ahead.tune(self.JOBS[1])
        assert outcome["setup"].startswith("RuntimeError: ")
        assert tune_ahead.describe({"a": 1.25, "b": "RuntimeError: c"}) == "a 1.2 s, b RuntimeError: c"

    def test_timings_take_turns(self, monkeypatch):
        from torch._inductor.runtime.benchmarking import benchmarker

        held = []

        class Lock:
            def __enter__(self):
                held.append(True)

            def __exit__(self, *error):
                held.clear()

        monkeypatch.setattr(benchmarker, "benchmark_gpu", lambda run: (list(held), run()))
        tune_ahead.take_turns(Lock())
        assert benchmarker.benchmark_gpu(lambda: 5) == ([True], 5) and held == []

    def test_tuning_time_is_counted(self, monkeypatch):
        monkeypatch.setattr(
            bench_router, "tune_ahead", lambda jobs, *_: {jobs[0][:2]: {"max-autotune": 3.0, "custom-op": "none"}}
        )
        budget = bench_router.TuningTime(60)
        budget.tune(self.JOBS, 2)
        assert 59 < budget.left < 60
        assert budget.seconds_of("router", Shape(1, 16, 32), "max-autotune") == 3
        assert budget.seconds_of("router", Shape(1, 16, 32), "custom-op") is None
        assert budget.seconds_of("study", SHAPE, "max-autotune") is None


class TestCommandLine:
    def test_check(self, tmp_path, capsys, uncompiled):
        sections = ["router", "study"]
        options = ["--check", "--sections", ",".join(sections), "--shapes", str(Shape(16, 16, 512))]
        assert bench_router.main([*options, "--json", f"{tmp_path}/a.json", "--plot", f"{tmp_path}/a.png"]) == 0
        content = json.loads((tmp_path / "a.json").read_text())
        assert {(row["section"], row["what"]): row["check"] for row in content["rows"]} == {
            (section, name): "ok"
            for section in sections
            for name in [*PEERS[section], "mxtrain"]
            if name not in ("max-autotune", "custom-op")
        }
        assert [line["section"] for line in content["summary"]] == sections
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
        assert "flips" in capsys.readouterr().out

    def test_a_run(self, tmp_path, args, timed, uncompiled, monkeypatch, capsys):
        """A whole run with made-up times."""
        monkeypatch.setattr(benchmarking, "copy_bandwidth", lambda milliseconds: 4e12)
        monkeypatch.setattr(bench_router, "tune_ahead", lambda jobs, *_: {})
        parsed = bench_router.parse(["--sections", "study", "--shapes", str(SHAPE), "--json", str(tmp_path / "a.json")])
        assert bench_router.run(argparse.Namespace(**vars(parsed), device="cpu", options=Options("cpu"))) == 0
        content = json.loads((tmp_path / "a.json").read_text())
        assert content["copy TB/s"] == 4 and content["tuned ahead"] == "0 shapes in 0 s"
        assert [row["graph us"] for row in content["rows"]] == [8, 6, 4, 2]
        out = capsys.readouterr().out
        assert "study: relu(A B), bf16" in out and "x custom-op" in out
