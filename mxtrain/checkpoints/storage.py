"""Writes and reads checkpoints with PyTorch's distributed checkpoint (DCP): complete or not at all, and without code.

To write, DCP asks every rank to write its part and to report what it wrote, and then rank 0 to finish. The same happens
in the background with asynchronous saving, so sizes, hashes and the renaming need no communication of their own.

To read, DCP itself unpickles a checkpoint's index, and uses ``torch.load(weights_only=False)`` for all values but
tensors. A pickle may call everything that it names, so neither is done here.
"""

import errno
import io
import os
import pickle
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path, PosixPath
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mxtrain.checkpoints.folder import (
    DCP_METADATA,
    SAVING,
    DamagedCheckpoint,
    Manifest,
    check_sizes,
    file_record,
    publish,
    write_manifest,
)
from mxtrain.errors import ConfigError
from mxtrain.files import FileRecord, reason
from mxtrain.launched import end_with_parent
from mxtrain.ranks import LATE_SECONDS

_METADATA = [f"{dcp_metadata.__name__}.{name}" for name in (*dcp_metadata.__all__, "_MEM_FORMAT_ENCODING")]
_OTHERS = ("torch.Size", "torch.serialization._get_layout", "torch.distributed.checkpoint.filesystem._StorageInfo")
_DTYPES = [str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
_PATHS = dict.fromkeys(("pathlib.PosixPath", "pathlib._local.PosixPath"), PosixPath)
_IN_INDEX = dict.fromkeys((*_METADATA, *_OTHERS, *_DTYPES)) | _PATHS
_SAFE = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}


@dataclass(frozen=True)
class _Part(WriteResult):
    """One of the results of a rank, with the files that the rank wrote."""

    files: dict[str, FileRecord]


class CheckpointWriter(FileSystemWriter):
    """DCP's writer. Writes to ``.saving``, adds a manifest, and renames the folder when everything is on the disk.

    The manifest comes without files. ``with_hashes`` puts their hashes into it: every rank reads what it has written.
    """

    def __init__(self, checkpoint: Path, manifest: Manifest, with_hashes: bool = False):
        super().__init__(checkpoint.parent / SAVING / checkpoint.name)
        self._checkpoint = checkpoint
        self._manifest = manifest
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
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            results = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch.save has made it one
                raise error.__context__ from error
            if "inline_container" in str(error):  # torch.save has seen fewer bytes arrive than it has sent
                raise OSError(errno.EIO, os.strerror(errno.EIO)) from error
            raise
        if results:
            names = {result.storage_data.relative_path for result in results}
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
        manifest = replace(self._manifest, files=files)
        _require_files(self.path, manifest)
        write_manifest(self.path, manifest)
        publish(self.path, self._checkpoint)


def _require_files(folder: Path, manifest: Manifest) -> None:
    """Raise OSError if rank 0 does not see what another node has written, after a while for a network file system."""
    for pause in LATE_SECONDS:
        time.sleep(pause)
        try:
            return check_sizes(folder, manifest)
        except DamagedCheckpoint as error:
            problem = f"{error}, though a node has written it: is {folder.parent} the same folder on all nodes?"
    raise OSError(errno.ENOENT, problem)


def load(state: dict, checkpoint: Path, index: Metadata | None = None, no_dist: bool = False) -> None:
    """Load a checkpoint as ``dcp.load`` does, on all ranks. ``index``: what ``read_index`` has returned already.

    Raises ConfigError if something in ``state`` is missing, has another shape or cannot be read, or could run code.
    """
    reader, index = dcp.FileSystemReader(checkpoint), index or read_index(checkpoint)
    reader.read_metadata = lambda **rank: index
    try:
        with patch.dict(os.environ, _SAFE), torch.serialization.safe_globals([bytes]):  # for b""
            dcp.load(state, storage_reader=reader, no_dist=no_dist)
    except CheckpointException as error:  # not an Exception: other handlers would let it pass
        raise ConfigError(f"{checkpoint} cannot be loaded: {cause(error)}") from error


def cause(error: CheckpointException) -> str:
    """Return why one rank could not save or load, in a line."""
    rank, (failure, _) = next(iter(error.failures.items()))
    words = reason(failure) if isinstance(failure, OSError) else f"{type(failure).__name__}: {failure}"
    if isinstance(failure, pickle.UnpicklingError):  # many lines, which advise to allow the code
        words = f"it names {words.partition('GLOBAL ')[2].partition(' ')[0] or 'no plain value'}, and could run code"
    return f"{words} (on rank {rank})" if dist.is_initialized() and dist.get_world_size() > 1 else words


def read_index(checkpoint: Path) -> Metadata:
    """Return what PyTorch has written about a checkpoint."""
    path = checkpoint / DCP_METADATA
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be loaded: {reason(error)}") from error
    return unpickle(content, str(path), _IN_INDEX)


def unpickle(content: bytes, what: str, names: dict[str, object]):
    """Return the value of a pickle. Raises ConfigError, which begins with ``what``, if it is damaged or could run code.

    It may name PyTorch's safe globals and ``names``: full name -> what stands for it, or None for itself.
    """
    try:
        return _Unpickler(content, names).load()
    except Exception as error:  # whatever a damaged pickle raises
        raise ConfigError(f"{what} cannot be loaded: {error or type(error).__name__}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, names: dict[str, object]):
        super().__init__(io.BytesIO(content))
        self._names = names

    def find_class(self, module: str, name: str):
        """Import nothing but PyTorch: a module may lie in the run's folder."""
        for allowed in torch.serialization.get_safe_globals():
            if not isinstance(allowed, tuple) and (allowed.__module__, allowed.__qualname__) == (module, name):
                return allowed
        if f"{module}.{name}" not in self._names:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and could run code")
        found = self._names[f"{module}.{name}"]
        return super().find_class(module, name) if found is None else found
