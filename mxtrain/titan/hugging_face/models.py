"""TorchTitan's models under their Hugging Face names: which are supported, their shapes, names and order of rows."""

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import astuple, replace
from operator import attrgetter
from pathlib import Path

import torch
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain.errors import ConfigError
from mxtrain.hugging_face.model_config import CONFIG_FILE, ModelShape, Parameter, RopeScaling
from mxtrain.hugging_face.text import from_pretrained
from mxtrain.settings.model_settings import PLACES
from mxtrain.titan.v02.models.llama3 import is_tied
from mxtrain.titan.v02.models.model_args import wrong_size

MODELS = ("llama3", "qwen3")
"""The supported models of TorchTitan"""
SETTINGS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "hidden_dim",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "enable_weight_tying",
}
"""Field of config.json -> the setting of [model_args] that has its value"""
ROPE_SETTINGS = ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_seq_len")
"""The settings of [model_args] that have the values of rope_scaling, in the order of ``RopeScaling``"""
TRANSFORMERS_EXPERTS = {
    "num_shared_experts": 0,
    "score_func": "softmax",
    "route_scale": 1.0,
    "score_before_experts": False,
    "gate_bias": False,
    "num_expert_groups": None,
}
"""TorchTitan's arguments of experts, with the values that give what transformers' Qwen3-MoE computes"""
COMPARED_LAYERS = 2
"""How many of the first layers ``require_same_logits`` computes. They take little memory of any model"""
POSITIONS = torch.tensor([[0, 1, 2, 3, 5, 8, 16, 32, 64, 128, 256, 512, 1024, 2047]])
"""Positions of the compared tokens. Low frequencies, which a scaling changes, show at large ones"""
TOLERANCE = 1e-3
"""The largest difference of two logits, as a share of their standard deviation"""


def meta_model(model: str, args) -> torch.nn.Module:
    """Build a model without converters on the meta device, fp32."""
    with torch.device("meta"):
        return get_train_spec(model).model_cls(args)


def require_exportable(model: str, args, where: str) -> None:
    """Raise ConfigError, which begins with ``where``, unless transformers has a model that computes the same."""
    if model not in MODELS:
        raise ConfigError(
            f"{where}: model.name = {model!r} has no Hugging Face form here; supported are: {', '.join(MODELS)}"
        )
    if model == "qwen3":
        found, expected = {"qk_norm": args.qk_norm}, {"qk_norm": True}
        if args.moe_enabled:
            found, expected = found | vars(args.moe_args), expected | TRANSFORMERS_EXPERTS
        if wrong := [f"{name} = {found[name]!r}" for name in expected if found[name] != expected[name]]:
            raise ConfigError(f"{where}: a {model} with {', '.join(wrong)} has no counterpart in transformers")


def shape_of(model: str, args, positions: int) -> ModelShape:
    """Return the shape of one of ``MODELS`` with TorchTitan's model arguments ``args``, and this many positions."""
    values = {
        "model_type": "llama" if model == "llama3" else "qwen3",
        "rope_scaling": None,
        **{field: _value_of(model, args, setting) for field, setting in SETTINGS.items() if setting in PLACES[model]},
        "num_key_value_heads": args.n_kv_heads or args.n_heads,
        "rms_norm_eps": float(args.norm_eps),
        "rope_theta": float(args.rope_theta),
    }
    if model == "llama3":
        values["head_dim"] = args.dim // args.n_heads
        if args.rope_scaling_args.scaling_factor != 1:
            *factors, original = (_value_of(model, args, setting) for setting in ROPE_SETTINGS)
            values["rope_scaling"] = RopeScaling(*map(float, factors), original)
    elif args.moe_enabled:
        values |= {
            "model_type": "qwen3_moe",
            "num_experts": args.moe_args.num_experts,
            "num_experts_per_tok": args.moe_args.top_k,
            "moe_intermediate_size": args.moe_inter_dim,
            "norm_topk_prob": args.moe_args.route_norm,
        }
    return ModelShape(**values, vocab_size=args.vocab_size, max_position_embeddings=positions)


def _value_of(model: str, args, setting: str):
    """Return what TorchTitan's model arguments have in place of a setting of [model_args]."""
    return attrgetter(PLACES[model][setting])(args)


