"""A training run to kill: its config, its commands, and all of its processes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import tomli_w

ROOT = Path(__file__).resolve().parents[2]
KEPT = 2
"""Complete checkpoints that a run keeps"""


def write_config(folder: Path, on_gpus: bool) -> Path:
    """Write a config for a small model on a small text, which trains more than ten steps a second.

    On GPUs it trains compiled and in bf16, and attention's backward adds up its parts in a fixed order.
    """
    text = folder / "text.py"
    text.write_text((ROOT / "mxtrain" / "conversion" / "convert.py").read_text() * 8)
    config = {
        "job": {"custom_config_module": "mxtrain.titan.job_config"},
        "experimental": {"custom_import": "mxtrain.titan"},
        "model": {"name": "llama3", "flavor": "debugmodel", "converters": ["mxnorm"]},
        "data": {"vocab_size": 300, "validation_share": 0.0},
        "optimizer": {"lr": 1e-3},
        "lr_scheduler": {"warmup_steps": 2},
        "training": {
            "dataset": "files",
            "dataset_path": str(text),
            "local_batch_size": 1,
            "seq_len": 256 if on_gpus else 32,
            "mixed_precision_param": "bfloat16" if on_gpus else "float32",
        },
        "compile": {"enable": on_gpus},
        "activation_checkpoint": {"mode": "none"},
        "debug": {"seed": 0, "deterministic": on_gpus},
    }
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(config))
    return path


def train_command(config: Path, run: Path, steps: int, interval: int, is_async: bool) -> list[str]:
    """Return the command that starts a run in the folder ``run``."""
    flags = {
        "job.dump_folder": run,
        "training.steps": steps,
        "metrics.log_freq": 1,
        "checkpoint.interval": interval,
        "checkpoint.keep_latest_k": KEPT,
        "checkpoint.async_mode": "async" if is_async else "disabled",
    }
    switches = [f"--checkpoint.{name}" for name in ("enable", "verify", "no-last-save-model-only")]
    return mxtrain(
        "train", config, *switches, "--metrics.no-enable-wandb", *(f"--{name}={value}" for name, value in flags.items())
    )


def mxtrain(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "mxtrain.cli", *map(str, arguments)]


def environment(folder: Path, processes: int) -> dict[str, str]:
    """Return the environment of a run: this checkout's code, and a cache in the drill's own ``folder``."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "NGPU": str(processes), "MXTRAIN_CACHE": str(folder / "cache")}
    return {"OMP_NUM_THREADS": "1", **os.environ, **own}


class Victim:
    """A command and all the processes that it starts, which are killed together.

    Its output goes to the file ``log``.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path):
        self.log = log
        with open(log, "w") as file:
            self._process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._family = [self._process.pid]
        self._family_time = time.monotonic()

    @property
    def status(self) -> int | None:
        """Exit status of the command, or None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def look_for_children(self) -> None:
        """Find all processes, now and then: to look in the moment of the kill would take too long."""
        if time.monotonic() - self._family_time > 0.5:
            self._family = _family(self._process.pid)
            self._family_time = time.monotonic()

    def kill(self) -> None:
        """Kill all processes with SIGKILL, the youngest first: they write, and the launcher only waits."""
        for process in reversed(self._family):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()
        while any(map(_is_alive, self._family)):
            time.sleep(0.01)


def _family(process: int) -> list[int]:
    """Return a process and all that descend from it, parents before children."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(_fields(path)[1])
    family = [process]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family


def _is_alive(process: int) -> bool:
    try:
        return _fields(Path(f"/proc/{process}/stat"))[0] != "Z"
    except OSError:
        return False


def _fields(path: Path) -> list[str]:
    """Return state, parent, ...: what follows the name, which may hold anything."""
    return path.read_text(errors="replace").rpartition(")")[2].split()
