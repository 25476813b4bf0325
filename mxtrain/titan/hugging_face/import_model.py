"""``mxtrain import``: makes a folder from which a run continues the training of a Hugging Face model."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import torch

from mxtrain.checkpoints.folder import package_versions
from mxtrain.checkpoints.run_folder import CONFIG_FILE, TOKENIZER_FOLDER
from mxtrain.config import dump_config
from mxtrain.data.tokenizer import copy_tokenizer, load_tokenizer
from mxtrain.errors import ConfigError
from mxtrain.hugging_face.checkpoint import save_weights
from mxtrain.hugging_face.import_model import EMBEDDING, HEAD, SEED, ImportedWeights, run_settings
from mxtrain.hugging_face.model_config import (
    GENERATION_FILE,
    read_generation,
    read_shape,
    require_computed_alike,
)
from mxtrain.hugging_face.model_files import SavedTensors, new_target
from mxtrain.settings.model_settings import SECTION
from mxtrain.titan.hugging_face.models import find_model, parameters
from mxtrain.titan.job_config import parse_job_config


def import_model(source: Path, target: Path, config: Path | None = None) -> str:
    """Make a run's folder with the weights, the tokenizer and a config. The folder appears when it is complete.

    Weights are read and written one after another, and stored in fp32, in which a run trains them. Returns lines for
    the user.

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
        notes, after = [], f"model.layers.{shape.num_hidden_layers}"
        if f"{after}.eh_proj.weight" in saved.shapes:
            saved.shapes = {name: shape for name, shape in saved.shapes.items() if not name.startswith(f"{after}.")}
            notes.append(f"{after}, which predicts a second token, is left out, as by transformers")
        if shape.tie_word_embeddings and HEAD in saved.shapes and not torch.equal(saved[HEAD], saved[EMBEDDING]):
            shape = replace(shape, tie_word_embeddings=False)
            notes.append(f"{HEAD} is not tied to {EMBEDDING}: the files hold two, which transformers 5 does not tie")
        flavor, model_args, model = find_model(shape, where)
        require_computed_alike(model, where)
        weights = ImportedWeights(saved, parameters(model))
        tokens = load_tokenizer(source).size
        if tokens > shape.vocab_size:
            raise ConfigError(f"{where}: the tokenizer has {tokens:,} tokens, but vocab_size is {shape.vocab_size:,}")
        own = {"model.name": model.name, "model.flavor": flavor}
        own |= {f"{SECTION}.{name}": value for name, value in model_args.items()}
        own["data.vocab_size"] = shape.vocab_size
        is_yarn = shape.rope_scaling is not None and "mscale" in shape.rope_scaling
        longer_than = shape.rope_scaling["original_max_position_embeddings"] if is_yarn else 0
        settings = run_settings(config, own, shape.max_position_embeddings, target.absolute(), longer_than)
        tokenizer = folder / TOKENIZER_FOLDER
        copy_tokenizer(source, tokenizer)
        generation = json.dumps(read_generation(source), indent=2) + "\n"
        (tokenizer / GENERATION_FILE).write_text(generation, encoding="utf-8")
        dump_config(settings, folder / CONFIG_FILE)
        try:  # without the tokenizer, whose folder is being built under another name
            job_config = parse_job_config(
                [f"--job.config_file={folder / CONFIG_FILE}", "--mxnorm.mode=auto", "--model.hf_assets_path="]
            )
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}; give --config FILE with other model.converters") from error
        if job_config.training.seq_len <= longer_than:
            raise ConfigError(
                f"{where}: training.seq_len = {job_config.training.seq_len} is too short for TorchTitan to scale the "
                f"rotation as config.json says; allowed is more than {longer_than}"
            )
        save_weights(folder / SEED, weights, weights.shapes, settings=settings, versions=package_versions())
    return "\n".join(
        [
            f"imported  {source} as {model.name} {flavor}{f' with [{SECTION}]' if model_args else ''}, "
            f"{weights.count:,} parameters, vocabulary of {shape.vocab_size:,}",
            *(f"note      {note}" for note in notes),
            f"folder    {target}",
            f"train     mxtrain train {shlex.quote(str(target / CONFIG_FILE))}",
        ]
    )
