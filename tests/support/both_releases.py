"""The same runs under TorchTitan 0.2.2 and 0.3, each in an environment of its own.

``MXTRAIN_TITAN_02`` is the Python of the one with 0.2.2 (``.ci/run`` sets it).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from tests.support.training_runs import CONFIG, REPOSITORY, Configured, copy_text, launch

PYTHONS = {"0.2.2": os.environ.get("MXTRAIN_TITAN_02", ""), "0.3": sys.executable}

Plan = dict[int, dict[str, tuple[str, list[str]]]]
"""Number of processes -> name of a run -> a config of train_configs, and flags"""


def in_both(base: Path, stage: str, plans: dict[str, Plan]) -> dict[str, Path]:
    """Do the plan of each release, both at once, unless another pytest worker of this session has.

    Returns:
        Release -> the folder where each run has its own.
    """
    folders = {release: base / stage / release for release in PYTHONS}
    with FileLock(base / f"{stage}.lock"):
        if not (base / stage).exists():
            ignored = ("TRITON_", "RANK", "WORLD", "PYTEST_")
            environment = {name: value for name, value in os.environ.items() if not name.startswith(ignored)}
            started = []
            for release, folder in folders.items():
                folder.mkdir(parents=True)
                words = [PYTHONS[release], "-m", "tests.support.both_releases", json.dumps(plans[release]), str(folder)]
                with open(folder / "output.txt", "w") as file:
                    started.append(subprocess.Popen(words, env=environment, cwd=REPOSITORY, stdout=file, stderr=file))
            for process in started:
                process.wait()
    return folders


def steps_of(run: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of a run."""
    if not (run / "metrics.jsonl").exists():
        output = [run / "rank0.txt", run.parents[1] / "output.txt"]
        raise AssertionError("\n".join(path.read_text()[-2000:] for path in output if path.exists()))
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def _small(config: str) -> dict:
    """A config with a small model, few tokens, and one process."""
    flavor = {} if "debug" in config else {"flavor": "debugmodel" if "deepseek" in config else "tiny"}
    same = ("data", "optimizer", "lr_scheduler", "debug")
    return {
        "extends": str(REPOSITORY / "train_configs" / f"{config}.toml"),
        **{table: CONFIG[table] for table in same},
        "model": flavor,
        "model_args": {"n_layers": 2},
        "training": {**CONFIG["training"], "local_batch_size": 2, "steps": 2},
        "parallelism": {"tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "expert_parallel_degree": 1},
        "validation": {"enable": False},
        "checkpoint": {"enable": False},
        "compile": {"enable": False},
        "metrics": {"log_freq": 1, "enable_wandb": False},
    }


def _main(plan: Plan, folder: Path) -> None:
    copy_text(folder)
    for processes, runs in plan.items():
        configured = {name: Configured(_small(config), flags) for name, (config, flags) in runs.items()}
        launch(folder / processes, configured, int(processes))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]), Path(sys.argv[2]))
