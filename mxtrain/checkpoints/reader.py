"""Reads a checkpoint without running code that it may hold: a pickle may call everything that it names.

DCP itself unpickles a checkpoint's index, and uses ``torch.load(weights_only=False)`` for all values but tensors.
"""

import io
import os
import pickle
from pathlib import Path, PosixPath
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata

from mxtrain.checkpoints.folder import DCP_METADATA
from mxtrain.errors import ConfigError
from mxtrain.files import reason

_METADATA = [f"torch.distributed.checkpoint.metadata.{name}" for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")]
_OTHERS = ("torch.Size", "torch.serialization._get_layout", "torch.distributed.checkpoint.filesystem._StorageInfo")
_DTYPES = [str(dtype) for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
_PATHS = dict.fromkeys(("pathlib.PosixPath", "pathlib._local.PosixPath"), PosixPath)
_IN_INDEX = dict.fromkeys((*_METADATA, *_OTHERS, *_DTYPES)) | _PATHS
_SAFE = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}


def load(state: dict, checkpoint: Path, index: metadata.Metadata | None = None, no_dist: bool = False) -> None:
    """Load a checkpoint as ``dcp.load`` does. Raises CheckpointException, and ConfigError as ``read_index``.

    Args:
        index: what ``read_index`` has returned already.
    """
    reader, index = dcp.FileSystemReader(checkpoint), index or read_index(checkpoint)
    reader.read_metadata = lambda **rank: index
    with patch.dict(os.environ, _SAFE), torch.serialization.safe_globals([bytes]):  # for b""
        dcp.load(state, storage_reader=reader, no_dist=no_dist)


def read_index(checkpoint: Path) -> metadata.Metadata:
    """Return what PyTorch has written about a checkpoint. Raises ConfigError if it is missing, and as ``unpickle``."""
    path = checkpoint / DCP_METADATA
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be loaded: {reason(error)}") from error
    return unpickle(content, str(path), _IN_INDEX)


def unpickle(content: bytes, what: str, names: dict[str, object]):
    """Return the value of a pickle that names nothing but ``names`` and PyTorch's safe globals.

    Args:
        names: full name -> what stands for it, or None for itself.

    Raises:
        ConfigError: it names something else or is damaged. The message begins with ``what``.
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
