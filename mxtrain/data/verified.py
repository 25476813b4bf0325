"""Remembers which token files had the right hash, so that every machine reads a file once for its hash, and no more.

A line of the file ``verified`` beside the prepared texts stands for a machine and a file's path, size, time and hash.
The file is in the user's own cache where others own the folder of the texts.
"""

import socket
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from mxtrain.errors import ConfigError
from mxtrain.files import cache_folder

RECORD = "verified"


def fact(path: Path, expected: str) -> str:
    """Return the line that says that a file has the hash ``expected``. Raises OSError."""
    status = path.stat()
    words = [socket.gethostname(), str(path.absolute()), str(status.st_size), str(status.st_mtime_ns), expected]
    return sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()


def facts_beside(folder: Path) -> set[str]:
    """Return the lines about the prepared text in ``folder``, and about others."""
    found = set()
    for record in _records(folder):
        with suppress(OSError):
            found.update(record.read_text(errors="replace").split())
    return found


def remember(folder: Path, facts: Iterable[str]) -> None:
    """Add lines about the prepared text in ``folder``. Where none can be written, the files are read again."""
    for record in _records(folder):
        with suppress(OSError), record.open("a") as file:
            file.write("".join(f"{fact}\n" for fact in facts))  # lines of processes that write at once stay whole
            return


def _records(folder: Path) -> list[Path]:
    records = [folder.parent / RECORD]
    with suppress(ConfigError):  # a user without a home
        records.append(cache_folder() / RECORD)
    return records
