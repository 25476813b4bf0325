"""A model's folder: written whole or not at all, and its safetensors files, which are one or several with an index."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mxtrain.errors import ConfigError
from mxtrain.files import new_folder, reason
from mxtrain.json_toml import read_json

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SHARD_BYTES = 5_000_000_000
SMALLEST_SHARD_BYTES = 256_000_000
UNREAD = ".rotary_emb.inv_freq"
"""Older files hold these tensors, which transformers does not read either"""
DTYPES = ("F32", "BF16", "F16")


def require_new(target: Path, argument: str) -> None:
    """Raise ConfigError if ``target`` exists and is not an empty folder, or is the current folder.

    Args:
        argument: name of the command's argument that gives the folder, with which messages begin.
    """
    where = f"{argument} = {str(target)!r}"
    try:
        is_empty = target.is_dir() and not any(target.iterdir())
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {reason(error)}") from error
    if is_empty and target.resolve() == Path.cwd():
        # The complete folder would take its place, and leave the user's shell in a folder that is gone.
        raise ConfigError(f"{where} is the folder that you are in; choose another folder")
    if not is_empty and (target.exists() or target.is_symlink()):
        raise ConfigError(f"{where} exists; choose another folder, or remove it")


@contextmanager
def new_target(target: Path, argument: str) -> Iterator[Path]:
    """Yield an empty folder beside ``target``, which gets that name at the end. After an exception nothing is left.

    A link to an empty folder stays: the folder that it names is filled.

    Raises:
        ConfigError: as ``require_new``, and if the folder cannot be written. An OSError in the context becomes a
            ConfigError, too: its message names the target, or the file elsewhere that could not be read.
    """
    require_new(target, argument)
    where, place = f"{argument} = {str(target)!r}", target.resolve()

    def appeared(_: Path) -> bool:
        raise ConfigError(f"{where} was written by another process meanwhile")

    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(place, appeared) as folder:
            try:
                yield folder
            except OSError as error:
                if error.filename is None or folder in Path(str(error.filename)).parents:
                    raise
                raise ConfigError(f"{error.filename} cannot be read: {reason(error)}") from error
    except OSError as error:
        raise ConfigError(f"{where} cannot be written: {reason(error)}") from error


def shard_size(model_bytes: int) -> int:
    """Return the most bytes in one file, of which a writer holds all in memory: at most a quarter of a large model."""
    return min(SHARD_BYTES, max(SMALLEST_SHARD_BYTES, model_bytes // 4))


class ShardWriter:
    """Writes tensors to ``model.safetensors``, or if they are too many to files of at most ``shard_bytes``.

    A tensor larger than that gets a file of its own. Tensors stay in memory until their file is full, and no longer:
    ``huggingface_hub.save_torch_state_dict`` would hold the whole model.
    """

    def __init__(self, folder: Path, shard_bytes: int):
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []
        self.total_bytes = 0
        """Bytes of all tensors so far"""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write ``tensor``, of any dtype that safetensors has, now or later: the caller must not change it.

        Raises:
            OSError: a file cannot be written.
        """
        if self._pending and sum(t.nbytes for t in self._pending.values()) + tensor.nbytes > self._shard_bytes:
            self._flush()
        # A view would keep all of its base in memory, and safetensors refuses tensors that share memory.
        is_view = tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous()
        self._pending[name] = tensor.contiguous().clone() if is_view else tensor
        self.total_bytes += tensor.nbytes

    def finish(self) -> list[str]:
        """Write the rest, give the files their names and write the index if there are several. Return their names."""
        self._flush()
        count = len(self._shards)
        names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)] if count > 1 else [SINGLE_FILE]
        for number, name in enumerate(names):
            self._unnamed(number).rename(self._folder / name)
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
        self._files, self._place = {}, {}
        places = self._index()
        for name in sorted(set(places.values())) if places else [SINGLE_FILE]:
            try:
                file = safe_open(folder / name, framework="pt")
                self._files |= dict.fromkeys(file.keys(), file)
                self._place |= dict.fromkeys(file.keys(), name)
            except (SafetensorError, OSError) as error:
                raise self._error(f"{name} is truncated or damaged: {error}") from error
        for tensor, name in places.items():
            if self._place.get(tensor) != name:
                raise self._error(f"{INDEX_FILE} places {tensor} in {name}, which does not hold it")
        read = [name for name in self._files if not name.endswith(UNREAD)]
        self.shapes = {name: tuple(self._files[name].get_slice(name).get_shape()) for name in read}
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
            if (dtype := self._files[name].get_slice(name).get_dtype()) not in DTYPES:
                raise self._error(f"{name} has dtype {dtype}; supported are: {', '.join(DTYPES)}")

    def require_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ConfigError unless there is a tensor of this name and shape."""
        found = self.shapes.get(name)
        if found != tuple(shape):
            problem = "is missing" if found is None else f"has shape {list(found)}, and {list(shape)} by config.json"
            raise self._error(f"{name} {problem}")

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor in fp32. Raises ConfigError if it cannot be read or is not finite."""
        try:
            tensor = self._files[name].get_tensor(name).float()
        except (SafetensorError, OSError) as error:
            raise self._error(f"{self._place[name]} cannot be read: {error}") from error
        if not tensor.isfinite().all():
            raise self._error(f"{name} has values that are not finite")
        return tensor

    def _index(self) -> dict[str, str]:
        """Return the file of each tensor by the index; nothing for a single file, which goes before an index."""
        if (self._folder / SINGLE_FILE).is_file():
            return {}
        if not (self._folder / INDEX_FILE).is_file():
            pickles = [path.name for pattern in PICKLES for path in sorted(self._folder.glob(pattern))]
            if pickles:
                raise self._error(
                    f"{pickles[0]} is a pickle, which may run any code when it is read; save the model as safetensors "
                    "first"
                )
            raise self._error(f"there is neither {SINGLE_FILE} nor {INDEX_FILE}")
        places = read_json(self._folder / INDEX_FILE, f"{self._where}: {INDEX_FILE}").get("weight_map")
        names = places.values() if isinstance(places, dict) else []
        if not names or any(not isinstance(name, str) or name != Path(name).name or name == ".." for name in names):
            raise self._error(f"{INDEX_FILE} is damaged: weight_map names no files of this folder")
        for name in sorted(set(names)):
            if Path(name).suffix != ".safetensors":
                raise self._error(f"{INDEX_FILE} names {name}, which is no safetensors file; no other file is read")
            if not (self._folder / name).is_file():
                raise self._error(f"{INDEX_FILE} names {name}, which is missing")
        return places

    @property
    def _where(self) -> str:
        return f"MODEL_DIR = {str(self._folder)!r}"

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._where}: {problem}")
