"""Starts the workers of ``mxtrain train``, passes stop signals on to them, and reports how they ended.

Only the first worker writes to the terminal. The output of the others goes to files in the run's folder.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mxtrain.analysis import closing_summary
from mxtrain.errors import CONFIG_ERROR_STATUS
from mxtrain.launched import LAUNCHER_VARIABLE, import_flags, stop_signals
from mxtrain.run_folder import WORKER_LOGS

WORKER = "mxtrain.train"
"""Module that every worker runs with ``python -m``"""
SHOWN_LINES = 40
"""Lines of a failed worker's output"""
POLL_SECONDS = 0.05
IMPATIENT = (signal.SIGINT, signal.SIGTERM)
"""Signals that a person sends again to end a run at once"""
ECHO_SECONDS = 1.0
"""A signal that arrives again within this time is the same: a terminal or Slurm may send one twice"""


def run_workers(arguments: list[str], processes: int, folder: Path, environment: dict[str, str]) -> int:
    """Run the workers on this machine until they end, and return the exit status (see ``launch.train``).

    Workers but the first write to files in the run's ``folder``. The last lines of a failed worker are printed, and a
    summary after workers that ended without printing one.
    """
    workers = Workers([sys.executable, *import_flags(), "-u", "-m", WORKER, *arguments], folder / WORKER_LOGS)
    with stop_signals_to(workers.handle), ExitStack() as stack:
        workers.start(processes, environment, stack)
        failed = workers.wait()
    if failed and workers.were_stopped(failed):
        print(f"mxtrain: stopped by {workers.received.name}", file=sys.stderr, flush=True)
        print(closing_summary(folder), flush=True)
        return 128 + workers.received
    return workers.report(failed) if failed else max(worker.returncode for worker in workers.running)


@contextmanager
def stop_signals_to(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Context in which ``handler(number, frame)`` gets the stop signals. The handlers from before return after it."""
    earlier = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, before in earlier.items():
            signal.signal(number, before)


def say_from_handler(text: str) -> None:
    """Write a line to stderr, from a signal handler: the interpreter may be in the middle of a print."""
    start = "\n" if os.isatty(2) else ""  # after a worker's status line and the terminal's ^C
    with suppress(OSError):
        os.write(2, f"{start}mxtrain: {text}\n".encode())


class Workers:
    """The worker processes of a run. Each leads a process group, so a terminal's Ctrl-C reaches the launcher alone.

    Attributes:
        running: the processes, by rank.
        received: the first stop signal, or None.
    """

    def __init__(self, command: list[str], logs: Path):
        self.running: list[subprocess.Popen] = []
        self.received: signal.Signals | None = None
        self._command, self._logs = command, logs
        self._log_starts: dict[int, int] = {}
        self._times: dict[int, float] = {}
        self._is_killing = False

    def start(self, processes: int, environment: dict[str, str], stack: ExitStack) -> None:
        """Start the workers. ``stack`` keeps open what they need for as long as they live."""
        meeting = {"MASTER_PORT": "0"}  # any free port: no other process needs to know it
        if processes > 1:
            from torch.distributed import TCPStore  # takes a second

            # The launcher holds the store by which the workers meet, as torchrun does, so its port cannot be taken.
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            stack.callback(lambda kept: None, store)
            meeting = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        world = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
        own = {LAUNCHER_VARIABLE: str(os.getpid()), **world, **meeting}
        for rank in range(processes):
            output = None
            if rank > 0:
                self._logs.mkdir(exist_ok=True)
                output = stack.enter_context(self._log(rank).open("ab"))
                self._log_starts[rank] = output.tell()
            self.running.append(
                subprocess.Popen(
                    self._command,
                    env={**environment, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
        for number in list(self._times):  # a signal came before all workers had started
            self._send(number)

    def wait(self) -> dict[int, int]:
        """Wait until all workers have ended, or one has failed, and kill the others then.

        Returns the exit statuses of those that failed, by rank: -n after signal n.
        """
        fine = {None, 0, *(128 + number for number in stop_signals())}  # saved, and stopped by a signal
        while True:
            statuses = [worker.poll() for worker in self.running]
            failed = {rank: status for rank, status in enumerate(statuses) if status not in fine}
            if failed:
                self._kill()  # workers in training would wait for the one that failed
            if failed or None not in statuses:
                for worker in self.running:
                    worker.wait()
                return failed
            time.sleep(POLL_SECONDS)

    def were_stopped(self, failed: dict[int, int]) -> bool:
        """Return whether a signal ended workers before they could save: they were not in training, or were killed."""
        return self._is_killing or any(-status in self._times for status in failed.values())

    def handle(self, number: int, frame: object) -> None:
        """Pass a stop signal on to the workers once, and kill them if a person sends it again."""
        now = time.monotonic()
        if number not in self._times:
            self._times[number] = now
            if self.received is None:
                self.received = signal.Signals(number)
                again = f"; a second {self.received.name} kills the workers" * (number in IMPATIENT)
                say_from_handler(f"{self.received.name}: stopping{again}")
            self._send(number)
        elif number in IMPATIENT and now - self._times[number] > ECHO_SECONDS:
            self._is_killing = True
            self._kill()

    def _send(self, number: int) -> None:
        for worker in self.running:
            worker.send_signal(number)

    def _kill(self) -> None:
        for worker in self.running:
            with suppress(OSError):  # it has ended
                os.killpg(worker.pid, signal.SIGKILL)

    def report(self, failed: dict[int, int]) -> int:
        """Print which worker failed first, and its last lines if they went to a file. Return the exit status."""
        mistakes = [rank for rank, status in failed.items() if status == CONFIG_ERROR_STATUS]
        rank = min(mistakes or failed)
        if rank > 0 and (words := self._last_words(rank, bool(mistakes))):
            print(words, file=sys.stderr, flush=True)
        if mistakes:
            return CONFIG_ERROR_STATUS
        status = failed[rank]
        how = f"exit status {status}" if status > 0 else signal.Signals(-status).name
        if status == -signal.SIGKILL:
            how += ", often for lack of memory"
        who = "the worker" if len(self.running) == 1 else f"worker {rank} of {len(self.running)}"
        print(f"mxtrain: training failed: {who} ended with {how}", file=sys.stderr, flush=True)
        return 1

    def _last_words(self, rank: int, is_mistake: bool) -> str:
        """Return the last lines that a worker wrote; only its message after a mistake in the settings."""
        with self._log(rank).open("rb") as file:
            file.seek(self._log_starts[rank])  # earlier runs in this folder have written, too
            text = file.read().decode(errors="replace")
        lines = text.rstrip().splitlines()
        if is_mistake:
            return "\n".join([line for line in lines if line.startswith("mxtrain: error: ")][-1:])
        return "\n".join(lines[-SHOWN_LINES:])

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank{rank}.out"
