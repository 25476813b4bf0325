"""The lock on a run's folder, which keeps a second run out while a first one writes.

``mxtrain train`` holds it, whose workers end with it; without it the first worker does. It is a ``flock``: the kernel
releases it when the process that holds it ends, however it ends.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mxtrain.errors import ConfigError
from mxtrain.files import os_errors_as, reason

LOCK_FILE = ".lock"


@contextmanager
def locked(folder: Path, setting: str = "job.dump_folder") -> Iterator[str | None]:
    """Create ``folder`` and hold its lock.

    Gives None, or a warning for the user if the file system has no locks.

    Args:
        setting: what the user gave the folder to, for messages.

    Raises ConfigError if another run holds the lock, or the folder cannot be written.
    """
    path = folder / LOCK_FILE
    not_writable = f"{setting} = {str(folder)!r} cannot be written: {path}"
    with os_errors_as(not_writable):
        folder.mkdir(parents=True, exist_ok=True)
        # A link could name any file of the user's, which would lose its content.
        file = open(path, "a+b", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
    with file:
        warning = None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A child, such as a dataloader worker, would keep the lock for as long as it outlives this process.
            os.register_at_fork(after_in_child=file.close)
        except BlockingIOError as error:
            raise ConfigError(
                f"{setting} = {str(folder)!r} is in use by {_owner(file)}; wait until that run ends, stop it, or "
                "choose another folder"
            ) from error
        except OSError as error:
            warning = f"{path} cannot be locked ({reason(error)}): nothing keeps a second run out of this folder"
        with os_errors_as(not_writable):  # on a full disk, which would stop the run's own files too
            file.truncate(0)
            file.write(f"{os.getpid()} {socket.gethostname()}".encode())
        yield warning


def lock_owner(folder: Path) -> str | None:
    """Return what the lock of a folder says about the process that took it last, or None if there is no lock."""
    try:
        return (folder / LOCK_FILE).read_text()
    except OSError:
        return None


def _owner(file) -> str:
    with suppress(OSError, ValueError):
        file.seek(0)
        process, host = file.read(1000).decode().split()
        return f"process {process} on {host}"
    return "another run"
