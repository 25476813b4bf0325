"""The manifest of a checkpoint: which files belong to it, with their sizes, and the run that wrote it.

A checkpoint is written to a temporary folder, the manifest last, and then the folder is renamed. So a folder with a
manifest was complete, and the manifest shows whether it still is.
"""

import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

import mxtrain
from mxtrain.errors import ConfigError
from mxtrain.files import FileRecord, hash_file, reason
from mxtrain.json_toml import read_json

MANIFEST_FILE = "manifest.json"
FORMATS = (1, 2)
"""Formats that this version reads. It writes the last one. Format 1 always has hashes of all files"""


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be loaded. The message is for the user, and does not name the checkpoint."""


@dataclass(frozen=True)
class Manifest:
    step: int
    """Number of steps that are done"""
    holds_trainer: bool
    """A run can resume from it: it holds the optimizer, the position in the data and the step, not only weights"""
    files: dict[str, FileRecord]
    """Every file of the checkpoint but the manifest, by its path there; with hashes if ``checkpoint.verify``"""
    tensors: dict[str, dict] = field(default_factory=dict)
    """Name of each of the model's tensors -> {"shape": [int, ...], "dtype": "float32"}"""
    settings: dict = field(default_factory=dict)
    """The run's settings that are not defaults, as the nested tables of its config.toml"""
    versions: dict[str, str | None] = field(default_factory=dict)
    tokenizer_sha256: str | None = None
    processes: int = 1
    defaults: dict = field(default_factory=dict)
    """Full name of each setting -> its default when the checkpoint was saved, which a later version may change"""


_MANIFEST = TypeAdapter(Manifest)


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write the manifest into the folder ``checkpoint``, through to the disk. Raises OSError."""
    content = {"format": FORMATS[-1], **asdict(manifest)}
    content["sha256"] = _own_hash(content)
    with (checkpoint / MANIFEST_FILE).open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        DamagedCheckpoint: it is missing, unreadable or damaged, or of a newer version.
    """
    try:
        content = read_json(checkpoint / MANIFEST_FILE, MANIFEST_FILE)
        if content.pop("sha256", None) != _own_hash(content):
            raise ConfigError(f"{MANIFEST_FILE} is damaged")
        if (found := content.get("format")) not in FORMATS:
            raise ConfigError(f"{MANIFEST_FILE} has format {found}, and this version reads 1 to {FORMATS[-1]}")
        return _MANIFEST.validate_python(content)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{MANIFEST_FILE} is missing") from None
    except ValidationError as error:
        raise DamagedCheckpoint(f"{MANIFEST_FILE} is damaged") from error
    except ConfigError as error:
        raise DamagedCheckpoint(str(error)) from error


def file_record(path: Path, with_hash: bool) -> FileRecord:
    """Return a file's size, and its hash if asked, which reads all of it. Raises OSError."""
    return hash_file(path) if with_hash else FileRecord(path.stat().st_size)


def check_sizes(checkpoint: Path, manifest: Manifest) -> None:
    """Raise DamagedCheckpoint if a file is missing or has another size. Reads no file."""
    for name, record in manifest.files.items():
        size = _look(checkpoint, name, lambda path: path.stat().st_size)
        if size != record.size:
            raise DamagedCheckpoint(f"{name} has {size:,} bytes instead of {record.size:,}")


def check_hashes(checkpoint: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read those files of a checkpoint that have hashes. Raises DamagedCheckpoint if one of them has other content."""
    for name in names:
        record = manifest.files[name]
        if record.sha256 and _look(checkpoint, name, hash_file) != record:
            raise DamagedCheckpoint(f"{name} has other content than was saved")


def _look(checkpoint: Path, name: str, look: Callable):
    try:
        return look(checkpoint / name)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{name} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{name} cannot be read: {reason(error)}") from error


def _own_hash(content: dict) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def package_versions() -> dict[str, str | None]:
    """Return name -> version of mxtrain, Python and what computes; None for a package that is not installed."""
    versions = {"mxtrain": mxtrain.__version__, "python": platform.python_version()}
    for package in ("torch", "torchtitan", "torchao", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions
