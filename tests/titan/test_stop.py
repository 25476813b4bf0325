"""A stop signal saves the step in which it came, on all ranks, and a run resumes after it."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mxtrain import cli
from mxtrain.checkpoints.ending import Stop, StopSignals, resume_command
from mxtrain.launched import START_VARIABLE
from tests.support import training_runs
from tests.support.forked import Forked
from tests.support.releases import Checkpoint
from tests.support.training_runs import SAVE, steps, wait_for_lines
from tests.support.training_worker import add_tiny_models

ENABLED = Checkpoint(enable=True)


@pytest.fixture(scope="module")
def stopped(base):
    """Two processes train without end. SIGUSR1 stops one run, in rank 1; SIGTERM the run that resumes it, in rank 0.

    Gives the run's folder, a function from a rank to (status, output) of both runs, and what "mxtrain eval" printed
    while the second run trained.
    """
    evaluations = []
    folder, run = base / "stopped", base / "stopped" / "run"
    endless = [*SAVE, "--training.local_batch_size=2", "--lr_scheduler.total_steps=1000000", steps(1_000_000)]
    resumed = [*endless, f"--job.dump_folder={run}", "--checkpoint.async_mode=async"]
    done = {"run": endless, "resumed": resumed}

    def send_signals(workers: list) -> None:
        wait_for_lines(run / "metrics.jsonl", 3)
        os.kill(workers[1].pid, signal.SIGUSR1)
        os.kill(workers[1].pid, signal.SIGUSR1)  # as Slurm and the launcher do
        wait_for_lines(folder / "run" / "rank0.status", 0)
        lines = (run / "metrics.jsonl").read_text().count("\n")
        wait_for_lines(run / "metrics.jsonl", lines + 1)
        (checkpoint,) = (run / "checkpoint").iterdir()
        step = checkpoint.name.removeprefix("step-")
        try:
            evaluations.extend(Forked(evaluate, run, step, cwd=folder).communicate())
            wait_for_lines(run / "metrics.jsonl", lines + 3)
        finally:
            os.kill(workers[0].pid, signal.SIGTERM)

    training_runs.copy_text(base)
    training_runs.launch(folder, done, 2, disturb=send_signals)

    def outcome(rank: int) -> list[tuple[int, str]]:
        return [
            (
                json.loads((folder / name / f"rank{rank}.status").read_text()),
                (folder / name / f"rank{rank}.txt").read_text(),
            )
            for name in done
        ]

    return run, outcome, evaluations


def evaluate(run: Path, step: str) -> int:
    add_tiny_models()
    Path("text.py").write_text("def main():\n    return 1\n")
    return cli.main(["eval", str(run), "text.py", "--step", step])


def test_a_signal_to_one_rank_saves_and_stops_all_ranks_and_the_run_resumes_after_that_step(stopped):
    run, outcome, _ = stopped
    saved = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoint").glob("step-*"))
    assert len(saved) == 2  # no interval has passed
    logged = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert logged == list(range(1, saved[1] + 1))
    for (status, output), number, step in zip(outcome(0), (signal.SIGUSR1, signal.SIGTERM), saved, strict=True):
        assert status == 0, output  # torchrun would stop the other ranks
        line = f"stopped by {number.name} after step {step}, which is saved; resume with: {resume_command(run)}"
        assert output.count("stopped by") == output.splitlines().count(line) == 1
        assert output.index(line) < output.index(f"over {step} steps")  # the summary is last
    assert outcome(0)[1][1].startswith(f"resuming after step {saved[0]}, from ")
    assert outcome(1) == [(0, ""), (0, "")]


def test_a_checkpoint_is_evaluated_while_the_run_trains_on(stopped):
    _, _, (output, errors) = stopped
    lines = [line.split() for line in output.splitlines()]
    assert [words[0] for words in lines] == ["loss", "perplexity", "bits/byte", "tokens", "bytes"], errors
    assert 2 < float(lines[0][1]) < 8 and lines[4][1] == "25"


def test_only_the_first_signal_counts_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    signals = StopSignals()
    signals.install()
    signals.install()
    try:
        assert signals.received == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGUSR1
        signals.ignore()
        os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signals.restore()
    signals.ignore()  # has no effect any more
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_system_call_in_a_library_goes_on_after_a_signal():
    reader, writer = os.pipe()

    def disturb():
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        time.sleep(0.1)
        os.write(writer, b"x")

    signals, thread = StopSignals(), threading.Thread(target=disturb)
    signals.install()
    try:
        thread.start()
        assert ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), ctypes.c_size_t(1)) == 1
        thread.join()
        assert signals.received == signal.SIGUSR1
    finally:
        signals.restore()


@pytest.mark.parametrize(
    "ignored, others",
    [("", "SIGTERM SIGUSR1 SIGINT SIGHUP"), ("HUP", "SIGTERM SIGUSR1 SIGINT"), ("INT HUP", "SIGTERM SIGUSR1")],
)
def test_signals_that_nohup_and_scripts_ignore_stay_ignored(ignored, others):
    code = "from mxtrain.launched import stop_signals; print(*(number.name for number in stop_signals()))"
    trap = f"trap '' {ignored}; " if ignored else ""
    process = subprocess.run(
        ["bash", "-c", f'{trap}exec "{sys.executable}" -c "{code}"'],
        capture_output=True,
        text=True,
        # These tests may run where a signal is ignored: under nohup, or in the background of a script.
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)],
    )
    assert process.stdout == others + "\n"


def test_the_line_says_why_a_step_is_not_saved(tmp_path):
    stop = Stop(signal.SIGINT, 7, is_saved=False)
    start = "stopped by SIGINT after step 7, which is not saved: "
    assert stop.describe(tmp_path, Checkpoint()) == start + "checkpoint.enable is false"
    load_only = Checkpoint(enable=True, load_only=True)
    assert stop.describe(tmp_path, load_only) == start + "checkpoint.load_only is true"
    assert stop.describe(tmp_path, ENABLED) == start + "its weights are not finite"


def test_the_command_that_resumes_is_quoted_for_the_shell(monkeypatch):
    monkeypatch.setenv(START_VARIABLE, "1")
    assert resume_command(Path("outputs/my run")) == "mxtrain train --resume 'outputs/my run'"
    monkeypatch.delenv(START_VARIABLE)
    assert resume_command(Path("outputs/a")) == ("torchrun ... -m mxtrain.train --resume outputs/a")
