"""The checkpoints in a run's folder: which are complete, which can be resumed from, which are stale."""

import re
from pathlib import Path

from mxtrain.errors import ConfigError

# Files that TorchTitan 0.2.2 looks for to tell whether a checkpoint is complete. They are written last.
DCP_MARK, HF_MARK = ".metadata", "model.safetensors.index.json"
# Key in the metadata of every checkpoint from which a run can resume: the trainer's step.
TRAINER_KEY = b"train_state"


class Checkpoints:
    """The checkpoints in a folder, as TorchTitan finds them."""

    def __init__(self, folder: Path):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"checkpoint.folder: {folder} is not a folder")
        self.folder = folder
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        self.found = sorted((name for name in names if re.search(r"step-\d+", name)), key=_number)
        """Names of checkpoints, complete or not, in the order of their steps"""
        marked = [name for name in self.found if any((folder / name / m).is_file() for m in (DCP_MARK, HF_MARK))]
        self.incomplete = [name for name in self.found if name not in marked]
        self.misnamed = [name for name in marked if name != f"step-{_number(name)}"]
        """Complete, and renamed or copied: TorchTitan takes them for their step, and does not find them there"""
        self.complete = [_number(name) for name in marked if name not in self.misnamed]

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def has_trainer_state(self, step: int) -> bool:
        """Return False for weights alone: an export to Hugging Face's format, or a last checkpoint."""
        metadata = self.path(step) / DCP_MARK
        # A pickle, which holds its keys as they are. Loading it would need PyTorch.
        return metadata.is_file() and TRAINER_KEY in metadata.read_bytes()

    def stale(self, keep: int) -> list[Path]:
        """Return the complete checkpoints but the newest ``keep``, oldest first. 0 keeps all.

        Parts of checkpoints do not count: a kill leaves them, and they would push out the checkpoints that are whole.
        """
        return [self.path(step) for step in sorted(self.complete)[:-keep]] if keep else []


def mark_incomplete(checkpoint: Path) -> None:
    """Call before a checkpoint is saved in a folder that may hold one already, which a resumed run then replaces.

    A run that is killed in the middle would otherwise leave a mixture that looks complete.
    """
    for mark in (DCP_MARK, HF_MARK):
        (checkpoint / mark).unlink(missing_ok=True)


def _number(name: str) -> int:
    return int(re.search(r"step-(\d+)", name).group(1))
