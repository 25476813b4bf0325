"""What an import knows without TorchTitan: a model's weights under the names of a run, and the run's config.toml."""

import math
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch

from mxtrain.checkpoints.run_folder import TOKENIZER_FOLDER
from mxtrain.config import load_config
from mxtrain.errors import ConfigError
from mxtrain.hugging_face.model_config import Parameter
from mxtrain.hugging_face.model_files import SavedTensors
from mxtrain.settings.model_settings import SECTION
from mxtrain.settings.read import read_settings

SEED = "checkpoint/step-0"
"""The checkpoint of weights that a run starts from"""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DEFAULTS = {
    "job": {"custom_config_module": "mxtrain.titan.job_config"},
    "experimental": {"custom_import": "mxtrain.titan"},
    "model": {"converters": ["mxnorm"]},
    "training": {"dataset": "files", "seq_len": 2048, "local_batch_size": 1, "steps": 1000},
    "optimizer": {"name": "AdamW", "lr": 1e-5},
    "lr_scheduler": {"warmup_steps": 100},
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
    "checkpoint": {"interval": 500, "keep_latest_k": 2, "last_save_model_only": False},
    "debug": {"seed": 0},
}
"""The settings of the run, where no config is given"""
EXAMPLE = "asyncio/*.py"
"""Text of the standard library, about 0.5 MB, with which a run starts in seconds. The user's own replaces it"""


class ImportedWeights:
    """The weights of a Hugging Face model as TorchTitan's parameters, read one at a time."""

    def __init__(self, saved: SavedTensors, places: Mapping[str, Parameter]):
        self._saved = saved
        self._places = places
        self.shapes = {fqn: place.shape for fqn, place in places.items()}
        shapes: dict[str, tuple[int, ...]] = {}
        for place in places.values():
            shapes |= dict.fromkeys(place.names, place.shape[1:] if len(place.shape) == 3 else place.shape)
        saved.require(shapes, optional={HEAD: shapes[EMBEDDING]})
        self.count = sum(math.prod(shape) for shape in shapes.values())
        """Number of parameters. A weight with two names counts once"""

    def __getitem__(self, fqn: str) -> torch.Tensor:
        place = self._places[fqn]
        if not place.names:  # the head, which has the embedding's weight
            return self._saved[EMBEDDING]
        if len(place.shape) == 3:
            return torch.stack([self._saved[name] for name in place.names])
        weight = self._saved[place.names[0]]
        return weight if place.order is None else weight[place.order.argsort()]


def run_settings(config: Path | None, own: dict[str, object], positions: int, target: Path, longer_than: int) -> dict:
    """Return the tables of the run's config.toml. The model decides on ``own``, settings by their full names.

    Sequences are longer than ``longer_than``, where no config says how long they are.
    """
    length = f"{SECTION}.max_seq_len"
    if config is None:
        tables, given = DEFAULTS, {}
        own["training.dataset_path"] = str(Path(sysconfig.get_path("stdlib"), EXAMPLE))
        # TorchTitan refuses an odd length.
        seq_len = max(DEFAULTS["training"]["seq_len"], 2 * longer_than)
        seq_len = own["training.seq_len"] = min(seq_len, positions - positions % 2)
    else:
        settings = read_settings([f"--job.config_file={config}"])
        tables, given, seq_len = load_config(config), settings.given, settings["training.seq_len"]
        for name, value in given.items():
            if name in own or (name.startswith(f"{SECTION}.") and name != length):
                expected = own.get(name)
                if value not in (None, expected) and (name, value) != ("data.vocab_size", 0):
                    wanted = repr(expected) if expected else "unset"
                    raise ConfigError(f"{name} = {value!r} in {config} must be {wanted}, as in the model")
    if given.get(length) is None and positions >= seq_len:
        own[length] = positions
    own |= {
        # A run of this file starts here. TorchTitan's copy of it, in this folder, says less about where it runs: a run
        # of that copy elsewhere must start from the same weights.
        "job.dump_folder": str(target),
        "model.hf_assets_path": str(target / TOKENIZER_FOLDER),
        "checkpoint.enable": True,
        "checkpoint.initial_load_path": str(target / SEED),
    }
    merged = {section: dict(values) for section, values in tables.items()}
    for name, value in own.items():
        section, _, field = name.partition(".")
        merged.setdefault(section, {})[field] = value
    return merged
