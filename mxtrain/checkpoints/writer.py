"""Writes a checkpoint with PyTorch's distributed checkpoint (DCP): complete, or not at all.

DCP asks every rank to write its part and to report what it wrote, and then rank 0 to finish. The same happens in the
background with asynchronous saving, so sizes, hashes and the renaming need no communication of their own.
"""

import errno
import math
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mxtrain.checkpoints.folder import DCP_METADATA, SAVING, publish
from mxtrain.checkpoints.manifest import DamagedCheckpoint, Manifest, check_sizes, file_record, write_manifest
from mxtrain.files import FileRecord
from mxtrain.launched import end_with_parent
from mxtrain.ranks import LATE_SECONDS

SPARE = 1.02
"""Free space that a checkpoint needs, relative to its tensors: it also holds their names and shapes"""


@dataclass(frozen=True)
class _Part(WriteResult):
    """One of the results of a rank, with the files that the rank wrote."""

    files: dict[str, FileRecord]


class CheckpointWriter(FileSystemWriter):
    """DCP's writer. Writes to ``.saving``, adds a manifest, and renames the folder when everything is on the disk.

    Args:
        checkpoint: the folder that the checkpoint will have, "step-N".
        manifest: the manifest, still without files and tensors.
        other_states: keys of the states that are not the model's; the model's tensors have no such prefix.
        with_hashes: put the hashes of the files into the manifest. Every rank reads what it has written.
    """

    def __init__(self, checkpoint: Path, manifest: Manifest, other_states: frozenset[str], with_hashes: bool = False):
        super().__init__(checkpoint.parent / SAVING / checkpoint.name)
        self._checkpoint = checkpoint
        self._manifest = manifest
        self._other_states = other_states
        self._with_hashes = with_hashes
        self._process = os.getpid()

    def set_up_storage_writer(self, is_coordinator: bool, *args, **kwargs) -> None:
        if os.getpid() != self._process:  # DCP saves in a process of its own, which must not outlive a killed run
            end_with_parent(self._process)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """For rank 0, when no rank has written yet."""
        shutil.rmtree(self.path.parent)  # also what earlier saves left on a full disk
        self.path.mkdir(parents=True)
        needed = SPARE * sum(_bytes(item) for plan in plans for item in plan.items)
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({_gib(needed)} needed, {_gib(free)} free)")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            raise _disk_error(error) from error
        names = {result.storage_data.relative_path for result in results}
        if results:
            files = {name: file_record(self.path / name, self._with_hashes) for name in names}
            results[0] = _Part(**vars(results[0]), files=files)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """For rank 0, when all ranks have written."""
        super().finish(metadata, results)
        files = {DCP_METADATA: file_record(self.path / DCP_METADATA, self._with_hashes)}
        for part in (result for rank in results for result in rank if isinstance(result, _Part)):
            files |= part.files
        manifest = replace(self._manifest, files=files, tensors=self._tensors(metadata))
        _require_files(self.path, manifest)
        write_manifest(self.path, manifest)
        publish(self.path, self._checkpoint)

    def _tensors(self, metadata: Metadata) -> dict[str, dict]:
        return {
            name: {"shape": list(tensor.size), "dtype": str(tensor.properties.dtype).removeprefix("torch.")}
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata) and name.partition(".")[0] not in self._other_states
        }


def _require_files(folder: Path, manifest: Manifest) -> None:
    """Raise OSError if rank 0 does not see what another node has written, after a while for a network file system."""
    for pause in LATE_SECONDS:
        time.sleep(pause)
        try:
            return check_sizes(folder, manifest)
        except DamagedCheckpoint as error:
            problem = f"{error}, though a node has written it: is {folder.parent} the same folder on all nodes?"
    raise OSError(errno.ENOENT, problem)


def _bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    size = torch.empty((), dtype=item.tensor_data.properties.dtype).element_size()
    return size * math.prod(item.tensor_data.chunk.sizes)


def _disk_error(error: RuntimeError) -> Exception:
    """Return the error of the file system that ``torch.save`` reports as a RuntimeError, or ``error`` itself."""
    if isinstance(error.__context__, OSError):
        return error.__context__
    # The writer of torch.save has seen fewer bytes arrive than it has sent.
    return OSError(errno.EIO, os.strerror(errno.EIO)) if "inline_container" in str(error) else error


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"
