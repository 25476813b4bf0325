"""The benchmark of op overhead runs without a GPU, and every op that it can run there gives right results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "op_overhead.py"


@pytest.mark.sweep
def test_it_checks_results_without_a_gpu(tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "overhead.json"
    run = subprocess.run(
        [sys.executable, SCRIPT, "--json", path, "--calls", "2", "--rounds", "1"],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(path.read_text())["rows"]
    ops = {row["what"]: row["launches"] for row in rows if "launches" in row}
    assert ops["cast.py dual: cast (0, 1) image"] == ops["nvfp4.py norm: nvfp4_norm p=2 image"] == 1
    assert ops["norm.py forward: mxtrain"] == 1 and ops["norm.py backward: mxtrain"] == 2
    checks = {row["what"]: row["check"] for row in rows}
    assert all(checks.pop(name) == "ok" for name in ops)
    assert checks.pop("bare launch") == checks.pop("register_op") == "ok"
    assert len(checks) == 3 and all(check == "ok" or check.startswith("skipped") for check in checks.values())
