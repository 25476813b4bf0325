"""Run folders for tests, as a training leaves them: tiny models with random weights, made within the process."""

import copy
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F

import mxtrain.titan  # noqa: F401  registers models and converters
from mxtrain.checkpoints.folder import MANIFEST_FILE, Manifest, write_manifest
from mxtrain.checkpoints.run_folder import CONFIG_FILE
from mxtrain.config import dump_config, load_config
from mxtrain.conversion.schedule import set_step
from mxtrain.data.loader import RunData
from mxtrain.files import hash_file
from mxtrain.titan.converters import convert_on_meta
from mxtrain.titan.data import prepare_from_job
from mxtrain.titan.hugging_face.export import SavedRun
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.releases import RELEASE, engine
from tests.support.jobs import with_setting

VOCABULARY = 320
_QWEN = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "hidden_dim": 128}
_DEEPSEEK = {
    "dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 96, "norm_eps": 1e-6, "n_dense_layers": 1,
    "moe_inter_dim": 32, "num_experts": 16, "top_k": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
FLAVORS = {
    "llama3": {
        "small": ("debugmodel", {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 192}),
    },
    "qwen3": {
        "small": ("debugmodel", {**_QWEN, "enable_weight_tying": False}),
        "small_tied": ("debugmodel", _QWEN),
        "small_experts": (
            "debugmodel_moe_16",
            {**_QWEN, "moe_inter_dim": 32, "num_experts": 4, "top_k": 2, "load_balance_coeff": 0},
        ),
    },
    "deepseek_v3": {
        # A dense layer, and one with experts in 8 groups. Sequences of 32 tokens have a scaled rotation.
        "small": ("671B", {**_DEEPSEEK, "rope_original_seq_len": 16}),
        # Without the bias, and without low ranks of queries
        "small_plain": ("671B", {**_DEEPSEEK, "q_lora_rank": 0, "num_shared_experts": 2, "load_balance_coeff": 0}),
    },
}
"""Model -> flavor -> the flavor that it follows, and what it has instead"""


def sized(model: str, flavor: str, **given):
    """One of ``FLAVORS`` as a ``SizedModel``."""
    base, sizes = FLAVORS[model][flavor]
    return engine().SizedModel.of_flavor(model, base, {**sizes, **given}, VOCABULARY)


def add_flavors(monkeypatch) -> None:
    for model, flavors in FLAVORS.items():
        for name in flavors:
            added = sized(model, name)
            monkeypatch.setitem(flavors_of(model), name, added.args if RELEASE == "v02" else added.sizes)


def flavors_of(model: str) -> dict:
    """The flavors of a model of the installed TorchTitan, to which a test may add others."""
    if RELEASE == "v03":
        from mxtrain.titan.v03.models import FLAVORS

        return FLAVORS[model]
    from torchtitan.protocols.train_spec import get_train_spec

    return get_train_spec(model).model_args


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
        # A new run: the checkpoint above is not older than its data.
        job_config = with_setting(job_config, "checkpoint.enable", False)
        RunData(job_config, prepare_from_job(job_config)).keep()
    return folder


def random_weights(model: str, flavor: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return weights that show mistakes: with gains that are not ones, and attention that sees positions."""
    torch.manual_seed(seed)
    with torch.no_grad():
        module = sized(model, flavor).on_meta().to_empty(device="cpu")
        module.init_weights()
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            elif re.search(r"\.(wq|wq_b|wk|wkv_[ab])\.", name):
                parameter.normal_(std=0.25)
        for name, buffer in module.named_buffers():
            if model == "deepseek_v3" and "expert_bias" in name:
                buffer.normal_(std=0.1)
    return saved_state(module)


def load(run: SavedRun, has_converters: bool) -> torch.nn.Module:
    """Build a run's model in fp32, with its converters or without, and load its weights."""
    model = run.model.on_meta() if has_converters else experts_in_fp32(run.model)
    if has_converters:
        convert_on_meta(run.settings.values, model)
        set_step(model, max(1, run.step))
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))  # computes buffers; parameters have no memory yet
    model._apply(lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor)
    if run.model.sizes.get("enable_weight_tying"):
        head_of(model).weight = model.tok_embeddings.weight
    run.weights.load_into({fqn: weight for fqn, weight in saved_state(model).items() if fqn in run.weights})
    return model.eval()


def experts_in_fp32(sized) -> torch.nn.Module:
    """A model on the meta device that multiplies experts one by one: TorchTitan's grouped product rounds to bf16."""
    if RELEASE == "v02":
        args = copy.deepcopy(sized.args)
        if hasattr(args, "moe_args"):
            args.moe_args.use_grouped_mm = False
        return replace(sized, args=args).on_meta()
    from torchtitan.models.common.moe import GroupedExperts

    model = sized.on_meta()
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.forward = partial(_one_by_one, module)
    return model


def _one_by_one(experts, x, counts):
    y, start = torch.zeros_like(x), 0
    for count, w1, w2, w3 in zip(counts.tolist(), experts.w1_EFD, experts.w2_EDF, experts.w3_EFD):
        part = x[start : start + int(count)]
        y[start : start + int(count)] = F.linear(F.silu(F.linear(part, w1)) * F.linear(part, w3), w2)
        start += int(count)
    return y


def head_of(model: torch.nn.Module) -> torch.nn.Linear:
    return model.output if RELEASE == "v02" else model.lm_head


def saved_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights and buffers of a model by their names in checkpoints."""
    return {engine().saved_name(name): tensor for name, tensor in model.state_dict().items()}


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
