"""The benchmark scripts on a CPU: bytes, checks, tables. Kernels run in Triton's interpreter; nothing is timed."""

import json

import cast as bench_cast
import norm as bench_norm
import pytest
import torch
import train as bench_train

PNG = b"\x89PNG\r\n"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of ``cast.py --check`` by name."""
    folder = tmp_path_factory.mktemp("check")
    torch.manual_seed(0)
    bench_cast.main(["--check", "--shapes", "64x96", "--json", f"{folder}/a.json", "--plot", f"{folder}/a.png"])
    assert (folder / "a.png").read_bytes().startswith(PNG)
    return {row["what"]: row for row in json.loads((folder / "a.json").read_text())["rows"]}


class TestCast:
    def test_kernels_agree_with_the_reference(self, rows):
        checks = {name: row["check"] for name, row in rows.items()}
        assert checks == dict.fromkeys(checks, "ok")

    def test_a_wrong_bit_fails_the_check(self):
        y = torch.randn(32, 64)
        codes, scales = bench_cast.casts.cast(y, bench_cast.MXFP8, "rceil")
        assert bench_cast.is_cast((codes, scales), y, 1, "codes")
        codes.view(torch.uint8)[3, 5] ^= 1
        assert not bench_cast.is_cast((codes, scales), y, 1, "codes")
        rho = torch.rand(8) + 0.5
        assert bench_cast.cases.within_ulps(rho, rho.nextafter(torch.tensor(9.0)), 1)
        assert not bench_cast.cases.within_ulps(rho, rho * (1 + 2**-20), 2)
        assert bench_cast.is_rounding_apart(y.bfloat16(), y.bfloat16() * (1 + 2**-8))
        assert not bench_cast.is_rounding_apart(y.bfloat16(), y.bfloat16() * (1 + 2**-5))


@pytest.fixture(scope="module")
def norm_rows(tmp_path_factory):
    """Rows of ``norm.py --check`` by section."""
    folder = tmp_path_factory.mktemp("check")
    torch.manual_seed(0)
    status = bench_norm.main(
        ["--check", "--shapes", "64x96", "--json", f"{folder}/a.json", "--plot", f"{folder}/a.png"]
    )
    assert status == 0 and (folder / "a.png").read_bytes().startswith(PNG)
    return {row["section"]: row for row in json.loads((folder / "a.json").read_text())["rows"]}


class TestNorm:
    def test_rows(self, norm_rows):
        n, weight = 2 * 64 * 96, 2 * 96
        assert {name: row["MB"] * 1e6 for name, row in norm_rows.items()} == pytest.approx(
            {"forward": 2 * n + weight, "training": 2 * n + weight, "backward": 3 * n + 2 * weight}
        )
        for row in norm_rows.values():
            assert row["what"] == "mxtrain" and row["check"] == "ok" and row["note"].startswith("persistent ")


class TestTrain:
    ARGS = ["--models", "tiny", "--device", "cpu", "--mode", "reference", "--warmup", "1", "--steps", "1"]

    def test_every_variant_trains(self, tmp_path, capsys, monkeypatch):
        """One run: all converters, a variant that fails, and the position of random bits in every step."""

        def fail(model, mode):
            raise ValueError("no such cast\nmore")

        set_rounding_step, steps = bench_train.mxtrain.set_rounding_step, []
        monkeypatch.setattr(
            bench_train.mxtrain, "set_rounding_step", lambda step: steps.append(step) or set_rounding_step(step)
        )
        monkeypatch.setitem(bench_train.VARIANTS, "mxnorm_p1", fail)
        monkeypatch.setattr(bench_train.gc, "collect", lambda: 0)  # takes half of the time
        files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
        variants = ["bf16", "mx_linear", "mxnorm", "mx_linear_nvfp4", "mxnorm_nvfp4", "mxnorm_mixed", "torchao"]
        assert bench_train.main([*self.ARGS, *files, "--variants", "mxnorm_p1", *variants]) == 1
        content = json.loads((tmp_path / "a.json").read_text())
        failed, *results = content["results"]
        assert failed["error"] == "ValueError: no such cast" and "loss" not in failed
        assert [row["variant"] for row in results] == variants
        assert content["settings"]["mode"] == "reference"
        losses = [row["loss"] for row in results]
        assert len(set(losses)) == len(variants), "every variant has its own numerics"
        assert max(losses) - min(losses) < 0.02, "all start from the same model and tokens"
        assert results[0]["x bf16"] == 1
        assert (tmp_path / "a.png").read_bytes().startswith(PNG)
        assert steps == [None] + [1, 2, 3, None] * len(variants), "first, warm-up and timed step; then reset"
        captured = capsys.readouterr()
        assert "x bf16" in captured.out and "tiny bf16: " in captured.out
        assert "tiny mxnorm_p1: ValueError: no such cast" in captured.out and "Traceback" in captured.err
