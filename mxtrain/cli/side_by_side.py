"""Does the runs of a comparison, several at a time, each as ``mxtrain train`` in a process and folder of its own."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from mxtrain.analysis.results import nonfinite_loss
from mxtrain.analysis.runs import load_run
from mxtrain.checkpoints.start import NothingToResume, find_start
from mxtrain.cli.comparison_plan import settings_of
from mxtrain.cli.launch import core_count
from mxtrain.cli.workers import IMPATIENT, say_from_handler, stop_signals_to
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError
from mxtrain.launched import end_with_this_process, import_flags
from mxtrain.run_folder.comparison import SET_ASIDE, PairedRun, write_comparison
from mxtrain.run_folder.lock import FolderInUse, locked

TRAIN = [sys.executable, *import_flags(), "-m", "mxtrain.cli", "train"]
POLL_SECONDS = 0.1


@dataclass
class _Started:
    run: PairedRun
    process: subprocess.Popen
    place: int
    """Index among the devices"""
    log_start: int
    """Bytes in the log that earlier starts have written"""
    since: float = field(default_factory=time.monotonic)


@dataclass
class SideBySide:
    """The runs of the comparison in ``folder``, one at a time on each of ``devices``.

    Attributes:
        folder: of the comparison.
        runs: all its runs by name; ``status`` is kept up to date, here and in ``comparison.json``.
        devices: values of CUDA_VISIBLE_DEVICES, or None where a run takes what it finds: a CPU.
        processes: number of processes of each run.
        stopped_by: the first stop signal, or None.
    """

    folder: Path
    runs: dict[str, PairedRun]
    devices: list[str | None]
    processes: int = 1
    stopped_by: signal.Signals | None = None
    _running: dict[str, _Started] = field(default_factory=dict)
    _in_use: set[str] = field(default_factory=set)
    """Names of runs in whose folders another process was at work"""
    _is_written: bool = True
    """Whether ``comparison.json`` has the status of every run"""

    def finish(self) -> None:
        """Do all runs that are not finished. After a stop signal, runs in progress save and stop, and none begins.

        A run that fails is reported, and the others go on. A run in whose folder another process works waits: when a
        comparison is killed, its runs save before they stop.
        """
        waiting = [run for run in self.runs.values() if run.status != 0]
        with stop_signals_to(self._pass_on):
            while self._running or (waiting and self.stopped_by is None):
                busy = {started.place for started in self._running.values()}
                free = [place for place in range(len(self.devices)) if place not in busy]
                if waiting and free and self.stopped_by is None:
                    run = waiting.pop(0)
                    if self._start(run, free[0]):
                        continue
                    waiting.append(run)
                for started in list(self._running.values()):
                    if (status := started.process.poll()) is not None:
                        self._end(started, status)
                time.sleep(POLL_SECONDS)
        if not self._is_written:
            self._write()

    def log_of(self, run: PairedRun) -> Path:
        """Return the file with what a run has printed."""
        return self.folder / f"{run.name}.log"

    def _start(self, run: PairedRun, place: int) -> bool:
        """Start a run, or say why it cannot start. Return False if it has to wait for another process."""
        folder, device = self.folder / run.name, self.devices[place]
        if problem := ended_nonfinite(folder, run):
            _say(f"{run.name}: FAILED before: {problem}; to start it again, remove {folder}")
            return True
        try:
            how = _prepare(folder, run, self.processes)
        except FolderInUse as error:
            if run.name not in self._in_use:
                self._in_use.add(run.name)
                _say(f"{run.name}: waits: {error}")
            return False
        except ConfigError as error:
            self._note_status(run, CONFIG_ERROR_STATUS)
            _say(f"{run.name}: FAILED: {error}")
            return True
        environment = {**os.environ, "NGPU": str(self.processes)}
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        if len(self.devices) > 1:
            cores = core_count() // (len(self.devices) * self.processes)
            environment.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
        with open(self.log_of(run), "ab") as log:
            log_start = log.tell()
            # In a session of its own: Ctrl-C on a terminal reaches this process alone, which passes it on once.
            process = subprocess.Popen(
                [*TRAIN, *run.arguments, f"--job.dump_folder={folder.absolute()}"],
                env=environment,
                cwd=run.working_directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_this_process(),
            )
        self._running[run.name] = _Started(run, process, place, log_start)
        if self.stopped_by is not None:  # the signal came while the process was started
            process.send_signal(self.stopped_by)
        where = "" if device is None else f" on GPU {device}"
        _say(f"{run.name}: {how}{where}, log in {self.log_of(run)}")
        return True

    def _end(self, started: _Started, status: int) -> None:
        run = started.run
        del self._running[run.name]
        self._note_status(run, status)
        minutes = (time.monotonic() - started.since) / 60
        if status == 0:
            done = sum(other.status == 0 for other in self.runs.values())
            _say(
                f"{run.name}: {_losses(self.folder / run.name)}, {minutes:.1f} min; {done} of {len(self.runs)} finished"
            )
        elif self.stopped_by is not None:
            _say(f"{run.name}: stopped after {minutes:.1f} min")
        else:
            last = _last_words(self.log_of(run), started.log_start)
            _say(f"{run.name}: FAILED after {minutes:.1f} min with exit status {status}, and the rest goes on: {last}")

    def _note_status(self, run: PairedRun, status: int) -> None:
        self.runs[run.name] = replace(run, status=status)
        self._write()

    def _write(self) -> None:
        """Write ``comparison.json``, or warn: a disk that is full for a while does not stop the runs in progress."""
        try:
            write_comparison(self.folder, self.runs)
            self._is_written = True
        except ConfigError as error:
            self._is_written = False
            _say(f"warning: {error}; it is written when the next run ends")

    def _pass_on(self, number: int, frame: object) -> None:
        if self.stopped_by is None:
            self.stopped_by = signal.Signals(number)
            again = f"; a second {self.stopped_by.name} kills them" * (number in IMPATIENT)
            say_from_handler(f"{self.stopped_by.name}: stopping {len(self._running)} runs{again}")
        for started in self._running.values():
            started.process.send_signal(number)


def _prepare(folder: Path, run: PairedRun, processes: int) -> str:
    """Say how a run begins, after moving away what would keep it from starting in its folder.

    That is a run without a checkpoint to resume from, or one with damaged checkpoints only.

    Raises ConfigError if a process still works in the folder, or if the run cannot start for another reason.
    """
    if not folder.exists():
        return "starts"
    checkpoint = settings_of(run).section("checkpoint")
    with locked(folder):
        try:
            start = find_start(folder, checkpoint, processes)
            return f"resumes after step {start.step}" if start.step else "starts"
        except NothingToResume:
            numbered = (folder.parent / SET_ASIDE / f"{run.name}-{number}" for number in count(1))
            aside = next(path for path in numbered if not path.exists())
            aside.parent.mkdir(exist_ok=True)
            folder.rename(aside)
            return f"starts again; its earlier files are in {aside}"


def ended_nonfinite(folder: Path, run: PairedRun) -> str:
    """Say what was not finite when the run failed, or "". The same seed would bring it again."""
    if run.status is None or not 0 < run.status < 128:  # it has not ended, or a signal ended it
        return ""
    try:
        earlier = load_run(folder)
    except ConfigError:
        return ""
    # A run that goes on after such a loss has failed for another reason.
    return "" if earlier.setting("metrics", "on_nonfinite_loss") == "continue" else nonfinite_loss(earlier)


def _losses(folder: Path) -> str:
    try:
        run = load_run(folder)
    except ConfigError as error:
        return f"finished without metrics ({error})"
    last = run.validation[-1] if run.validation else None
    validation = "" if last is None else f", validation {last['validation_loss']:.4f} (step {last['step']})"
    return f"finished: loss {run.tail_loss:.4f} (last 10 %){validation}"


def _last_words(log: Path, start: int) -> str:
    """Return the last error behind the byte ``start`` of a log, or else its last line."""
    lines = [line for line in log.read_bytes()[start:].decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines[-60:] if re.match(r"mxtrain: error: |[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["it printed nothing"])[-1]


def resume_command(folder: Path) -> str:
    return f"mxtrain compare --resume {shlex.quote(str(folder))}"


def _say(text: str) -> None:
    print(f"mxtrain: {text}", flush=True)
