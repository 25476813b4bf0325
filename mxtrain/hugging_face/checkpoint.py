"""The weights in a run's checkpoint: found and read one at a time for an export, written for an import."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from mxtrain.checkpoints.folder import (
    Checkpoints,
    DamagedCheckpoint,
    Manifest,
    check_hashes,
    file_record,
    write_manifest,
)
from mxtrain.checkpoints.storage import load, read_index
from mxtrain.errors import ConfigError


def find_checkpoint(run: Path, folder: str, step: int | None) -> tuple[Path, Manifest]:
    """Return a checkpoint of a run, whose files have the sizes and hashes of its manifest, and the manifest.

    A step of None takes the newest whole checkpoint.
    """
    saved = Checkpoints(run / folder)
    step = saved.choose(step, "--step")
    if step is None:
        raise ConfigError(f"RUN = {str(run)!r} has no whole checkpoint in {saved.folder}; set checkpoint.enable")
    checkpoint = saved.path(step)
    try:
        check_hashes(checkpoint, saved.whole[step], saved.whole[step].files)
    except DamagedCheckpoint as error:
        raise _damaged(checkpoint, error) from error
    return checkpoint, saved.whole[step]


class SavedWeights:
    """The weights in a checkpoint of any layout, read one at a time on the CPU."""

    def __init__(self, checkpoint: Path):
        self._checkpoint = checkpoint
        metadata = read_index(checkpoint).state_dict_metadata
        self._tensors = {name: value for name, value in metadata.items() if isinstance(value, TensorStorageMetadata)}

    def __contains__(self, fqn: str) -> bool:
        return fqn in self._tensors

    def __getitem__(self, fqn: str) -> torch.Tensor:
        """Return a whole weight in the checkpoint's dtype."""
        facts = self._tensors[fqn]
        weight = torch.empty(facts.size, dtype=facts.properties.dtype)
        self.load_into({fqn: weight})
        return weight

    def load_into(self, state: dict[str, torch.Tensor]) -> None:
        """Copy the weights of these names into tensors of any dtype and device."""
        load(state, self._checkpoint, no_dist=True)

    def require(self, shapes: Mapping[str, tuple[int, ...]], optional: tuple[str, ...] = ()) -> None:
        """Raise ConfigError unless the checkpoint has every weight, in its shape. ``optional`` ones may be missing."""
        for fqn, shape in shapes.items():
            found = tuple(self._tensors[fqn].size) if fqn in self else None
            if found != shape and (found or fqn not in optional):
                problem = f"has shape {list(found)}, but its settings make it {list(shape)}" if found else "is missing"
                raise _damaged(self._checkpoint, f"{fqn} {problem}")


def save_weights(checkpoint: Path, weights: Mapping[str, torch.Tensor], shapes: Mapping, **facts) -> None:
    """Write a checkpoint of step 0, from which a run starts: weights in fp32, each read when it is written."""
    state = {fqn: torch.empty(shape, device="meta") for fqn, shape in shapes.items()}
    try:
        dcp.save(state, checkpoint_id=checkpoint, planner=_Reading(weights), no_dist=True)
    except CheckpointException as error:
        raise error.failures[0][0] from error
    manifest = Manifest(
        step=0,
        holds_trainer=False,
        files={path.name: file_record(path, with_hash=False) for path in checkpoint.iterdir()},
        **facts,
    )
    write_manifest(checkpoint, manifest)


class _Reading(dcp.DefaultSavePlanner):
    """Plans with tensors that have no memory, on the meta device, and reads each one when it is written."""

    def __init__(self, weights: Mapping[str, torch.Tensor]):
        super().__init__()
        self._weights = weights

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._weights[index.fqn]


def _damaged(checkpoint: Path, cause: object) -> ConfigError:
    return ConfigError(f"RUN: the checkpoint {checkpoint} cannot be used: {cause}; choose another with --step")
