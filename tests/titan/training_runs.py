"""Runs of the real trainer in processes of their own, for tests: tiny text, the debug model, CPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import tomli_w

from mxtrain.analysis import load_run

REPOSITORY = Path(__file__).parents[2]

CONFIG = {
    "job": {"custom_config_module": "mxtrain.titan.job_config"},
    "experimental": {"custom_import": "mxtrain.titan"},
    "model": {"name": "llama3", "flavor": "debugmodel", "converters": ["mxnorm"]},
    "data": {"vocab_size": 512},
    "optimizer": {"lr": 3e-3},
    "lr_scheduler": {"warmup_steps": 3},
    "training": {
        "dataset": "files",
        "dataset_path": str(REPOSITORY / "mxtrain" / "**" / "*.py"),
        "local_batch_size": 4,
        "seq_len": 64,
        "steps": 30,
        "mixed_precision_param": "float32",
    },
    "metrics": {"log_freq": 1},
    "activation_checkpoint": {"mode": "none"},
    "debug": {"seed": 0},
}


# At the end of training TorchTitan sleeps for two seconds, so that other ranks can complete: where there are none, for
# less.
IMPATIENT = """
import runpy, time
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.1))
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


def launch(folder: Path, *flags: str, processes: int = 1, module: str = "mxtrain.train", config: dict = CONFIG):
    """Run the trainer into ``folder`` and return the finished processes; no launcher in between."""
    folder.mkdir(parents=True, exist_ok=True)
    config_file = folder / "job.toml"
    with open(config_file, "wb") as file:
        tomli_w.dump(config, file)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = ["-c", IMPATIENT.format(module=module)] if processes == 1 else ["-m", module]
    command = [sys.executable, *start, f"--job.config_file={config_file}", f"--job.dump_folder={folder}", *flags]
    workers = [
        subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                # As for anyone who trains on a CPU: not in Triton's interpreter, which other tests are for.
                "TRITON_INTERPRET": "0",
                # One cache for all tests of a run: whoever comes first builds it.
                "MXTRAIN_CACHE": str(Path(os.environ["MXTRAIN_TEST_CACHE"])),
            },
        )
        for rank in range(processes)
    ]
    outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    return [
        subprocess.CompletedProcess(command, worker.returncode, output)
        for worker, output in zip(workers, outputs, strict=True)
    ]


def train(folder: Path, *flags: str, **kwargs) -> list[dict]:
    """``launch``, which must succeed; the rows of its ``metrics.jsonl``."""
    for process in launch(folder, *flags, **kwargs):
        assert process.returncode == 0, process.stdout[-4000:]
    return list(load_run(folder).training)
