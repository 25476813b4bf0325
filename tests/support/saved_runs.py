"""Run folders for tests, as a training leaves them: tiny models with random weights, made within the process."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs
from torchtitan.protocols.train_spec import get_train_spec

import mxtrain.titan  # noqa: F401  registers models and converters
from mxtrain.checkpoints.manifest import MANIFEST_FILE, Manifest, write_manifest
from mxtrain.config import dump_config, load_config
from mxtrain.data.run_data import RunData
from mxtrain.files import hash_file
from mxtrain.run_folder.files import CONFIG_FILE
from mxtrain.titan.data import prepare_from_job
from mxtrain.titan.job_config import parse_job_config

VOCABULARY = 320
_QWEN = Qwen3ModelArgs(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=128, vocab_size=VOCABULARY, rope_theta=1e6
)
_EXPERTS = MoEArgs(
    num_experts=4, num_shared_experts=0, top_k=2, score_func="softmax", route_norm=True, score_before_experts=False
)
FLAVORS = {
    "llama3": {
        "small": TransformerModelArgs(
            dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCABULARY, multiple_of=32, rope_theta=500000
        ),
    },
    "qwen3": {
        "small": _QWEN,
        "small_tied": replace(_QWEN, enable_weight_tying=True),
        "small_experts": replace(_QWEN, moe_enabled=True, moe_inter_dim=32, moe_args=_EXPERTS),
    },
}


def add_flavors(monkeypatch) -> None:
    for model, flavors in FLAVORS.items():
        for name, args in flavors.items():
            monkeypatch.setitem(get_train_spec(model).model_args, name, args)


def save_run(folder, model: str, flavor: str, step: int = 3, converters=("mxnorm",), text=None, **sections):
    """Write a run's folder with one checkpoint, and with tokenizer and data.json if ``text``, a folder, is given."""
    config = {
        "job": {"custom_config_module": "mxtrain.titan.job_config"},
        "experimental": {"custom_import": "mxtrain.titan"},
        "model": {"name": model, "flavor": flavor, "converters": list(converters)},
        "training": {"dataset": "python", "seq_len": 32},
        "checkpoint": {"enable": True},
        **sections,
    }
    if text is not None:
        config["training"] |= {"dataset": "files", "dataset_path": str(text)}
        config["data"] = {"cache_dir": str(text.parent / "cache"), "validation_share": 0.5, **config.get("data", {})}
    folder.mkdir(parents=True, exist_ok=True)
    dump_config(config, folder / "config.toml")
    save_weights(folder / "checkpoint" / f"step-{step}", random_weights(model, flavor))
    if text is not None:
        job_config = parse_job_config([f"--job.config_file={folder / 'config.toml'}", f"--job.dump_folder={folder}"])
        job_config.checkpoint.enable = False  # a new run: the checkpoint above is not older than its data
        RunData(job_config, prepare_from_job(job_config)).keep()
    return folder


def random_weights(model: str, flavor: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return weights that show mistakes: with gains that are not ones, and attention that sees positions."""
    torch.manual_seed(seed)
    with torch.no_grad():
        module = get_train_spec(model).model_cls(get_train_spec(model).model_args[flavor])
        module.init_weights()
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            elif ".wq." in name or ".wk." in name:
                parameter.normal_(std=0.25)
    return module.state_dict()


def save_weights(checkpoint: Path, weights: dict[str, torch.Tensor], processes: int = 1) -> None:
    """Write a checkpoint of a run, "RUN/checkpoint/step-N", with the settings in RUN/config.toml."""
    dcp.save(dict(weights), checkpoint_id=checkpoint, no_dist=True)
    add_manifest(checkpoint, processes)


def add_manifest(checkpoint: Path, processes: int = 1, **more) -> None:
    (checkpoint / MANIFEST_FILE).unlink(missing_ok=True)
    write_manifest(
        checkpoint,
        Manifest(
            step=int(checkpoint.name.removeprefix("step-")),
            holds_trainer=False,
            files={path.name: hash_file(path) for path in checkpoint.iterdir()},
            settings=load_config(checkpoint.parents[1] / CONFIG_FILE),
            processes=processes,
            **more,
        ),
    )
