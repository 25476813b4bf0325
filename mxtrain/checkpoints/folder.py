"""The checkpoints in a run's folder: manifests, which are whole, how a checkpoint gets its place and leaves it.

A checkpoint is written to ``.saving/step-N``, its manifest last, and renamed to ``step-N``, which is atomic: whatever
has that name was complete, and its manifest shows whether it still is. An old checkpoint goes the other way before it
is removed. So a kill at any moment leaves whole checkpoints, and parts only in the two hidden folders, which the next
run empties.
"""

import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

from pydantic import TypeAdapter

import mxtrain
from mxtrain.errors import ConfigError
from mxtrain.files import FileRecord, hash_file, read_json, reason, sync_file

SAVING, REMOVING, SET_ASIDE = ".saving", ".removing", "set_aside"
MANIFEST_FILE = "manifest.json"
DCP_METADATA = ".metadata"
"""File with the index of a checkpoint in PyTorch's format"""
FORMAT = 2
"""Of the manifest"""


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
    settings: dict = field(default_factory=dict)
    """The run's settings that are not defaults, as the nested tables of its config.toml"""
    versions: dict[str, str | None] = field(default_factory=dict)
    processes: int = 1
    defaults: dict = field(default_factory=dict)
    """Full name of each setting -> its default when the checkpoint was saved, which a later version may change"""
    images: list[str] = field(default_factory=list)
    """Layers that mode "fp8_merged" gave up (``mxtrain.diagnostics.merge_guard``)"""
    codes: list[str] = field(default_factory=list)
    """Layers whose weights FSDP gathers as codes (``mxtrain.parallel.fsdp_gather``)"""


_MANIFEST = TypeAdapter(Manifest)


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write the manifest into the folder ``checkpoint``, through to the disk. Raises OSError."""
    content = {"format": FORMAT, **asdict(manifest)}
    content["sha256"] = _own_hash(content)
    with (checkpoint / MANIFEST_FILE).open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises DamagedCheckpoint if it is missing, damaged, or of a newer version."""
    try:
        content = read_json(checkpoint / MANIFEST_FILE, MANIFEST_FILE)
        if content.pop("sha256", None) != _own_hash(content):
            raise DamagedCheckpoint(f"{MANIFEST_FILE} is damaged")
        if (found := content.get("format")) != FORMAT:
            raise DamagedCheckpoint(f"{MANIFEST_FILE} has format {found}, and this version reads {FORMAT}")
        return _MANIFEST.validate_python(content)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{MANIFEST_FILE} is missing") from None
    except ConfigError as error:
        raise DamagedCheckpoint(str(error)) from error


def _own_hash(content: dict) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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


def package_versions() -> dict[str, str | None]:
    """Return name -> version of mxtrain, Python and what computes; None for a package that is not installed."""
    versions = {"mxtrain": mxtrain.__version__, "python": platform.python_version()}
    for package in ("torch", "torchtitan", "torchao", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


class Checkpoints:
    """The checkpoints in a folder. Looks at the sizes of files, not at their contents."""

    def __init__(self, folder: Path):
        self.folder = folder
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        self.found = sorted(filter(re.compile(r"step-(0|[1-9]\d*)").fullmatch, names), key=step_of)
        """Names of all checkpoints, whole or not, in the order of their steps"""
        self.whole: dict[int, Manifest] = {}
        """Step of each checkpoint whose files are all there -> its manifest, in the order of steps"""
        self.problems: dict[str, str] = {}
        """Name of each other checkpoint -> what is wrong with it"""
        for name in self.found:
            try:
                self.whole[step_of(name)] = read_whole(folder / name)
            except DamagedCheckpoint as error:
                self.problems[name] = str(error)

    @property
    def newest(self) -> Path | None:
        """The whole checkpoint of the last step; None if there is none."""
        return self.path(max(self.whole)) if self.whole else None

    def choose(self, wanted: int | None, setting: str) -> int | None:
        """Return the step that the user wants, by ``setting``, or the newest. None if the folder has no checkpoint.

        Raises ConfigError if the checkpoint is not whole, or none is.
        """
        if wanted is not None:
            if problem := self.problems.get(f"step-{wanted}"):
                raise ConfigError(f"{setting} = {wanted}: {self.path(wanted)} cannot be loaded: {problem}")
            if wanted not in self.whole:
                whole = f"choose one of {', '.join(map(str, self.whole))}" if self.whole else "none is whole"
                raise ConfigError(f"{setting} = {wanted} is not among the steps in {self.folder}; {whole}")
            return wanted
        if self.found and not self.whole:
            problems = "; ".join(f"{name}: {problem}" for name, problem in self.problems.items())
            raise ConfigError(f"checkpoint.folder: {self.folder} holds no whole checkpoint ({problems}); name another")
        return max(self.whole, default=None)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def stale(self, keep: int) -> list[Path]:
        """Return the whole checkpoints but the newest ``keep``, oldest first. 0 keeps all.

        Damaged checkpoints do not count: they would push out those that are whole. Step 0 is never among them, and
        does not count either: it holds the weights that the run starts from.
        """
        return [self.path(step) for step in [step for step in self.whole if step][:-keep]]

    def after(self, step: int) -> list[Path]:
        """Return the checkpoints of later steps, whole or not."""
        return [self.folder / name for name in self.found if step_of(name) > step]


def step_of(name: str) -> int:
    """Return the step of a checkpoint from its name, "step-N"."""
    return int(name.removeprefix("step-"))


def read_whole(checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint, after a look at the sizes of its files. Raises DamagedCheckpoint."""
    manifest = read_manifest(checkpoint)
    check_sizes(checkpoint, manifest)
    return manifest


def publish(written: Path, checkpoint: Path) -> None:
    """Give a complete checkpoint its name. Raises OSError if another checkpoint has it, and leaves that one alone."""
    sync_file(written)
    written.rename(checkpoint)
    sync_file(checkpoint.parent)
    with suppress(OSError):
        written.parent.rmdir()


def set_aside(checkpoint: Path) -> Path:
    """Move a checkpoint to the folder ``set_aside``, where no run looks for it, and return its new path."""
    folder = checkpoint.parent / SET_ASIDE
    folder.mkdir(exist_ok=True)
    target, number = folder / checkpoint.name, 2
    while target.exists():
        target, number = folder / f"{checkpoint.name}-{number}", number + 1
    return checkpoint.rename(target)


def withdraw(checkpoint: Path) -> Path:
    """Move a checkpoint to where a half removed one harms nobody, and return its new path, for removal."""
    folder = checkpoint.parent / REMOVING
    folder.mkdir(exist_ok=True)
    target = folder / checkpoint.name
    shutil.rmtree(target, ignore_errors=True)
    return checkpoint.rename(target)


def clear_leftovers(folder: Path) -> None:
    """Remove what killed runs left: parts of checkpoints that were being saved or removed."""
    for name in (SAVING, REMOVING):
        shutil.rmtree(folder / name, ignore_errors=True)
