"""Runs of the real trainer in processes of their own, for tests: tiny text, the debug model, CPU."""

import atexit
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

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


# Most of a short run is importing these. Runs are forked from a process that has done so: what they import first, too,
# and nothing of TorchTitan's or of ours, whose order is as it is for anyone.
PRELOADED = ["torch._inductor.compile_fx", "torchao.quantization", "datasets", "tyro", "wandb"]


def launch(folder: Path, *flags: str, processes: int = 1, module: str = "mxtrain.train", config: dict = CONFIG):
    """Run the trainer into ``folder`` and return the finished processes; no launcher in between."""
    folder.mkdir(parents=True, exist_ok=True)
    config_file = folder / "job.toml"
    with open(config_file, "wb") as file:
        tomli_w.dump(config, file)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # As for anyone who trains on a CPU: not in Triton's interpreter, which other tests are for.
        "TRITON_INTERPRET": "0",
        # One cache for all tests of a run: whoever comes first builds it.
        "MXTRAIN_CACHE": os.environ["MXTRAIN_TEST_CACHE"],
    }
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, environment):
        forkserver.ensure_running()
    command = [module, f"--job.config_file={config_file}", f"--job.dump_folder={folder}", *flags]
    outputs = [folder / f"output_of_rank_{rank}.txt" for rank in range(processes)]
    workers = [
        context.Process(
            target=_work, args=(command, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, output)
        )
        for rank, output in enumerate(outputs)
    ]
    for worker in workers:
        worker.start()
    end = time.monotonic() + 300
    for worker in workers:
        worker.join(end - time.monotonic())
    late = [worker for worker in workers if worker.is_alive()]
    for worker in late:
        worker.kill()
    assert not late, "".join(output.read_text()[-4000:] for output in outputs)
    return [
        subprocess.CompletedProcess(command, worker.exitcode, output.read_text())
        for worker, output in zip(workers, outputs, strict=True)
    ]


def _work(command: list[str], environment: dict[str, str], output: Path) -> None:
    """What ``python -m`` does with a command, in a process that was forked for it."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(REPOSITORY)
    sys.path.insert(0, str(REPOSITORY))
    sys.argv = command
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if environment["WORLD_SIZE"] == "1":
        # At the end of training TorchTitan sleeps for two seconds, so that other ranks can complete: there are none.
        sleep = time.sleep
        time.sleep = lambda seconds: sleep(min(seconds, 0.1))
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    finally:
        # A forked process would end without them.
        atexit._run_exitfuncs()


def train(folder: Path, *flags: str, **kwargs) -> list[dict]:
    """``launch``, which must succeed; the rows of its ``metrics.jsonl``."""
    for process in launch(folder, *flags, **kwargs):
        assert process.returncode == 0, process.stdout[-4000:]
    return list(load_run(folder).training)
