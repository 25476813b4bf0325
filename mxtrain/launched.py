"""What a worker knows about the process that started it: ``mxtrain train`` or ``torchrun``."""

import ctypes
import os
import signal
import sys

LAUNCHER_VARIABLE = "MXTRAIN_LAUNCHER_PID"
"""Environment variable by which ``mxtrain train`` tells its workers its process id"""

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def is_launcher_alive() -> bool:
    """Return whether ``mxtrain train`` is the parent of this process."""
    return os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid())


def end_with_launcher() -> None:
    """Make the kernel kill this worker as soon as its launcher ends, even if the launcher is killed (on Linux).

    Without it, a worker whose launcher was killed trains on, unseen. Does nothing in a process that neither
    ``mxtrain train`` nor ``torchrun`` started: such a process may outlive its shell.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    end_with_parent()
    # The launcher may have ended before the call. With torchrun, such a worker finds no rendezvous and ends anyway.
    if LAUNCHER_VARIABLE in os.environ and not is_launcher_alive():
        sys.exit(128 + signal.SIGKILL)


def end_with_parent() -> None:
    """Make the kernel kill this process as soon as its parent ends (on Linux)."""
    if sys.platform == "linux":
        # SIGKILL, because a process that waits for others in a collective may never handle another signal.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