def find_model(shape: ModelShape, where: str) -> tuple[str, str, dict[str, object], object]:
    """Find the flavor that needs the fewest settings of [model_args] to have a shape.

    All settings give a flavor its closest shape. Those without which it stays the same are left out.

    Returns:
        TorchTitan's name of the model, the flavor, the settings, and TorchTitan's arguments of a model of this shape.

    Raises:
        ConfigError: TorchTitan has no model of this shape. The message begins with ``where``.
    """

    def with_settings(model: str, flavor: str, settings: dict[str, object]) -> tuple[object, ModelShape]:
        args = get_train_spec(model).model_args[flavor]  # a copy
        args.set_model_args(settings)
        args.vocab_size = shape.vocab_size
        return args, shape_of(model, args, shape.max_position_embeddings)

    found = []
    for model in MODELS:
        wanted = {name: value for name, value in _settings_of(shape).items() if name in PLACES[model]}
        for flavor in get_train_spec(model).model_args:
            (args, closest), settings = with_settings(model, flavor, wanted), wanted
            if closest.model_type == shape.model_type:
                for name in wanted:
                    fewer = {other: value for other, value in settings.items() if other != name}
                    settings = fewer if with_settings(model, flavor, fewer)[1] == closest else settings
                found.append((model, flavor, settings, args, closest))
    model, flavor, settings, args, closest = min(found, key=lambda candidate: len(candidate[2]))
    for name, value in vars(shape).items():
        if (other := getattr(closest, name)) != value:
            raise ConfigError(
                f"{where}: {name} = {value!r} in {CONFIG_FILE} does not fit TorchTitan's {model}, which would have "
                f"{other!r}"
            )
    if problem := wrong_size(model, args):
        raise ConfigError(f"{where}: {CONFIG_FILE} {problem}")
    return model, flavor, settings, args


def _settings_of(shape: ModelShape) -> dict[str, object]:
    """Return all settings of [model_args] that give a dense model its shape."""
    settings = {setting: getattr(shape, field) for field, setting in SETTINGS.items()}
    if shape.rope_scaling is None:
        return settings | {"rope_factor": 1.0}
    return settings | dict(zip(ROPE_SETTINGS, astuple(shape.rope_scaling)))


def parameters(model: str, args) -> dict[str, Parameter]:
    """Return the place of each parameter in Hugging Face's model, by TorchTitan's own adapter.

    Hugging Face has neither the second of two tied weights nor the bias of experts.
    """
    tied = is_tied(args)
    # The adapter wants both tied weights at once, and here it gets one parameter at a time.
    adapter = get_train_spec(model).state_dict_adapter(replace(args, enable_weight_tying=False) if tied else args, None)
    found, orders = {}, {}
    for fqn, weight in meta_model(model, args).state_dict().items():
        if fqn.endswith(".expert_bias") or (tied and fqn == "output.weight"):
            found[fqn] = Parameter(tuple(weight.shape), (), None)
            continue
        kind = (re.sub(r"\d+", "{}", fqn), weight.shape)
        if kind not in orders:
            orders[kind] = _row_order(adapter, fqn, weight.shape)
        found[fqn] = Parameter(tuple(weight.shape), tuple(adapter.to_hf({fqn: weight})), orders[kind])
    return found


def _row_order(adapter, fqn: str, shape: torch.Size) -> torch.Tensor | None:
    """Let the adapter permute the numbers of the rows. Return None if they stay in order, or are no matrix."""
    if len(shape) != 2:
        return None
    numbers = torch.arange(shape[0], dtype=torch.int32)
    (permuted,) = adapter.to_hf({fqn: numbers[:, None].expand(*shape)}).values()
    order = permuted[:, 0].long()
    return None if torch.equal(order, numbers.long()) else order


@torch.inference_mode()
def require_same_logits(source: Path, model: str, args, weights: Mapping[str, torch.Tensor], where: str) -> str:
    """Compare an imported model with transformers' own: two readings of one config.json may be two models.

    Both compute a few tokens' logits after the first layers, in fp32 on the CPU.

    Returns a line for the user. Raises ConfigError, beginning with ``where``, if they differ or transformers fails.
    """
    tokens = torch.linspace(0, args.vocab_size - 1, POSITIONS.numel()).long()[None]
    args = replace(args, n_layers=min(COMPARED_LAYERS, args.n_layers), max_seq_len=int(POSITIONS.max()) + 1)
    config = from_pretrained("AutoConfig", source, where)
    config.num_hidden_layers = args.n_layers
    options = {"config": config, "dtype": torch.float32, "use_safetensors": True}
    module = from_pretrained("AutoModelForCausalLM", source, where, **options)
    # With a mask, because jumps of the positions would begin new documents without one.
    theirs = module(tokens, attention_mask=torch.ones_like(tokens), position_ids=POSITIONS).logits
    module = meta_model(model, args)  # the other model's memory is free before this one gets any
    module.init_weights(buffer_device=torch.device("cpu"))  # computes the buffers; parameters have no memory
    module.load_state_dict({fqn: weights[fqn] for fqn in module.state_dict()}, assign=True)
    ours = module(tokens, positions=POSITIONS)
    difference, spread = (ours - theirs).abs().max().item(), theirs.std().item()
    version = importlib.metadata.version("transformers")
    peer = f"those of transformers {version} on {tokens.numel()} tokens after {args.n_layers} layers"
    if not difference <= TOLERANCE * spread:  # NaN, too
        raise ConfigError(
            f"{where}: the logits of TorchTitan's {model} differ from {peer} by up to {difference:.2g}, and their "
            f"standard deviation is {spread:.2g}: transformers reads config.json or the weights in another way"
        )
    return f"the logits are {peer}, up to {difference:.1g}; their standard deviation is {spread:.2g}"
