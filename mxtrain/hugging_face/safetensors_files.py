"""Reads and writes the safetensors files of a model: one file, or several with an index."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mxtrain.errors import ConfigError
from mxtrain.json_toml import read_json

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SHARD_BYTES = 5_000_000_000
SMALLEST_SHARD_BYTES = 256_000_000
UNREAD = ".rotary_emb.inv_freq"
"""Older files hold these tensors, which transformers does not read either"""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def shard_size(model_bytes: int) -> int:
    """Return the most bytes in one file, of which a writer holds all in memory: at most a quarter of a large model."""
    return min(SHARD_BYTES, max(SMALLEST_SHARD_BYTES, model_bytes // 4))


class ShardWriter:
    """Writes tensors to ``model.safetensors``, or if they are too many to files of at most ``shard_bytes``.

    A tensor larger than that gets a file of its own. Tensors stay in memory until their file is full.
    """

    def __init__(self, folder: Path, shard_bytes: int):
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._names: set[str] = set()
        self.total_bytes = 0
        """Bytes of all tensors so far"""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write ``tensor``, of any dtype that safetensors has, now or later: the caller must not change it.

        Raises:
            ValueError: there is a tensor of this name already.
            OSError: a file cannot be written.
        """
        if name in self._names:
            raise ValueError(f"two tensors are called {name!r}")
        if self._pending and self._pending_bytes + tensor.nbytes > self._shard_bytes:
            self._flush()
        # A view would keep all of its base in memory, and safetensors refuses tensors that share memory.
        is_view = tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous()
        self._pending[name] = tensor.contiguous().clone() if is_view else tensor
        self._pending_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes
        self._names.add(name)

    def finish(self) -> list[str]:
        """Write the rest, give the files their names and write the index if there are several. Return their names."""
        self._flush()
        count = len(self._shards)
        names = (
            [SINGLE_FILE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        )
        for i, name in enumerate(names):
            self._unnamed(i).rename(self._folder / name)
        if count == 1:
            return names
        places = {tensor: name for name, tensors in zip(names, self._shards, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(places.items()))}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return [*names, INDEX_FILE]

    def _flush(self) -> None:
        path = self._unnamed(len(self._shards))
        path.touch()
        mode = path.stat().st_mode  # safetensors makes files that only their owner reads
        try:
            save_file(self._pending, path, metadata={"format": "pt"})
            path.chmod(mode)
        except SafetensorError as error:  # a full disk, for example
            raise OSError(f"{path.name}: {error}") from error
        self._shards.append(list(self._pending))
        self._pending = {}
        self._pending_bytes = 0

    def _unnamed(self, number: int) -> Path:
        """The path of a file until the number of files is known."""
        return self._folder / f"shard-{number}.tmp"


class SavedTensors:
    """The tensors in a folder's safetensors files, read one at a time. Never reads a pickle.

    Args:
        folder: holds ``model.safetensors``, or an index and the files that it names. Of both, transformers reads the
            single file, and so does this.

    Raises:
        ConfigError: files are missing, truncated or damaged, or the folder holds only pickles.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._where = f"MODEL_DIR = {str(folder)!r}"
        self._files = {}
        is_indexed = (folder / INDEX_FILE).is_file() and not (folder / SINGLE_FILE).is_file()
        places = self._read_index() if is_indexed else None
        for name in sorted(set(places.values())) if places is not None else [self._single_file()]:
            self._files[name] = self._open(name)
        self._place = {tensor: name for name, file in self._files.items() for tensor in file.keys()}
        for tensor, name in (places or {}).items():
            if self._place.get(tensor) != name:
                raise self._error(f"{INDEX_FILE} places {tensor} in {name}, which does not hold it")
        self.shapes = {tensor: self._shape(tensor) for tensor in self._place if not tensor.endswith(UNREAD)}
        """Name of every tensor -> its shape"""

    def require(self, shapes: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ConfigError unless the tensors are those in ``shapes``, some in ``optional``, and floating-point."""
        known = {**optional, **shapes}
        if missing := [name for name in shapes if name not in self.shapes]:
            raise self._error(f"{len(missing)} of {len(shapes)} tensors missing, such as {missing[0]}")
        if unexpected := [name for name in self.shapes if name not in known]:
            raise self._error(f"{len(unexpected)} tensor(s) not part of this model, such as {unexpected[0]}")
        for name in self.shapes:
            self.require_shape(name, known[name])
            dtype = self._slice(name).get_dtype()
            if dtype not in _DTYPES:
                raise self._error(f"{name} has dtype {dtype}; supported are: {', '.join(_DTYPES)}")

    def require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ConfigError unless there is a tensor of this name and shape."""
        found = self.shapes.get(name)
        if found != tuple(shape):
            problem = "is missing" if found is None else f"has shape {list(found)}, and {list(shape)} by config.json"
            raise self._error(f"{name} {problem}")

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor in fp32. Raises ConfigError if it cannot be read or is not finite."""
        try:
            tensor = self._files[self._place[name]].get_tensor(name).float()
        except (SafetensorError, OSError) as error:
            raise self._error(f"{self._place[name]} cannot be read: {error}") from error
        if not tensor.isfinite().all():
            raise self._error(f"{name} has values that are not finite")
        return tensor

    def _single_file(self) -> str:
        if (self._folder / SINGLE_FILE).is_file():
            return SINGLE_FILE
        pickles = [path.name for pattern in PICKLES for path in sorted(self._folder.glob(pattern))]
        if pickles:
            raise self._error(
                f"{pickles[0]} is a pickle, which may run any code when it is read; save the model as safetensors first"
            )
        raise self._error(f"there is neither {SINGLE_FILE} nor {INDEX_FILE}")

    def _read_index(self) -> dict[str, str]:
        index = read_json(self._folder / INDEX_FILE, f"{self._where}: {INDEX_FILE}")
        try:
            places = index["weight_map"]
            names = set(places.values())
            if not places or any(name != Path(name).name or name == ".." for name in names):
                raise ValueError("weight_map names no files of this folder")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._error(f"{INDEX_FILE} is damaged: {type(error).__name__}: {error}") from error
        for name in sorted(names):
            if Path(name).suffix != ".safetensors":
                raise self._error(f"{INDEX_FILE} names {name}, which is no safetensors file; no other file is read")
            if not (self._folder / name).is_file():
                raise self._error(f"{INDEX_FILE} names {name}, which is missing")
        return places

    def _open(self, name: str):
        try:
            return safe_open(self._folder / name, framework="pt")
        except (SafetensorError, OSError) as error:
            raise self._error(f"{name} is truncated or damaged: {error}") from error

    def _shape(self, tensor: str) -> tuple[int, ...]:
        return tuple(self._slice(tensor).get_shape())

    def _slice(self, tensor: str):
        return self._files[self._place[tensor]].get_slice(tensor)

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._where}: {problem}")
