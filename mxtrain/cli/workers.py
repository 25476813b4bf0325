"""Runs the workers of ``mxtrain train``, and reports how they ended.

Several workers run in torchrun's engine, by which they meet. A single worker starts without it, because the engine's
import of PyTorch takes a second: before the worker may start, and beside the worker's own import.

Only the first worker writes to the terminal. The output of the others goes to files, and torchrun's own reports are
reduced to the worker's message.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mxtrain.analysis import closing_summary
from mxtrain.cli.stop_workers import StoppedAtOnce, StopWorkers, stop_signals_to
from mxtrain.errors import CONFIG_ERROR_STATUS
from mxtrain.launched import LAUNCHER_VARIABLE, STOP_FILE_VARIABLE, import_flags
from mxtrain.run_folder.files import WORKER_LOGS

WORKER = "mxtrain.train"
"""Module that every worker runs with ``python -m``"""
SHOWN_LINES = 40
"""Lines of a failed worker's stderr"""

ENGINE_SIGNAL = signal.SIGQUIT
"""The signal that torchrun's engine handles. It passes the signal on, and kills workers that live on for 30 s."""


ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # any free port: no other process needs to know it
}
"""Environment of a single worker, from which PyTorch makes a process group"""


@dataclass(frozen=True)
class Failure:
    """How a worker failed: the exit status is -n after signal n. The fields are those of torchrun's ProcessFailure."""

    exitcode: int
    local_rank: int = 0
    timestamp: int = 0


def run_workers(arguments: list[str], processes: int, folder: Path) -> int:
    """Run the workers on this machine until they end, and return the exit status (see ``launch.train``).

    All workers but the first write to files in the run's ``folder``. The last lines of a failed worker are printed, and
    a summary after workers that ended without printing one.
    """
    with tempfile.TemporaryDirectory(prefix="mxtrain-", ignore_cleanup_errors=True) as temporary:
        log_dir = folder / WORKER_LOGS
        stop_file = Path(temporary) / "stopped_by"
        os.environ.update({LAUNCHER_VARIABLE: str(os.getpid()), STOP_FILE_VARIABLE: str(stop_file)})
        stop = StopWorkers()
        command = [*import_flags(), "-u", "-m", WORKER, *arguments]
        try:
            with stop_signals_to(stop.handle):
                failures = _run_in_engine(command, processes, log_dir) if processes > 1 else _run_one(command)
        except StoppedAtOnce as error:
            return _stopped_at_once(error.number, folder)
        finally:
            del os.environ[LAUNCHER_VARIABLE], os.environ[STOP_FILE_VARIABLE]
        if failures and stop.explains([failure.exitcode for failure in failures]):
            return _stopped_at_once(stop.received, folder)
        if failures:
            return report_failure(failures, processes, log_dir)
        return 128 + signal.Signals[stop_file.read_text()] if stop_file.exists() else 0


def _run_one(command: list[str]) -> list[Failure]:
    """Run a single worker until it ends. It leads a process group, as those that torchrun's engine starts."""
    worker = subprocess.Popen([sys.executable, *command], env={**os.environ, **ALONE}, start_new_session=True)
    status = worker.wait()
    return [Failure(status)] if status != 0 else []


def _run_in_engine(command: list[str], processes: int, log_dir: Path) -> list[Failure]:
    """Run several workers in torchrun's engine until all end, and return which failed, in the order noticed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    try:
        with _tamed_engine():
            elastic_launch(_launch_config(processes, log_dir), sys.executable)(*command)
    except ChildFailedError as error:
        return [Failure(each.exitcode, each.local_rank, each.timestamp) for each in error.failures.values()]
    except SignalException as error:
        raise StoppedAtOnce(error.sigval) from error
    return []


def _launch_config(processes: int, log_dir: Path):
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        max_restarts=0,
        run_id="workers",
        # A free port of the loopback interface: several runs may share a machine, and host names may not resolve.
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        logs_specs=DefaultLogsSpecs(log_dir=str(log_dir), redirects={rank: Std.ALL for rank in range(1, processes)}),
        signals_to_handle=ENGINE_SIGNAL.name,
    )


def _stopped_at_once(number: signal.Signals, folder: Path) -> int:
    print(f"mxtrain: stopped by {number.name}", file=sys.stderr, flush=True)
    print(closing_summary(folder), flush=True)
    return 128 + number


@contextmanager
def _tamed_engine():
    """Silence torchrun's engine, let it end workers at once, and restore the signal handler that it replaces.

    When a worker fails, the engine ends the others with SIGTERM, and with SIGKILL 30 seconds later. Workers in training
    take SIGTERM for a wish to stop after this step, which never ends without the worker that failed. They get SIGKILL
    instead; the engine has no setting for that.
    """
    from torch.distributed.elastic.multiprocessing import api as engine

    handler, default_signal = signal.getsignal(ENGINE_SIGNAL), engine._get_default_signal
    logging.disable(logging.ERROR)
    engine._get_default_signal = lambda: signal.SIGKILL
    try:
        yield
    finally:
        engine._get_default_signal = default_signal
        logging.disable(logging.NOTSET)
        signal.signal(ENGINE_SIGNAL, handler)


def report_failure(failures: list[Failure], processes: int, log_dir: Path) -> int:
    """Print which worker failed first, and its last lines if they went to a file. Return the exit status.

    The engine kills the other workers when one fails, and notices that last.
    """
    config_errors = [failure for failure in failures if failure.exitcode == CONFIG_ERROR_STATUS]
    if config_errors:
        failure = min(config_errors, key=lambda f: f.local_rank)
    else:
        failure = min(failures, key=lambda f: f.timestamp)
    if failure.local_rank > 0:
        print(_last_words(log_dir, failure), file=sys.stderr, flush=True)
    if config_errors:
        return CONFIG_ERROR_STATUS
    how = f"exit status {failure.exitcode}"
    if failure.exitcode < 0:
        how = signal.Signals(-failure.exitcode).name
        if failure.exitcode == -signal.SIGKILL:
            how += ", often for lack of memory"
    who = "the worker" if processes == 1 else f"worker {failure.local_rank} of {processes}"
    print(f"mxtrain: training failed: {who} ended with {how}", file=sys.stderr, flush=True)
    return 1


def _last_words(log_dir: Path, failure: Failure) -> str:
    """Return the last lines of a redirected worker's stderr; only the message after a mistake in the settings."""
    # Earlier runs in this folder left files too.
    files = list(log_dir.glob(f"*/attempt_0/{failure.local_rank}/stderr.log"))
    text = max(files, key=os.path.getmtime).read_text(errors="replace")
    if failure.exitcode == CONFIG_ERROR_STATUS:
        messages = re.findall(r"^mxtrain: error: .*", text, flags=re.MULTILINE)
        if messages:
            return messages[-1]
    return "\n".join(text.rstrip().splitlines()[-SHOWN_LINES:])
