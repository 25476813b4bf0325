"""The same TOML file under TorchTitan 0.2.2 and 0.3: the same losses, and checkpoints that cross.

``MXTRAIN_TITAN_02`` is the Python of an environment with 0.2.2 (``.ci/run`` sets it).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PYTHONS = {"0.2.2": os.environ.get("MXTRAIN_TITAN_02", ""), "0.3": sys.executable}
COMMON = "--metrics.no-enable_wandb --metrics.log_freq=1 --lr_scheduler.warmup_steps=1 --lr_scheduler.total_steps=4"
SMALL = "--training.local_batch_size=2 --training.seq_len=64 --validation.no-enable"
SAVE = "--checkpoint.enable --checkpoint.interval=1"

pytestmark = pytest.mark.skipif(not PYTHONS["0.2.2"], reason="MXTRAIN_TITAN_02 names no Python with TorchTitan 0.2.2")


def train(release: str, folder: Path, config: str, flags: str, processes: int = 1) -> list[tuple[float, float]]:
    """Losses and gradient norms of all steps in the folder."""
    path = f"--job.config_file={REPOSITORY / 'train_configs' / config}.toml"
    command = [PYTHONS[release], "-m", "mxtrain.cli", "train", path.partition("=")[2]]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "RANK", "WORLD"))},
        **{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "NGPU": str(processes), "PYTHONPATH": str(REPOSITORY)},
    }
    words = [*command, f"--job.dump_folder={folder}", *f"{COMMON} {SMALL} {flags}".split()]
    run = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def require_near(found: list, expected: list) -> None:
    assert len(found) == len(expected)
    for own, other in zip(found, expected):
        assert own == pytest.approx(other, rel=2e-5)


@pytest.mark.parametrize("config", ["llama3_debug", "qwen3_moe_debug", "deepseek_v3_debug"])
def test_losses_are_those_of_022(config, tmp_path):
    found = [train(release, tmp_path / release, config, "--training.steps=2") for release in PYTHONS]
    require_near(*found)


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "data_parallel_shard"])
def test_losses_of_two_processes_are_those_of_022(kind, tmp_path):
    degree = "" if kind == "data_parallel_shard" else f"--parallelism.{kind}_parallel_degree=2"
    flags = f"--training.steps=2 --mxnorm.recipe=nvfp4 --mxnorm.stochastic_rounding=False {degree}"
    found = [train(release, tmp_path / release, "llama3_debug", flags, processes=2) for release in PYTHONS]
    require_near(*found)


@pytest.mark.parametrize("first, second", [("0.2.2", "0.3"), ("0.3", "0.2.2")])
def test_a_run_goes_on_under_the_other_release(first, second, tmp_path):
    flags = f"{SAVE} --checkpoint.no-last_save_model_only"
    whole = train(second, tmp_path / "whole", "llama3_debug", f"{flags} --training.steps=4")
    train(first, tmp_path / "run", "llama3_debug", f"{flags} --training.steps=2")
    require_near(train(second, tmp_path / "run", "llama3_debug", f"{flags} --training.steps=4"), whole)
