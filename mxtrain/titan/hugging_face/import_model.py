"""``mxtrain import``: makes a folder from which a run continues the training of a Hugging Face model."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain.config import dump_config, load_config
from mxtrain.data.tokenizer import copy_tokenizer, load_tokenizer, tokenizer_hash
from mxtrain.errors import ConfigError
from mxtrain.hugging_face.model_config import ModelShape, read_shape
from mxtrain.hugging_face.safetensors_files import SavedTensors
from mxtrain.run_folder.files import CONFIG_FILE
from mxtrain.run_folder.manifest import Manifest, hash_file, write_manifest
from mxtrain.settings.read import read_settings
from mxtrain.titan.data.run_data import TOKENIZER_FOLDER
from mxtrain.titan.hugging_face.names import MODELS, Names, shape_of
from mxtrain.titan.hugging_face.target_folder import new_target
from mxtrain.titan.reports.metrics import package_versions

SEED = "checkpoint/step-0"
"""The checkpoint of weights that a run starts from"""

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
    vocab_size: int
    parameters: int

    def __str__(self) -> str:
        command = f"mxtrain train {shlex.quote(str(self.folder / CONFIG_FILE))}"
        return (
            f"imported  {self.source} as {self.model} {self.flavor}, {self.parameters:,} parameters, vocabulary of "
            f"{self.vocab_size:,}\nfolder    {self.folder}\ntrain     {command}"
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
        shape = read_shape(source)
        model, flavor = find_flavor(shape, f"MODEL_DIR = {str(source)!r}")
        args = get_train_spec(model).model_args[flavor]
        args.vocab_size = shape.vocab_size
        weights = _Weights(source, model, args)
        _require_tokenizer(source, shape.vocab_size)
        own = {"model": {"name": model, "flavor": flavor}, "data": {"vocab_size": shape.vocab_size}}
        settings = _settings(config, own, target.absolute())
        folder_of_tokenizer = folder / TOKENIZER_FOLDER
        copy_tokenizer(source, folder_of_tokenizer)
        dump_config(settings, folder / CONFIG_FILE)
        weights.save(folder / SEED, settings, tokenizer_hash(folder_of_tokenizer))
    return ImportReport(target, source, model, flavor, shape.vocab_size, weights.parameters)


def find_flavor(shape: ModelShape, where: str) -> tuple[str, str]:
    """Return TorchTitan's name of the model and the flavor that has this shape. The vocabulary is a setting of its own.

    Raises:
        ConfigError: there is none. The message begins with ``where`` and names the nearest flavor.
    """
    found = []
    for model in MODELS:
        flavors = get_train_spec(model).model_args
        for flavor in flavors:
            theirs = shape_of(model, flavors[flavor])
            if theirs.model_type == shape.model_type:
                differing = theirs.differences(shape, but=("vocab_size",))
                found.append((len(differing), differing, model, flavor, theirs))
    _, differing, model, flavor, theirs = min(found, key=lambda candidate: candidate[0])
    if not differing:
        return model, flavor
    first = differing[0]
    raise ConfigError(
        f"{where}: {first} = {getattr(shape, first)}, and no flavor of {model} has the same shape; the nearest is "
        f"{flavor!r}, with {first} = {getattr(theirs, first)}"
        + (f" (it also differs in {', '.join(differing[1:])})" if differing[1:] else "")
    )


class _Weights:
    """The weights of a Hugging Face model as TorchTitan's parameters, checked, and read one at a time."""

    def __init__(self, source: Path, model: str, args):
        with torch.device("meta"):
            self._expected = get_train_spec(model).model_cls(args).state_dict()
        self._names = Names(model, args)
        self._saved = SavedTensors(source)
        shapes = {}
        self._hf_names = {}
        for fqn, weight in self._expected.items():
            for hf_name, tensor in self._names.to_hf(fqn, weight).items():
                shapes[hf_name] = tuple(tensor.shape)
                self._hf_names[fqn] = hf_name
        if "output.weight" not in self._hf_names:  # tied
            self._hf_names["output.weight"] = self._hf_names["tok_embeddings.weight"]
        self._saved.require(shapes, self._ignored(args))

    def _ignored(self, args) -> dict[str, tuple[int, ...]]:
        """Name -> shape of tensors that transformers does not read either, and older files hold."""
        head_dim = getattr(args, "head_dim", args.dim // args.n_heads)
        frequencies = {
            f"model.layers.{i}.self_attn.rotary_emb.inv_freq": (head_dim // 2,) for i in range(args.n_layers)
        }
        return frequencies | {"lm_head.weight": (args.vocab_size, args.dim)}

    @property
    def parameters(self) -> int:
        tied = len(set(self._hf_names.values())) < len(self._hf_names)
        return sum(w.numel() for fqn, w in self._expected.items() if not (tied and fqn == "output.weight"))

    def __getitem__(self, fqn: str) -> torch.Tensor:
        """Return a parameter, fp32."""
        hf_name = self._hf_names[fqn]
        return self._names.from_hf(hf_name, self._saved[hf_name]).float().contiguous()

    def save(self, checkpoint: Path, settings: dict, tokenizer_sha256: str) -> None:
        """Write a checkpoint of the weights, with its manifest."""
        dcp.save(dict(self._expected), checkpoint_id=checkpoint, planner=_Reading(self), no_dist=True)
        files = [path for path in checkpoint.rglob("*") if path.is_file()]
        manifest = Manifest(
            step=0,
            holds_trainer=False,
            files={str(path.relative_to(checkpoint)): hash_file(path) for path in files},
            tensors={fqn: {"shape": list(w.shape), "dtype": "float32"} for fqn, w in self._expected.items()},
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


def _settings(config: Path | None, own: dict, target: Path) -> dict:
    """Return the tables of the run's config.toml."""
    tables = DEFAULTS
    if config is not None:
        given = read_settings([f"--job.config_file={config}"]).given
        for section, values in own.items():
            for name, value in values.items():
                theirs = given.get(f"{section}.{name}")
                if theirs not in (None, value) and (section, name, theirs) != ("data", "vocab_size", 0):
                    raise ConfigError(f"{section}.{name} = {theirs!r} in {config} is not the model's: {value!r}")
        tables = load_config(config)
    paths = {
        # A run of this file starts here. TorchTitan's copy of it, in this folder, says less about where it runs: a run
        # of that copy elsewhere must start from the same weights.
        "job": {"dump_folder": str(target)},
        "model": {"hf_assets_path": str(target / TOKENIZER_FOLDER)},
        "checkpoint": {"enable": True, "initial_load_path": str(target / SEED)},
    }
    merged = {section: dict(values) for section, values in tables.items()}
    for tables in (own, paths):
        for section, values in tables.items():
            merged[section] = merged.get(section, {}) | values
    return merged
