"""``mxtrain import``: makes a folder from which a run continues the training of a Hugging Face model."""

import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from mxtrain.config import dump_config, load_config
from mxtrain.data.run_data import TOKENIZER_FOLDER
from mxtrain.data.tokenizer import COMPANIONS, SPECIAL_TOKENS_FILE, copy_tokenizer, load_tokenizer, tokenizer_hash
from mxtrain.data.tokenizer import FILES as TOKENIZER_FILES
from mxtrain.errors import ConfigError
from mxtrain.hugging_face.checkpoint import save_weights
from mxtrain.hugging_face.model_config import CONFIG_FILE as MODEL_CONFIG_FILE
from mxtrain.hugging_face.model_config import GENERATION_FILE, ModelShape, Parameter, read_generation, read_shape
from mxtrain.hugging_face.model_files import SavedTensors, new_target
from mxtrain.run_folder.files import CONFIG_FILE
from mxtrain.settings.model_settings import SECTION
from mxtrain.settings.read import read_settings
from mxtrain.titan.hugging_face.models import find_model, parameters, require_same_logits
from mxtrain.titan.metrics import package_versions
from mxtrain.titan.parse import parse_job_config

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


def import_model(source: Path, target: Path, config: Path | None = None) -> str:
    """Make a run's folder with the weights, the tokenizer and a config. The folder appears when it is complete.

    Weights are read and written one after another, and stored in fp32, in which a run trains them.

    Args:
        source: folder of a Hugging Face model: config.json, safetensors and tokenizer.json.
        target: a folder that does not exist, or is empty.
        config: TOML file with the settings of the run. The model, its weights and its tokenizer replace those in it.

    Returns:
        Lines for the user.

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
        model, flavor, model_args, args = find_model(shape, where)
        weights = _Weights(saved, parameters(model, args))
        tokens = load_tokenizer(source).size
        if tokens > shape.vocab_size:
            raise ConfigError(
                f"{where}: its tokenizer has {tokens:,} tokens, more than vocab_size = {shape.vocab_size:,} in "
                "config.json"
            )
        own = {"model.name": model, "model.flavor": flavor}
        own |= {f"{SECTION}.{name}": value for name, value in model_args.items()}
        own["data.vocab_size"] = shape.vocab_size
        settings = _settings(config, own, shape.max_position_embeddings, target.absolute())
        tokenizer = folder / TOKENIZER_FOLDER
        copy_tokenizer(source, tokenizer)
        generation = json.dumps(read_generation(source), indent=2) + "\n"
        (tokenizer / GENERATION_FILE).write_text(generation, encoding="utf-8")
        dump_config(settings, folder / CONFIG_FILE)
        try:  # without the tokenizer, whose folder is being built under another name
            parse_job_config(
                [f"--job.config_file={folder / CONFIG_FILE}", "--mxnorm.mode=auto", "--model.hf_assets_path="]
            )
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}; give --config FILE with other model.converters") from error
        notes.append(require_same_logits(source, model, args, weights, where))
        others = {name for name in os.listdir(source) if name[0] != "." and "safetensors" not in name}
        if lost := sorted(others - {MODEL_CONFIG_FILE, *TOKENIZER_FILES, SPECIAL_TOKENS_FILE, *COMPANIONS}):
            notes.append(f"not in the run, nor in its exports: {', '.join(lost)}")
        facts = {"settings": settings, "versions": package_versions(), "tokenizer_sha256": tokenizer_hash(tokenizer)}
        save_weights(folder / SEED, weights, {fqn: place.shape for fqn, place in weights.places.items()}, **facts)
    return "\n".join(
        [
            f"imported  {source} as {model} {flavor}{f' with [{SECTION}]' if model_args else ''}, "
            f"{weights.count:,} parameters, vocabulary of {shape.vocab_size:,}",
            *(f"note      {note}" for note in notes),
            f"folder    {target}",
            f"train     mxtrain train {shlex.quote(str(target / CONFIG_FILE))}",
        ]
    )


class _Weights:
    """The weights of a dense Hugging Face model as TorchTitan's parameters, checked, and read one at a time."""

    def __init__(self, saved: SavedTensors, places: Mapping[str, Parameter]):
        self._saved = saved
        self.places = places
        shapes = {place.names[0]: place.shape for place in places.values() if place.names}
        saved.require(shapes, optional={HEAD: shapes[EMBEDDING]})
        self.count = sum(math.prod(shape) for shape in shapes.values())
        """Number of parameters. A weight with two names counts once"""

    def __getitem__(self, fqn: str) -> torch.Tensor:
        """Return a parameter, fp32. Raises ConfigError if it is not finite."""
        place = self.places[fqn]
        if not place.names:  # the head, which has the embedding's weight
            return self._saved[EMBEDDING]
        weight = self._saved[place.names[0]]
        return weight if place.order is None else weight[place.order.argsort()]


def _require_sizes(shape: ModelShape, saved: SavedTensors, where: str) -> None:
    """Compare config.json with the files before anything of its sizes is built. Raises ConfigError."""
    layers, tensors = shape.num_hidden_layers, len(saved.shapes)
    if layers > tensors:
        raise ConfigError(f"{where}: num_hidden_layers = {layers} in config.json, and the files have {tensors} tensors")
    inputs, queries = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    saved.require_shape(EMBEDDING, (shape.vocab_size, inputs))
    saved.require_shape("model.layers.0.mlp.gate_proj.weight", (shape.intermediate_size, inputs))
    saved.require_shape("model.layers.0.self_attn.q_proj.weight", (queries, inputs))


def _settings(config: Path | None, own: dict[str, object], positions: int, target: Path) -> dict:
    """Return the tables of the run's config.toml.

    Args:
        config: the user's file; None for DEFAULTS.
        own: the settings that the model decides on, by full name.
        positions: the model's number of positions.
        target: the run's folder.

    Raises:
        ConfigError: the file says another model than the one that is imported.
    """
    length = f"{SECTION}.max_seq_len"
    if config is None:
        tables, given = DEFAULTS, {}
        # TorchTitan refuses an odd length.
        seq_len = own["training.seq_len"] = min(DEFAULTS["training"]["seq_len"], positions - positions % 2)
    else:
        settings = read_settings([f"--job.config_file={config}"])
        tables, given, seq_len = load_config(config), settings.given, settings["training.seq_len"]
        for name, value in given.items():
            if name in own or (name.startswith(f"{SECTION}.") and name != length):
                expected = own.get(name)
                if value not in (None, expected) and (name, value) != ("data.vocab_size", 0):
                    raise ConfigError(f"{name} = {value!r} in {config} is not the model's: {expected or 'unset'!r}")
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
