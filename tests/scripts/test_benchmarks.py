"""The benchmarks run on a CPU and find no wrong result. Kernels run in Triton's interpreter; nothing is timed."""

import importlib
import json

import pytest
import torch

pytestmark = pytest.mark.sweep


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cast", ["--check", "--shapes", "32x64"]),
        ("norm", ["--check", "--shapes", "32x64"]),
        ("nvfp4", ["--check", "--shapes", "32x48"]),
        ("router", ["--check", "--sections", "router", "--shapes", "16x16x512"]),
        ("compiled_norm", ["--check", "--shapes", "8x64"]),
    ],
)
def test_every_result_is_right(name, options, tmp_path, monkeypatch):
    if name == "router":  # whose matmul Inductor would tune
        monkeypatch.setattr(torch, "compile", lambda function, **kwargs: function)
    path = tmp_path / "rows.json"
    assert importlib.import_module(name).main([*options, "--json", str(path)]) in (0, None)
    checks = {row["what"]: row["check"] for row in json.loads(path.read_text())["rows"]}
    assert checks == dict.fromkeys(checks, "ok") != {}


def test_products_of_merged_codes_are_near_those_of_mxfp8(tmp_path):
    path = tmp_path / "rows.json"
    assert importlib.import_module("merged_mm").main(["--shapes", "128x128x256", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 4 and all(row["merging"] < 1e-5 and row["sums"] < 1e-6 for row in rows)


def test_every_variant_of_a_model_trains(tmp_path):
    path = tmp_path / "results.json"
    variants = ["bf16", "mx_linear", "mxnorm", "mxnorm_nvfp4", "torchao", "float8_rowwise"]
    options = ["--models", "tiny", "--device", "cpu", "--mode", "reference", "--warmup", "1", "--steps", "1"]
    assert importlib.import_module("train").main([*options, "--json", str(path), "--variants", *variants]) == 0
    losses = [row["loss"] for row in json.loads(path.read_text())["results"]]
    assert len(set(losses)) == len(variants), "every variant has its own numerics"
    assert max(losses) - min(losses) < 0.02, "all start from the same model and tokens"
