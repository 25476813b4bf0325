"""``mxtrain import``: makes a folder from which a run continues the training of a Hugging Face model."""

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain.checkpoints.manifest import Manifest, hash_file, write_manifest
from mxtrain.config import dump_config, load_config
from mxtrain.data.run_data import TOKENIZER_FOLDER
from mxtrain.data.tokenizer import COMPANIONS, SPECIAL_TOKENS_FILE, copy_tokenizer, load_tokenizer, tokenizer_hash
from mxtrain.data.tokenizer import FILES as TOKENIZER_FILES
from mxtrain.errors import ConfigError
from mxtrain.hugging_face.export import Parameter
from mxtrain.hugging_face.model_config import CONFIG_FILE as MODEL_CONFIG_FILE
from mxtrain.hugging_face.model_config import GENERATION_FILE, ModelShape, read_generation, read_shape
from mxtrain.hugging_face.model_files import SavedTensors, new_target
from mxtrain.run_folder.files import CONFIG_FILE
from mxtrain.settings.model_settings import SECTION
from mxtrain.settings.read import read_settings
from mxtrain.titan.hugging_face.models import find_model, parameters, require_same_logits
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.metrics import package_versions

SEED = "checkpoint/step-0"
"""The checkpoint of weights that a run starts from"""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

DEFAULTS = {
    "job": {"custom_config_module": "mxtrain.titan.job_config"},
    "experimental": {"custom_import": "mxtrain.titan"},
    "model": {"converters": ["mxnorm"]},
    "data": {"installed": True},
    "training": {"dataset": "python", "seq_len": 2048, "local_batch_size": 1, "steps": 1000},
    "optimizer": {"name": "AdamW", "lr": 1e-5},
    "lr_scheduler": {"warmup_steps": 100},
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
    "checkpoint": {"interval": 500, "keep_latest_k": 2, "last_save_model_only": False},
    "debug": {"seed": 0},
}
"""The settings of the run, where no config is given"""


@dataclass(frozen=True)
class ImportReport:
    folder: Path
    source: Path
    model: str
    flavor: str
    model_args: dict[str, object]
    """Settings of [model_args] that set the flavor to the model's shape"""
    vocab_size: int
    parameters: int
    notes: tuple[str, ...] = ()
    """Lines for the user"""

    def __str__(self) -> str:
        sizes = f" with [{SECTION}]" if self.model_args else ""
        command = f"mxtrain train {shlex.quote(str(self.folder / CONFIG_FILE))}"
        notes = "".join(f"note      {note}\n" for note in self.notes)
        return (
            f"imported  {self.source} as {self.model} {self.flavor}{sizes}, {self.parameters:,} parameters, "
            f"vocabulary of {self.vocab_size:,}\n{notes}folder    {self.folder}\ntrain     {command}"
        )


def import_model(source: Path, target: Path, config: Path | None = None) -> ImportReport:
    """Make a run's folder with the weights, the tokenizer and a config. The folder appears when it is complete.

    Weights are read and written one after another, and stored in fp32, in which a run trains them.

    Args:
        source: folder of a Hugging Face model: config.json, safetensors and tokenizer.json.
        target: a folder that does not exist, or is empty.
        config: TOML file with the settings of the run. The model, its weights and its tokenizer replace those in it.

    Raises:
        ConfigError: for a wrong argument, and a model that cannot be imported. Nothing is written then.
    """
    with new_target(target, "RUN_DIR") as folder:
        where = f"MODEL_DIR = {str(source)!r}"
        shape, saved = read_shape(source), SavedTensors(source)
        _require_sizes(shape, saved, where)
        notes = []
        if shape.tie_word_embeddings and HEAD in saved.shapes and not torch.equal(saved[HEAD], saved[EMBEDDING]):
            shape = replace(shape, tie_word_embeddings=False)
            notes.append(f"{HEAD} is not tied to {EMBEDDING}: the files hold two, which transformers 5 does not tie")
        model, flavor, model_args = find_model(shape, where)
        args = get_train_spec(model).model_args[flavor]
        args.set_model_args(model_args)
        args.vocab_size = shape.vocab_size
        weights = _Weights(saved, parameters(model, args))
        _require_tokenizer(source, shape.vocab_size)
        own = {"model.name": model, "model.flavor": flavor}
        own |= {f"{SECTION}.{name}": value for name, value in model_args.items()}
        own["data.vocab_size"] = shape.vocab_size
        settings = _settings(config, own, shape.max_position_embeddings, target.absolute())
        tokenizer = folder / TOKENIZER_FOLDER
        copy_tokenizer(source, tokenizer)
        generation = json.dumps(read_generation(source), indent=2) + "\n"
        (tokenizer / GENERATION_FILE).write_text(generation, encoding="utf-8")
        dump_config(settings, folder / CONFIG_FILE)
        _require_convertible(folder / CONFIG_FILE, where)
        notes.append(require_same_logits(source, model, args, weights, where))
        others = {name for name in os.listdir(source) if name[0] != "." and "safetensors" not in name}
        if lost := sorted(others - {MODEL_CONFIG_FILE, *TOKENIZER_FILES, SPECIAL_TOKENS_FILE, *COMPANIONS}):
            notes.append(f"not in the run, nor in its exports: {', '.join(lost)}")
        weights.save(folder / SEED, settings, tokenizer_hash(tokenizer))
    return ImportReport(target, source, model, flavor, model_args, shape.vocab_size, weights.count, tuple(notes))


