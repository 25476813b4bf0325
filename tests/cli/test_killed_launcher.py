"""Workers end with their launcher, even if it is killed."""

import os
import signal
import time
from pathlib import Path

import pytest

from mxtrain.cli import launch
from tests.support.forked import Forked

REPOSITORY = Path(__file__).parents[2]
# A worker that was not stopped would train for hours.
RUN = ["--job.dump_folder", "run", "--training.steps", "1000000"]
CONFIG = str(REPOSITORY / "train_configs" / "llama3_debug.toml")


def children(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def is_worker(process: int) -> bool:
    try:
        return b"mxtrain.train" in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def wait(seconds: float, find):
    """Return what ``find`` finds, as soon as it finds something, or None."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := find():
            return found
        time.sleep(0.02)
    return None


def launch_training(launcher: str) -> int:
    if launcher == "mxtrain":
        return launch.train(CONFIG, RUN)
    from torch.distributed import run

    return run.main(["--standalone", "-m", "mxtrain.train", "--job.config_file", CONFIG, *RUN])


@pytest.mark.parametrize("launcher", ["mxtrain", "torchrun"])
def test_workers_end_when_their_launcher_is_killed(launcher, tmp_path):
    process = Forked(launch_training, launcher, cwd=tmp_path, NGPU="1").process
    worker = wait(100, lambda: next(filter(is_worker, children(process.pid)), None))
    try:
        assert wait(100, lambda: "libtorch_cpu" in Path(f"/proc/{worker}/maps").read_text())
    finally:
        process.kill()
    try:
        assert wait(5, lambda: not is_worker(worker))
    finally:
        if is_worker(worker):
            os.kill(worker, signal.SIGKILL)
        process.join()
