"""``router.py`` on a CPU: peers, checks, ratios, tables. Nothing is timed, and Inductor tunes nothing."""

import json

import pytest
import router as bench_router
import router_cases
import torch
from router_cases import Shape

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
