"""Writes folders of the cache so that a folder is complete once it exists, also when several processes write it.

This needs no locks, which some shared file systems do not have: every process writes a folder of its own and renames
it. The first one wins. Where locks work, they only save the others the work. The library ``filelock`` would wait for
ever where a lock cannot be made, or where a process on another machine was killed with a lock that is only a file.
"""

import fcntl
import glob
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from mxtrain.data.documents import Progress
from mxtrain.files import sync_file

WAIT_SECONDS = 10.0
"""Interval between progress lines while another process builds; a multiple of POLL_SECONDS"""

POLL_SECONDS = 0.25

BUILDING = ".building"
"""In the names of unfinished folders"""

LEFTOVER_SECONDS = 24 * 3600.0
"""An unfinished folder that has not changed for this long belongs to a killed process"""


@contextmanager
def courtesy_lock(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock beside ``folder``, after waiting for it. Goes on without a lock where locks do not work."""
    path, waited = f"{folder}.lock", 0.0
    with ExitStack() as stack:
        with suppress(OSError):  # no locks here; or the folder cannot be written, which the caller will find out
            file = stack.enter_context(open(path, "w"))
            while not _lock(file):
                if waited % WAIT_SECONDS == 0:
                    after = f", {waited:.0f} s" if waited else ""
                    progress.say(f"another process is preparing {folder}; waiting{after}")
                time.sleep(POLL_SECONDS)
                waited += POLL_SECONDS
        try:
            yield
        finally:
            with suppress(OSError):
                os.unlink(path)


def _lock(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def new_folder(folder: Path, is_complete: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield an empty folder beside ``folder``, and give it that name at the end of the context.

    If another process has made ``folder`` meanwhile, its folder stays and the new one is removed. A folder that is
    not complete, by ``is_complete``, is replaced. After an exception nothing is left.

    Raises:
        OSError: a folder cannot be made or renamed.
    """
    for leftover in folder.parent.glob(f"{glob.escape(folder.name)}{BUILDING}*"):
        if time.time() - last_change(leftover) > LEFTOVER_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)
    building, old = (folder.with_name(f"{folder.name}{BUILDING}-{uuid4().hex[:12]}") for _ in range(2))
    building.mkdir()
    try:
        yield building
        # Otherwise a power failure may leave the folder's name, and zeros in its files.
        for root, _, files in os.walk(building):
            for path in (*(Path(root, name) for name in files), Path(root)):
                sync_file(path)
        try:
            building.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            if not is_complete(folder):
                folder.rename(old)
                building.rename(folder)
    finally:
        for rest in (building, old):
            shutil.rmtree(rest, ignore_errors=True)


def last_change(folder: Path) -> float:
    """Return when a folder or a file in it was last written, in seconds since 1970."""
    return max((status.st_mtime for status in statuses(folder)), default=0.0)


def statuses(folder: Path) -> list[os.stat_result]:
    """Return the status of a folder and of everything in it, less what another process removes meanwhile."""
    found = []
    for path in (folder, *(Path(root, name) for root, *names in os.walk(folder) for name in (*names[0], *names[1]))):
        with suppress(OSError):
            found.append(path.stat())
    return found
