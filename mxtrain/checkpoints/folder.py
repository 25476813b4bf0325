"""The checkpoints in a run's folder: which are whole, how a new one gets its place, which are removed or set aside.

A checkpoint is written to ``.saving/step-N`` and renamed to ``step-N``, which is atomic: whatever has that name was
complete. An old checkpoint goes the other way before it is removed. So a kill at any moment leaves whole checkpoints,
and parts only in the two hidden folders, which the next run empties.
"""

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from mxtrain.checkpoints.manifest import MANIFEST_FILE, DamagedCheckpoint, Manifest, check_sizes, read_manifest
from mxtrain.errors import ConfigError
from mxtrain.files import sync_file

SAVING, REMOVING, SET_ASIDE = ".saving", ".removing", "set_aside"
LEFTOVERS = (SAVING, REMOVING)
DCP_METADATA = ".metadata"
"""File with the index of a checkpoint in PyTorch's format"""


class Checkpoints:
    """The checkpoints in a folder. Looks at the sizes of files, not at their contents.

    Args:
        damaged: names of checkpoints whose contents are known to be wrong -> what is wrong with them.
    """

    def __init__(self, folder: Path, damaged: Mapping[str, str] = MappingProxyType({})):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"checkpoint.folder: {folder} is not a folder")
        self.folder = folder
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        self.found = sorted(filter(_is_step, names), key=step_of)
        """Names of all checkpoints, whole or not, in the order of their steps"""
        self.whole: dict[int, Manifest] = {}
        """Step of each checkpoint whose files are all there -> its manifest, in the order of steps"""
        self.problems: dict[str, str] = {}
        """Name of each other checkpoint -> what is wrong with it"""
        for name in self.found:
            try:
                if name in damaged:
                    raise DamagedCheckpoint(damaged[name])
                self.whole[step_of(name)] = read_whole(folder / name)
            except DamagedCheckpoint as error:
                self.problems[name] = str(error)

    @property
    def newest(self) -> Path | None:
        """The whole checkpoint of the last step; None if there is none."""
        return self.path(max(self.whole)) if self.whole else None

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


def _is_step(name: str) -> bool:
    return re.fullmatch(r"step-(0|[1-9]\d*)", name) is not None


def step_of(name: str) -> int:
    """Return the step of a checkpoint from its name, "step-N"."""
    return int(name.removeprefix("step-"))


def read_whole(checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint, after a look at the sizes of its files.

    Raises DamagedCheckpoint.
    """
    # os.path: a folder that cannot be entered is damaged.
    if not os.path.exists(checkpoint / MANIFEST_FILE) and os.path.exists(checkpoint / DCP_METADATA):
        raise DamagedCheckpoint(
            f"it has no {MANIFEST_FILE}: TorchTitan itself or an older mxtrain wrote it, and no run can resume from "
            "it; a new run can start from its weights with checkpoint.initial_load_path"
        )
    manifest = read_manifest(checkpoint)
    if _is_step(checkpoint.name) and manifest.step != step_of(checkpoint.name):
        raise DamagedCheckpoint(f"it is a copy of step-{manifest.step}")
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
    checkpoint.rename(target)
    return target


def withdraw(checkpoint: Path) -> Path:
    """Move a checkpoint to where a half removed one harms nobody, and return its new path, for removal."""
    folder = checkpoint.parent / REMOVING
    folder.mkdir(exist_ok=True)
    target = folder / checkpoint.name
    shutil.rmtree(target, ignore_errors=True)
    return checkpoint.rename(target)


def clear_leftovers(folder: Path) -> None:
    """Remove what killed runs left: parts of checkpoints that were being saved or removed, and an empty folder."""
    for name in LEFTOVERS:
        with suppress(OSError):
            (folder / name).unlink()  # a link, behind which nothing must be removed
        shutil.rmtree(folder / name, ignore_errors=True)
    with suppress(OSError):
        folder.rmdir()
