"""Signals to ``mxtrain train`` with stand-ins for its worker; tests/settings/test_own_modules.py has one of its own."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from mxtrain.cli import launch, workers
from mxtrain.cli.workers import Workers, closing_summary, stop_signals_to
from tests.support.forked import Forked

REPOSITORY = Path(__file__).parents[2]

IN_TRAINING = """
import os, pathlib, signal, sys, time

signal.signal(signal.SIGTERM, lambda *a: None)
folder = pathlib.Path(sys.argv[sys.argv.index("--job.dump_folder") + 1])
(folder / f"ready{os.environ['RANK']}").touch()
time.sleep(60)
"""
NOT_IN_TRAINING = IN_TRAINING.replace(
    "signal.signal(signal.SIGTERM, lambda *a: None)",
    """row = '{"step": %d, "loss": %d.0, "tokens_per_second": 10.0, "memory_gib": 1.0}\\n'
pathlib.Path("run/metrics.jsonl").write_text(row % (1, 8) + row % (2, 6))""",
)


def wait_for(condition) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def launch_on_stand_ins() -> int:
    workers.WORKER = "stand_in"
    return launch.train("tiny.toml", ["--job.dump_folder", "run"])


def launch_stand_ins(worker: str, folder: Path, processes: int) -> Forked:
    (folder / "stand_in.py").write_text(worker)
    (folder / "tiny.toml").write_text("")
    forked = Forked(launch_on_stand_ins, cwd=folder, NGPU=str(processes))
    wait_for(lambda: len(list(folder.glob("run/ready*"))) == processes)
    return forked


def test_a_run_that_is_not_in_training_stops_at_once_with_a_summary(tmp_path):
    forked = launch_stand_ins(NOT_IN_TRAINING, tmp_path, 2)
    os.kill(forked.process.pid, signal.SIGTERM)
    out, err = forked.communicate()
    assert forked.process.exitcode == 128 + signal.SIGTERM
    assert err == "mxtrain: SIGTERM: stopping; a second SIGTERM kills the workers\nmxtrain: stopped by SIGTERM\n"
    assert "8.0000 -> 6.0000" in out


def test_a_second_signal_kills_workers_that_are_saving(tmp_path):
    forked = launch_stand_ins(IN_TRAINING, tmp_path, 1)
    for _ in range(2):  # one signal, sent twice by a terminal or Slurm
        os.kill(forked.process.pid, signal.SIGTERM)
        time.sleep(0.3)
    time.sleep(1)
    assert forked.process.is_alive()
    os.kill(forked.process.pid, signal.SIGTERM)
    out, err = forked.communicate()
    assert forked.process.exitcode == 128 + signal.SIGTERM
    assert err.splitlines()[-1] == "mxtrain: stopped by SIGTERM"
    assert out.splitlines()[-1] == closing_summary(tmp_path / "run").replace(str(tmp_path) + "/", "")


def test_an_interrupt_while_a_worker_imports_ends_it_without_a_traceback(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "mxtrain.train", "--job.config_file", "none.toml"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # These tests may run where the signal is ignored: in the background of a script.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    maps = Path(f"/proc/{process.pid}/maps")
    wait_for(lambda: "libtorch_cpu" in maps.read_text())
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == -signal.SIGINT


class FakeWorker:
    pid = 2**30  # no such process

    def __init__(self):
        self.got = []

    def send_signal(self, number):
        self.got.append(number)


@pytest.mark.parametrize(
    "received, failed, were_stopped",
    [
        ([], {0: -signal.SIGTERM}, False),
        ([signal.SIGTERM], {1: -signal.SIGTERM}, True),
        ([signal.SIGUSR1], {0: -signal.SIGUSR1}, True),
        ([signal.SIGTERM], {0: 1}, False),  # an error while the workers saved
        ([signal.SIGTERM], {0: -signal.SIGKILL}, False),  # out of memory
    ],
)
def test_whether_workers_were_stopped(received, failed, were_stopped, tmp_path):
    earlier = signal.getsignal(signal.SIGTERM)
    own = Workers([], tmp_path)
    own.running = [FakeWorker(), FakeWorker()]
    with stop_signals_to(own.handle):
        for number in received * 2:
            os.kill(os.getpid(), number)
    assert signal.getsignal(signal.SIGTERM) == earlier
    assert own.received == (received[0] if received else None)
    assert [worker.got for worker in own.running] == [received] * 2, "each signal once"
    assert own.were_stopped(failed) == were_stopped


@pytest.mark.parametrize("number, kills", [(signal.SIGTERM, True), (signal.SIGUSR1, False)])
def test_only_a_persons_second_signal_kills(number, kills, monkeypatch, tmp_path):
    """Slurm may send its warning several times."""
    killed, own = [], Workers([], tmp_path)
    own.running = [FakeWorker()]
    monkeypatch.setattr(workers, "ECHO_SECONDS", -1.0)
    monkeypatch.setattr(os, "killpg", lambda *killing: killed.append(killing))
    for _ in range(2):
        own.handle(number, None)
    assert killed == ([(2**30, signal.SIGKILL)] if kills else [])


def test_a_signal_before_any_worker_has_started_ends_the_command(tmp_path):
    own = Workers([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path)
    own.handle(signal.SIGTERM, None)
    with ExitStack() as stack:
        own.start(1, dict(os.environ), stack)
        failed = own.wait()
    assert failed == {0: -signal.SIGTERM} and own.were_stopped(failed)


def test_a_run_without_metrics_ends_with_a_line_that_says_so(tmp_path):
    assert closing_summary(tmp_path).startswith("mxtrain: no summary: ")
