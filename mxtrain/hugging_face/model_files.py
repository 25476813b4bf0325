"""A model's folder: written whole or not at all, and its safetensors files, which are one or several with an index."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mxtrain.errors import ConfigError, raised_as
from mxtrain.files import new_folder, read_json

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
UNREAD = ".rotary_emb.inv_freq"
"""Older files hold these tensors, which transformers does not read either"""
FUSED = r"(.*\.mlp\.experts)\.(gate_up|down)_proj"
"""All experts' matrices in one tensor [E, N, D], as transformers 5 may write them"""


@contextmanager
def new_target(target: Path, argument: str) -> Iterator[Path]:
    """Yield an empty folder beside ``target``, which gets that name at the end. After an exception nothing is left.

    ``target`` does not exist, is an empty folder, or a link to one, which stays. The ConfigErrors of other targets, and
    of an OSError in the context, begin with the command's ``argument``.
    """
    where, place = f"{argument} = {str(target)!r}", target.resolve()

    def appeared(_: Path) -> bool:
        raise ConfigError(f"{where} was written by another process; choose another folder")

    try:
        is_empty = target.is_dir() and not any(target.iterdir())
        if is_empty and place == Path.cwd():
            # The complete folder would take its place, and leave the user's shell in a folder that is gone.
            raise ConfigError(f"{where} is the folder that you are in; choose another folder")
        if not is_empty and (target.exists() or target.is_symlink()):
            raise ConfigError(f"{where} exists; choose another folder, or remove it")
        place.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(place, appeared) as folder:
            yield folder
    except OSError as error:
        raise ConfigError(f"{where} cannot be made: {error}") from error


class ShardWriter:
    """Writes tensors to ``model.safetensors``, or if they are too many to files of at most ``shard_bytes``.

    A tensor larger than that gets a file of its own. Tensors stay in memory until their file is full, and no longer:
    ``huggingface_hub.save_torch_state_dict`` would hold the whole model.
    """

    def __init__(self, folder: Path, shard_bytes: int):
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._shards: list[tuple[Path, list[str]]] = []
        """Files, which get their names when their number is known, and their tensors"""
        self.total_bytes = 0
        """Bytes of all tensors so far"""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write ``tensor``, of any dtype that safetensors has, now or later: the caller must not change it."""
        if self._pending and sum(t.nbytes for t in self._pending.values()) + tensor.nbytes > self._shard_bytes:
            self._flush()
        # A view would keep all of its base in memory, and safetensors refuses tensors that share memory.
        is_view = tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous()
        self._pending[name] = tensor.contiguous().clone() if is_view else tensor
        self.total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the rest, give the files their names, and write the index if there are several."""
        self._flush()
        count, places = len(self._shards), {}
        for number, (file, tensors) in enumerate(self._shards, 1):
            name = SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            file.rename(self._folder / name)
            places |= dict.fromkeys(tensors, name)
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(places.items()))}
            (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        file = self._folder / f"shard-{len(self._shards)}.tmp"
        file.touch()
        mode = file.stat().st_mode  # safetensors makes files that only their owner reads
        try:
            save_file(self._pending, file, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, for example
            raise OSError(f"{file.name}: {error}") from error
        file.chmod(mode)
        self._shards.append((file, list(self._pending)))
        self._pending = {}


class SavedTensors:
    """The tensors in a folder's safetensors files, read one at a time. Never reads a pickle.

    Of a single file and an index with its files, transformers reads the single file, and so does this.
    """

    def __init__(self, folder: Path):
        self._where = f"MODEL_DIR = {str(folder)!r}"
        self._places: dict[str, tuple] = {}
        """Name of every tensor -> its file, the name there, and which part of that it is"""
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Name of every tensor -> its shape"""
        for name in self._names(folder):
            try:
                file = safe_open(folder / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise self._error(f"{name} is missing, truncated or damaged: {error}") from error
            for stored in file.keys():
                shape = tuple(file.get_slice(stored).get_shape())
                if (fused := re.fullmatch(FUSED, stored)) and len(shape) == 3:
                    linears = fused[2].split("_")
                    rows = shape[1] // len(linears)
                    for expert, (i, linear) in product(range(shape[0]), enumerate(linears)):
                        part = (expert, slice(i * rows, (i + 1) * rows))
                        tensor = f"{fused[1]}.{expert}.{linear}_proj.weight"
                        self._places[tensor], self.shapes[tensor] = (file, stored, part), (rows, shape[2])
                elif not stored.endswith(UNREAD):
                    self._places[stored], self.shapes[stored] = (file, stored, ()), shape
        if "embed_tokens.weight" in self.shapes:  # of a model without a head
            named = [{f"model.{name}": value for name, value in d.items()} for d in (self._places, self.shapes)]
            self._places, self.shapes = named

    def require(self, shapes: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ConfigError unless the tensors are those in ``shapes``, and some in ``optional``."""
        known = {**optional, **shapes}
        if missing := [name for name in shapes if name not in self.shapes]:
            raise self._error(f"{len(missing)} of {len(shapes)} tensors are missing, such as {missing[0]}")
        if unexpected := [name for name in self.shapes if name not in known]:
            raise self._error(f"{len(unexpected)} tensor(s) are not part of this model, such as {unexpected[0]}")
        for name, shape in self.shapes.items():
            if shape != tuple(known[name]):
                shapes = f"shape {list(shape)}, but config.json makes it {list(known[name])}"
                raise self._error(f"{name} has {shapes}")

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor in fp32."""
        file, stored, part = self._places[name]
        tensor = (file.get_slice(stored)[part] if part else file.get_tensor(stored)).float()
        if not tensor.isfinite().all():
            raise self._error(f"{name} has values that are not finite")
        return tensor

    def _names(self, folder: Path) -> list[str]:
        if (folder / SINGLE_FILE).is_file():
            return [SINGLE_FILE]
        if (folder / INDEX_FILE).is_file():
            where = f"{self._where}: {INDEX_FILE}"
            index = read_json(folder / INDEX_FILE, where)
            with raised_as(f"{where} is damaged"):
                return sorted({Path(name).name for name in index["weight_map"].values()})
        raise self._error(f"the folder has neither {SINGLE_FILE} nor {INDEX_FILE}; save the model as safetensors first")

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._where}: {problem}")
