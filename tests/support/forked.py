"""Processes for tests that are forked from one process, which has imported mxtrain and all that it needs."""

import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

PRELOADED = [
    "torch._inductor.compile_fx",
    "torchao.quantization",
    "datasets",
    "tyro",
    "tokenizers",
    "wandb",
    "mxtrain.cli",
    "mxtrain.titan.train",
]
# As in training on a CPU: without Triton's interpreter, which other tests are for.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}


def forking_context() -> multiprocessing.context.ForkServerContext:
    """Python keeps one server per process: all tests of a session must start it in the same environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    return context


class Forked:
    """A call of a module's function in a process and session of its own, in a folder, with environment and output."""

    def __init__(self, function, *args, cwd: Path, **environment: str):
        self._output = [cwd / "stdout.txt", cwd / "stderr.txt"]
        self.process = forking_context().Process(
            target=_call, args=(function, args, cwd, self._output, environment), daemon=False
        )
        self.process.start()

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        """Wait for the end, and return what the call wrote to stdout and stderr."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"no end after {timeout} s")
        out, err = (path.read_text() for path in self._output)
        return out, err


def _call(function, args: tuple, cwd: Path, output: list[Path], environment: dict[str, str]) -> None:
    os.setsid()  # as a shell's job
    # Tests may run where these are ignored: under nohup, or in the background of a script.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(cwd)
    for name in [name for name in os.environ if name.startswith(("MXTRAIN_", "NGPU", "WANDB_"))]:
        del os.environ[name]
    repository = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [str(cwd), repository, os.environ.get("PYTHONPATH")]))
    os.environ.update({**ENVIRONMENT, "MXTRAIN_CACHE": str(cwd / "cache"), "PYTHONPATH": path, **environment})
    for number, file in enumerate(output, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.path.insert(0, repository)
    sys.exit(function(*args))
