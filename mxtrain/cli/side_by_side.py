"""Does the runs of a comparison, several at a time, each as ``mxtrain train`` in a process and folder of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Lock

from mxtrain.analysis.results import nonfinite_loss
from mxtrain.analysis.runs import load_run
from mxtrain.checkpoints.start import NothingToResume, find_start
from mxtrain.cli.launch import core_count
from mxtrain.cli.workers import IMPATIENT, say_from_handler, stop_signals_to
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError
from mxtrain.launched import COMPARISON_VARIABLE, import_flags
from mxtrain.run_folder.comparison import SET_ASIDE, PairedRun, write_comparison
from mxtrain.run_folder.lock import locked
from mxtrain.settings.fields import Settings

TRAIN = [sys.executable, *import_flags(), "-m", "mxtrain.cli", "train"]


class SideBySide:
    """The runs of the comparison in ``folder``, one at a time on each of ``devices``. A thread follows each device.

    Args:
        runs: all runs by name; ``status`` is kept up to date, here and in ``comparison.json``.
        settings: of each run.
        devices: values of CUDA_VISIBLE_DEVICES, or None where a run takes what it finds: a CPU.
        processes: number of processes of each run.

    Attributes:
        stopped_by: the first stop signal, or None.
    """

    def __init__(
        self,
        folder: Path,
        runs: dict[str, PairedRun],
        settings: Mapping[str, Settings],
        devices: list[str | None],
        processes: int,
    ):
        self.folder, self.runs, self.devices, self.processes = folder, runs, devices, processes
        self.stopped_by: signal.Signals | None = None
        self._settings = settings
        self._waiting = deque(run for run in runs.values() if run.status != 0)
        self._running: list[subprocess.Popen] = []
        self._lock = Lock()

    def finish(self) -> None:
        """Do all runs that are not finished. After a stop signal, runs in progress save and stop, and none begins.

        A run that fails is reported, and the others go on.
        """
        with stop_signals_to(self._pass_on), ThreadPoolExecutor(len(self.devices)) as threads:
            list(threads.map(self._work, self.devices))
        self._write()  # again: the disk may have been full

    def _work(self, device: str | None) -> None:
        """Do runs on a device until none is left, or a stop signal comes."""
        while self.stopped_by is None:
            try:
                run = self._waiting.popleft()
            except IndexError:
                return
            try:
                if problem := ended_nonfinite(self.folder / run.name, run):
                    _say(f"{run.name}: FAILED before: {problem}")
                else:
                    self._do(run, device, self._prepare(run))
            except ConfigError as error:
                self._note_status(run, CONFIG_ERROR_STATUS)
                _say(f"{run.name}: FAILED: {error}")

    def _prepare(self, run: PairedRun) -> str:
        """Say how a run begins, after moving away what would keep it from starting in its folder.

        That is a run without a checkpoint to resume from, or one with damaged checkpoints only.

        Raises ConfigError if a process still works in the folder, or if the run cannot start for another reason.
        """
        folder = self.folder / run.name
        if not folder.exists():
            return "starts"
        with locked(folder):
            try:
                start = find_start(folder, self._settings[run.name].values.checkpoint, self.processes)
                return f"resumes after step {start.step}" if start.step else "starts"
            except NothingToResume:
                numbered = (self.folder / SET_ASIDE / f"{run.name}-{number}" for number in count(1))
                aside = next(path for path in numbered if not path.exists())
                aside.parent.mkdir(exist_ok=True)
                folder.rename(aside)
                return f"starts again; its earlier files are in {aside}"

    def _do(self, run: PairedRun, device: str | None, how: str) -> None:
        """Do a run, and say how it begins and ends."""
        folder, log = self.folder / run.name, self.folder / f"{run.name}.log"
        environment = {**os.environ, COMPARISON_VARIABLE: str(os.getpid()), "NGPU": str(self.processes)}
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        if len(self.devices) > 1:
            cores = core_count() // (len(self.devices) * self.processes)
            environment.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
        begin = time.monotonic()
        with open(log, "ab") as output:
            log_start = output.tell()
            # In a session of its own: Ctrl-C on a terminal reaches this process alone, which passes it on once.
            process = subprocess.Popen(
                [*TRAIN, *run.arguments, f"--job.dump_folder={folder.absolute()}"],
                env=environment,
                cwd=run.working_directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(process)
        if self.stopped_by is not None:  # the signal came while the process was started
            process.send_signal(self.stopped_by)
        _say(f"{run.name}: {how}{'' if device is None else f' on GPU {device}'}, log in {log}")
        status = process.wait()
        self._running.remove(process)
        self._note_status(run, status)
        minutes = f"{(time.monotonic() - begin) / 60:.1f} min"
        if status == 0:
            done = sum(other.status == 0 for other in self.runs.values())
            _say(f"{run.name}: {_losses(folder)}, {minutes}; {done} of {len(self.runs)} finished")
        elif self.stopped_by is not None:
            _say(f"{run.name}: stopped after {minutes}")
        else:
            why = ended_nonfinite(folder, self.runs[run.name]) or _last_words(log, log_start)
            _say(f"{run.name}: FAILED after {minutes} with exit status {status}, and the rest goes on: {why}")

    def _note_status(self, run: PairedRun, status: int) -> None:
        with self._lock:
            self.runs[run.name] = replace(run, status=status)
            self._write()

    def _write(self) -> None:
        """Write ``comparison.json``, or warn: a disk that is full for a while does not stop the runs in progress."""
        try:
            write_comparison(self.folder, self.runs)
        except ConfigError as error:
            _say(f"warning: {error}; it is written when the next run ends")

    def _pass_on(self, number: int, frame: object) -> None:
        running = list(self._running)
        if self.stopped_by is None:
            self.stopped_by = signal.Signals(number)
            again = f"; a second {self.stopped_by.name} kills them" * (number in IMPATIENT)
            say_from_handler(f"{self.stopped_by.name}: stopping {len(running)} runs{again}")
        for process in running:
            process.send_signal(number)


def ended_nonfinite(folder: Path, run: PairedRun) -> str:
    """Say what was not finite when the run failed, which the same seed would bring again; "" for other ends."""
    if run.status is None or not 0 < run.status < 128:  # it has not ended, or a signal ended it
        return ""
    try:
        earlier = load_run(folder)
    except ConfigError:
        return ""
    problem = nonfinite_loss(earlier)
    # A run that goes on after such a loss has failed for another reason.
    if not problem or earlier.setting("metrics", "on_nonfinite_loss") == "continue":
        return ""
    return f"{problem}; the same seed gives it again. To start the run all the same, remove {folder}"


def _losses(folder: Path) -> str:
    try:
        run = load_run(folder)
    except ConfigError as error:
        return f"finished without metrics ({error})"
    validation = "" if run.validation_loss is None else f", validation {run.validation_loss:.4f}"
    return f"finished: loss {run.tail_loss:.4f} (last 10 %){validation}"


def _last_words(log: Path, start: int) -> str:
    """Return the last error behind the byte ``start`` of a log, or else its last line."""
    lines = [line for line in log.read_bytes()[start:].decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines[-60:] if re.match(r"mxtrain: error: |[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["it printed nothing"])[-1]


def _say(text: str) -> None:
    print(f"mxtrain: {text}\n", end="", flush=True)
