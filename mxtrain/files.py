"""Files and folders that are written whole or not at all, JSON and TOML, hashes, allowed paths, the cache folder."""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from mxtrain.errors import ConfigError

BUILDING = ".building"
"""In the names of unfinished folders"""

_PIECE = 1 << 22  # bytes read at a time


@dataclass(frozen=True)
class FileRecord:
    size: int
    """Bytes"""
    sha256: str | None = None
    """SHA-256 of the content, in hexadecimal digits; None if nobody has read it"""


def hash_file(path: Path) -> FileRecord:
    """Read a file, and return the number of its bytes and their hash. Raises OSError."""
    digest, size = sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return FileRecord(size, digest.hexdigest())


def replace_file(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path``. After a failure, on a full disk for example, ``path`` is as it was before.

    If two processes write at once, the last one wins. Raises OSError.
    """
    written = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        written.write_bytes(content)
        written.replace(path)  # atomic
    except OSError:
        with suppress(OSError):  # the first error says more
            written.unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(folder: Path, is_complete: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield an empty folder beside ``folder``, and give it that name at the end of the context.

    If another process has made ``folder`` meanwhile, its folder stays and the new one is removed. A folder that is
    not complete, by ``is_complete``, is replaced. After an exception nothing is left. Needs no locks, which some shared
    file systems do not have. Raises OSError if a folder cannot be made or renamed.
    """
    building, old = (folder.with_name(f"{folder.name}{BUILDING}-{uuid.uuid4().hex[:12]}") for _ in range(2))
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


def sync_file(path: Path) -> None:
    """Write what a file or a folder holds through to the disk, if it exists and the file system can do that."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def local_path(path: str) -> str:
    """Return ``path``. Raises ValueError for an address: "s3://bucket/run" would be a folder "s3:" here."""
    if "://" in path:
        raise ValueError("is an address, and mxtrain reads and writes only paths of this machine; mount the store")
    return path


def reason(error: OSError) -> str:
    """Return the cause of ``error`` in words, such as "No space left on device"."""
    return error.strerror or str(error)


@contextmanager
def os_errors_as(problem: str) -> Iterator[None]:
    """Turn an OSError inside of the context into a ConfigError: ``problem``, such as "a.png cannot be written"."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{problem}: {reason(error)}") from error


def cache_folder() -> Path:
    """Return $MXTRAIN_CACHE if it is set, else ~/.cache/mxtrain. Does not create the folder.

    Raises ConfigError for a user without a home, and for an address.
    """
    folder = os.environ.get("MXTRAIN_CACHE") or "~/.cache/mxtrain"
    try:
        return Path(local_path(folder)).expanduser()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"$MXTRAIN_CACHE: {folder} cannot be found ({error}); set it to a folder") from error


def read_json(path: Path, name: str = "", kind: type = dict):
    """Return the value in a JSON file, which has the type ``kind``. Messages call the file ``name``, or by its path.

    Raises FileNotFoundError, or ConfigError if it cannot be read, is not UTF-8 or JSON, is nested too deep to parse,
    or has another type.
    """
    value = _read(path, name or str(path), "JSON", json.loads)
    if not isinstance(value, kind):
        raise ConfigError(f"{name or path} holds {type(value).__name__}, not {kind.__name__}")
    return value


def read_toml(path: Path, name: str = "") -> dict:
    """Return the tables in a TOML file, with the arguments and errors of ``read_json``."""
    import tomli

    return _read(path, name or str(path), "TOML", tomli.loads)


def parse(text: str, loads=json.loads):
    """Return ``loads(text)``. Raises ValueError, also for what is nested too deep."""
    try:
        return loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _read(path: Path, name: str, language: str, loads):
    try:
        content = Path(path).read_bytes()
        return parse(content.decode("utf-8-sig"), loads)  # editors on Windows begin a file with a BOM
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{name} is not valid {language}: {error}") from error