class _Weights:
    """The weights of a dense Hugging Face model as TorchTitan's parameters, checked, and read one at a time."""

    def __init__(self, saved: SavedTensors, places: Mapping[str, Parameter]):
        self._saved = saved
        self._places = places
        shapes = {place.names[0]: place.shape for place in places.values() if place.names}
        saved.require(shapes, optional={HEAD: shapes[EMBEDDING]})
        self.count = sum(torch.Size(shape).numel() for shape in shapes.values())
        """Number of parameters. A weight with two names counts once"""

    def __getitem__(self, fqn: str) -> torch.Tensor:
        """Return a parameter, fp32. Raises ConfigError if it is not finite."""
        place = self._places[fqn]
        if not place.names:  # the head, which has the embedding's weight
            return self._saved[EMBEDDING]
        weight = self._saved[place.names[0]]
        return weight if place.order is None else weight[place.order.argsort()]

    def save(self, checkpoint: Path, settings: dict, tokenizer_sha256: str) -> None:
        """Write a checkpoint of the weights, with its manifest."""
        state = {fqn: torch.empty(place.shape, device="meta") for fqn, place in self._places.items()}
        try:
            dcp.save(state, checkpoint_id=checkpoint, planner=_Reading(self), no_dist=True)
        except CheckpointException as error:
            raise error.failures[0][0] from error
        files = [path for path in checkpoint.rglob("*") if path.is_file()]
        manifest = Manifest(
            step=0,
            holds_trainer=False,
            files={str(path.relative_to(checkpoint)): hash_file(path) for path in files},
            tensors={fqn: {"shape": list(place.shape), "dtype": "float32"} for fqn, place in self._places.items()},
            settings=settings,
            versions=package_versions(),
            tokenizer_sha256=tokenizer_sha256,
        )
        write_manifest(checkpoint, manifest)


class _Reading(dcp.DefaultSavePlanner):
    """Plans with tensors that have no memory, on the meta device, and reads each one when it is written."""

    def __init__(self, weights: _Weights):
        super().__init__()
        self._weights = weights

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._weights[index.fqn]


def _require_sizes(shape: ModelShape, saved: SavedTensors, where: str) -> None:
    """Compare config.json with the files before anything of its sizes is built. Raises ConfigError."""
    layers, tensors = shape.num_hidden_layers, len(saved.shapes)
    if layers > tensors:
        raise ConfigError(f"{where}: num_hidden_layers = {layers} in config.json, and the files have {tensors} tensors")
    inputs, queries = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    saved.require_shape(EMBEDDING, (shape.vocab_size, inputs))
    saved.require_shape("model.layers.0.mlp.gate_proj.weight", (shape.intermediate_size, inputs))
    saved.require_shape("model.layers.0.self_attn.q_proj.weight", (queries, inputs))


def _require_tokenizer(source: Path, vocab_size: int) -> None:
    try:
        size = load_tokenizer(source).size
    except ConfigError as error:
        problem = str(error).partition(f"{str(source)!r}")[2].lstrip(": ").partition("; give")[0]
        raise ConfigError(f"MODEL_DIR = {str(source)!r}: {problem}") from error
    if size > vocab_size:
        raise ConfigError(
            f"MODEL_DIR = {str(source)!r}: its tokenizer has {size:,} tokens, more than vocab_size = {vocab_size:,} in "
            "config.json"
        )


def _require_convertible(config: Path, where: str) -> None:
    """Raise ConfigError if the run's converters do not take the model's sizes."""
    try:
        # Without the tokenizer, whose folder is being built under another name.
        parse_job_config([f"--job.config_file={config}", "--mxnorm.mode=auto", "--model.hf_assets_path="])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}; give --config FILE with other model.converters") from error


def _settings(config: Path | None, own: dict[str, object], positions: int | None, target: Path) -> dict:
    """Return the tables of the run's config.toml.

    Args:
        config: the user's file; None for DEFAULTS.
        own: the settings that the model decides on, by full name.
        positions: the model's number of positions, if it is known.
        target: the run's folder.

    Raises:
        ConfigError: the file says another model than the one that is imported.
    """
    tables, seq_len, keeps_positions = DEFAULTS, DEFAULTS["training"]["seq_len"], True
    length = f"{SECTION}.max_seq_len"
    if config is not None:
        settings = read_settings([f"--job.config_file={config}"])
        for name, value in settings.given.items():
            if name in own or (name.startswith(f"{SECTION}.") and name != length):
                expected = own.get(name)
                if value not in (None, expected) and (name, value) != ("data.vocab_size", 0):
                    raise ConfigError(f"{name} = {value!r} in {config} is not the model's: {expected or 'unset'!r}")
        tables, seq_len, keeps_positions = load_config(config), settings["training.seq_len"], settings[length] is None
    elif positions is not None:
        seq_len = min(seq_len, positions - positions % 2)  # an odd one is refused
        own = {**own, "training.seq_len": seq_len}
    if keeps_positions and positions is not None and positions >= seq_len:
        own = {**own, length: positions}
    own = {
        **own,
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
