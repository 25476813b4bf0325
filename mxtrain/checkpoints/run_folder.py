"""The names of a run's files, and the lock on its folder, which keeps a second run out while a first one writes.

``mxtrain train`` holds the lock, whose workers end with it; without it the first worker does. It is a ``flock``: the
kernel releases it when the process that holds it ends, however it ends.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mxtrain.errors import ConfigError, closest
from mxtrain.files import os_errors_as, reason

CONFIG_FILE = "config.toml"
FACTS_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
DATA_FILE = "data.json"
TOKENIZER_FOLDER = "tokenizer"
PICTURE_FILE = "loss.png"
NUMERICS_FILE = "numerics.png"
LOG_FILE = "train.log"
CONVERSION_FILE = "conversion.txt"
WORKER_LOGS = "worker_logs"
LOCK_FILE = ".lock"

# TorchTitan's defaults of settings that a run's config.toml leaves out
CHECKPOINT_INTERVAL = 500  # steps
CHECKPOINT_FOLDER = "checkpoint"
LEARNING_RATE = 8e-4
LOG_FREQ = 10  # steps
STEPS = 10_000
MERGE_LIMIT = 0.05  # mxtrain's mxnorm.merge_limit

SETTING_CHANGES = " changes from "
"""In the event of a run that resumes with another setting, after the setting's name"""
PROCESSES = "the number of processes"
"""In the place of a setting's name"""


@contextmanager
def locked(folder: Path, setting: str = "job.dump_folder") -> Iterator[str | None]:
    """Create ``folder``, which the user gave to ``setting``, and hold its lock.

    Gives None, or a warning for the user if the file system has no locks.
    """
    path = folder / LOCK_FILE
    not_writable = f"{setting} = {str(folder)!r} cannot be written: {path}"
    with os_errors_as(not_writable):
        folder.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+b", buffering=0)
    with file:
        warning = None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A child, such as a dataloader worker, would keep the lock for as long as it outlives this process.
            os.register_at_fork(after_in_child=file.close)
        except BlockingIOError as error:
            process, *host = (lock_owner(folder) or "").split() or [""]
            owner = f"process {process} on {host[0]}" if host else "another run"
            raise ConfigError(
                f"{setting} = {str(folder)!r} is in use by {owner}; wait until that run ends, stop it, or choose "
                "another folder"
            ) from error
        except OSError as error:
            warning = f"{path} cannot be locked ({reason(error)}): nothing keeps a second run out of this folder"
        with os_errors_as(not_writable):  # on a full disk, which would stop the run's own files too
            file.truncate(0)
            file.write(f"{os.getpid()} {socket.gethostname()}".encode())
        yield warning


def no_run(folder: Path) -> str:
    """Return the end of a message about a path that is no run's folder: why not, and what to name instead."""
    if os.path.lexists(folder):
        why = f"holds no {CONFIG_FILE}" if folder.is_dir() else "is not a folder"
        return f"{why}; name the folder of a run, such as outputs/NAME"
    close = closest(folder.name, (other.name for other in folder.parent.glob("*/")))
    way_on = f"did you mean {str(folder.with_name(close))!r}?" if close else "name the folder of a run"
    return f"does not exist; {way_on}"


def lock_owner(folder: Path) -> str | None:
    """Return what the lock of a folder says about the process that took it last, or None if there is no lock."""
    try:
        return (folder / LOCK_FILE).read_text(errors="replace")
    except OSError:
        return None
