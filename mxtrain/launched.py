"""What a worker and the process that started it, ``mxtrain train`` or ``torchrun``, know about each other."""

import ctypes
import functools
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from mxtrain.files import replace_file

COMPARISON_VARIABLE = "MXTRAIN_COMPARISON_PID"
"""Environment variable by which ``mxtrain compare`` tells its runs its process id"""
COMPILE_VARIABLE = "MXTRAIN_COMPILES"
"""Environment variable by which ``mxtrain train`` tells its workers that they will compile for a GPU"""
START_VARIABLE = "MXTRAIN_START"
"""Environment variable by which ``mxtrain train`` tells its workers where the run starts, as JSON"""
STOP_FILE_VARIABLE = "MXTRAIN_STOP_FILE"
"""Environment variable with the file in which a batch job (``train.sbatch``) reads which signal stopped training"""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the new name and the old name

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def import_flags() -> list[str]:
    """Return Python's flags for a new process that imports the same packages as this one.

    "-m" alone puts the current folder first. There a user's "datasets.py" would stand in for the package that
    TorchTitan imports, and another checkout of mxtrain for this one.
    """
    may_be_only_there = Path.cwd() == Path(__file__).resolve().parents[1]
    return [] if may_be_only_there else ["-P"]


def let_memory_segments_grow(environment) -> None:
    """Let the segments of a GPU's memory grow, as in TorchTitan's own launcher, unless the user has set the allocator.

    Otherwise freed memory is fragmented, and the peak is higher. Must come before PyTorch is imported.
    """
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def stop_signals() -> list[signal.Signals]:
    """Return the signals that save and stop a run.

    ``nohup`` makes its command ignore SIGHUP, and a script makes commands in its background ignore SIGINT: signals
    that this process ignores so are left out. SIGUSR1 is Slurm's warning (``--signal=USR1@300``).
    """
    refusable = (signal.SIGINT, signal.SIGHUP)
    refused = [number for number in refusable if signal.getsignal(number) is signal.SIG_IGN]
    return [number for number in (signal.SIGTERM, signal.SIGUSR1, *refusable) if number not in refused]


def report_stop(number: signal.Signals) -> None:
    """Write the name of the signal that stopped training, whose work is saved, into the file that a batch job names.

    The exit status is 0: a launcher takes another one for a failure, and kills workers that still save.
    """
    if STOP_FILE_VARIABLE in os.environ:
        with suppress(OSError):  # without the file, the job ends instead of going on later
            replace_file(Path(os.environ[STOP_FILE_VARIABLE]), number.name.encode())


def end_with_launcher() -> None:
    """Make the kernel kill this worker as soon as its launcher ends, even if the launcher is killed.

    Without it, a worker whose launcher was killed trains on, unseen. A launcher that ended before the call has closed
    the store in which the workers meet, so they end, too. Does nothing in a process without launcher: it may outlive
    its shell.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # SIGKILL, because a worker that waits for the others in a collective may never handle another signal.
        _end_with_parents_thread(signal.SIGKILL)


def end_with_comparison() -> None:
    """Make the kernel stop this process by SIGTERM when the ``mxtrain compare`` that started it ends.

    The process asks for it itself: Python code between fork and exec can crash in a parent with threads.
    """
    comparison = os.environ.pop(COMPARISON_VARIABLE, None)
    if comparison is not None:
        _end_with_parents_thread(signal.SIGTERM)
        if comparison != str(os.getppid()):  # it ended before the call
            sys.exit(128 + signal.SIGTERM)


def _end_with_parents_thread(number: signal.Signals) -> None:
    """Let the kernel send a signal when the thread that started this process ends. It waits for the process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


@functools.cache
def end_with_parent(parent: int) -> None:
    """End this process within a second of the end of its parent, process ``parent``.

    Not by the kernel's own means as above: it means the thread that started this process, not the parent's process.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
