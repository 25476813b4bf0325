"""The comparison of layouts runs without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "layouts.py"


def run(*options: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, SCRIPT, *options], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("layout", ["fsdp", "abc2", "2", "fsdp2xx"])
def test_a_layout_that_does_not_exist(layout):
    result = run("--layouts", layout)
    assert result.returncode == 2 and f"'{layout}' is not 'one', 'perturbed', or some of ddp, fsdp" in result.stderr


@pytest.mark.sweep
def test_one_layout_that_works_and_one_that_is_refused():
    result = run("--layouts", "perturbed,cp2,fsdp3", "--recipes", "unquantized", "--follow")
    assert result.returncode == 0, result.stderr
    head, _, followed, works, refused = result.stdout.splitlines()
    assert head == "llama3, relative to one, float32, gloo"
    layout, recipe, *numbers = works.split()
    assert followed.split()[:3] == ["perturbed", "unquantized", "0.0e+00"], "its weights are taken from one process"
    assert (layout, recipe) == ("cp2", "unquantized") and 0 < float(numbers[0]) < 1e-4
    assert refused.split()[:2] == ["fsdp3", "unquantized"]
    assert "training.global_batch_size = 4 is not a multiple" in refused
