"""TorchTitan's models under their Hugging Face names: which are supported, their shapes, names and order of rows."""

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import astuple, replace
from pathlib import Path

import torch

from mxtrain.errors import ConfigError
from mxtrain.hugging_face.model_config import CONFIG_FILE, ModelShape, Parameter, RopeScaling
from mxtrain.hugging_face.text import from_pretrained
from mxtrain.settings.model_settings import PLACES
from mxtrain.settings.model_sizes import wrong_sizes
from mxtrain.titan.engine import engine

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
OWN_SETTINGS = {
    "qwen3_moe": {
        "num_experts": "num_experts",
        "num_experts_per_tok": "top_k",
        "moe_intermediate_size": "moe_inter_dim",
        "norm_topk_prob": "route_norm",
    },
}
"""``model_type`` -> its own fields of config.json -> the size that has the value"""
ROPE_SETTINGS = ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_seq_len")
"""The settings of [model_args] that have the values of rope_scaling, in the order of ``RopeScaling``"""
WITHOUT_BIAS = ("qwen3_moe",)
"""``model_type`` of the models whose routers have no bias"""
COMPARED_LAYERS = 2
"""How many of the first layers ``require_same_logits`` computes. They take little memory of any model"""
POSITIONS = torch.tensor([[0, 1, 2, 3, 5, 8, 16, 32, 64, 128, 256, 512, 1024, 2047]])
"""Positions of the compared tokens. Low frequencies, which a scaling changes, show at large ones"""
TOLERANCE = 1e-3
"""The largest difference of two logits, as a share of their standard deviation"""


def require_exportable(name: str, where: str) -> None:
    """Raise ConfigError, which begins with ``where``, for a model that transformers have no counterpart of."""
    if name not in MODELS:
        raise ConfigError(
            f"{where}: model.name = {name!r} has no Hugging Face form here; supported are: {', '.join(MODELS)}"
        )


def require_computed_alike(model, where: str) -> None:
    """Raise ConfigError, which begins with ``where``, unless transformers' model of this name computes the same."""
    if wrong := list(model.unlike_transformers()):
        raise ConfigError(f"{where}: a {model.name} with {', '.join(wrong)} has no counterpart in transformers")


def shape_of(model, positions: int) -> ModelShape:
    """Return the shape of one of ``MODELS``, a ``SizedModel``, with this many positions."""
    sizes = model.sizes
    values = {
        "model_type": "llama" if model.name == "llama3" else "qwen3",
        "rope_scaling": None,
        **{field: sizes[setting] for field, setting in SETTINGS.items() if setting in PLACES[model.name]},
        "num_key_value_heads": sizes["n_kv_heads"] or sizes["n_heads"],
        "rms_norm_eps": float(sizes["norm_eps"]),
        "rope_theta": float(sizes["rope_theta"]),
    }
    if model.name == "llama3":
        values["head_dim"] = sizes["dim"] // sizes["n_heads"]
        if sizes["rope_factor"] != 1:
            *factors, original = (sizes[setting] for setting in ROPE_SETTINGS)
            values["rope_scaling"] = RopeScaling(*map(float, factors), original)
    elif "num_experts" in sizes:
        values["model_type"] = "qwen3_moe"
    own = {field: sizes[name] for field, name in OWN_SETTINGS.get(values["model_type"], {}).items()}
    return ModelShape(**values, vocab_size=sizes["vocab_size"], max_position_embeddings=positions, own=own)


def find_model(shape: ModelShape, where: str) -> tuple[str, dict[str, object], object]:
    """Find the flavor that needs the fewest settings of [model_args] to have a shape.

    All settings give a flavor its closest shape. Those without which it stays the same are left out.

    Returns:
        The flavor, the settings, and the ``SizedModel`` of this shape.

    Raises:
        ConfigError: TorchTitan has no model of this shape. The message begins with ``where``.
    """
    sized_model = engine().SizedModel

    def with_settings(name: str, flavor: str, settings: dict[str, object]) -> tuple[object, ModelShape]:
        model = sized_model.of_flavor(name, flavor, settings, shape.vocab_size)
        closest = shape_of(model, shape.max_position_embeddings)
        if shape.model_type == "qwen3_moe":  # no layer has this size
            closest = replace(closest, intermediate_size=shape.intermediate_size)
        return model, closest

    found = []
    for name in MODELS:
        wanted = {setting: value for setting, value in _settings_of(shape).items() if setting in PLACES[name]}
        for flavor in sized_model.flavors(name):
            if with_settings(name, flavor, {})[1].model_type != shape.model_type:
                continue
            (model, closest), settings = with_settings(name, flavor, wanted), wanted
            for setting in wanted:
                fewer = {other: value for other, value in settings.items() if other != setting}
                if setting != "load_balance_coeff" and with_settings(name, flavor, fewer)[1] == closest:
                    settings = fewer
            found.append((flavor, settings, model, closest))
    flavor, settings, model, closest = min(found, key=lambda candidate: (candidate[3] != shape, len(candidate[1])))
    has = {**vars(closest), **closest.own}
    for field, value in {**vars(shape), **shape.own}.items():
        if field != "own" and (other := has[field]) != value:
            raise ConfigError(
                f"{where}: {field} = {value!r} in {CONFIG_FILE} does not fit TorchTitan's {model.name}, which would "
                f"have {other!r}"
            )
    for _, problem in wrong_sizes(model.name, model.sizes):
        raise ConfigError(f"{where}: {CONFIG_FILE} {problem}")
    return flavor, settings, model


def _settings_of(shape: ModelShape) -> dict[str, object]:
    """Return all settings of [model_args] that give a model its shape."""
    settings = {setting: getattr(shape, field) for field, setting in SETTINGS.items()}
    settings |= {setting: shape.own[field] for field, setting in OWN_SETTINGS.get(shape.model_type, {}).items()}
    if shape.model_type in WITHOUT_BIAS:
        settings["load_balance_coeff"] = 0
    if shape.rope_scaling is None:
        return settings | {"rope_factor": 1.0}
    return settings | dict(zip(ROPE_SETTINGS, astuple(shape.rope_scaling)))


def parameters(model) -> dict[str, Parameter]:
    """Return the place of each parameter in Hugging Face's model, by TorchTitan's own adapter.

    Hugging Face has neither the second of two tied weights nor the bias of experts.
    """
    tied, adapter = model.sizes.get("enable_weight_tying", False), model.adapter()
    found, orders = {}, {}
    for name, weight in model.on_meta().state_dict().items():
        fqn = engine().saved_name(name)
        if fqn.endswith(".expert_bias") or (tied and fqn == "output.weight"):
            found[fqn] = Parameter(tuple(weight.shape), (), None)
            continue
        kind = (re.sub(r"\d+", "{}", fqn), weight.shape)
        if kind not in orders:
            orders[kind] = _row_order(adapter, name, weight.shape)
        found[fqn] = Parameter(tuple(weight.shape), tuple(adapter.to_hf({name: weight})), orders[kind])
    return found


def _row_order(adapter, name: str, shape: torch.Size) -> torch.Tensor | None:
    """Let the adapter permute the numbers of the rows. Return None if they stay in order, or are no matrix."""
    if len(shape) != 2:
        return None
    numbers = torch.arange(shape[0], dtype=torch.int32)
    (permuted,) = adapter.to_hf({name: numbers[:, None].expand(*shape)}).values()
    order = permuted[:, 0].long()
    return None if torch.equal(order, numbers.long()) else order


@torch.inference_mode()
def require_same_logits(source: Path, model, weights: Mapping[str, torch.Tensor], where: str) -> str:
    """Compare an imported model with transformers' own: two readings of one config.json may be two models.

    Both compute a few tokens' logits after the first layers, in fp32 on the CPU.

    Returns a line for the user. Raises ConfigError, beginning with ``where``, if they differ or transformers fails.
    """
    tokens = torch.linspace(0, model.sizes["vocab_size"] - 1, POSITIONS.numel()).long()[None]
    layers = min(COMPARED_LAYERS, model.sizes["n_layers"])
    config = from_pretrained("AutoConfig", source, where)
    config.num_hidden_layers = layers
    options = {"config": config, "dtype": torch.float32, "use_safetensors": True}
    module = from_pretrained("AutoModelForCausalLM", source, where, **options)
    # With a mask, because jumps of the positions would begin new documents without one.
    theirs = module(tokens, attention_mask=torch.ones_like(tokens), position_ids=POSITIONS).logits
    module = model.shortened(
        layers, int(POSITIONS.max()) + 1
    ).on_meta()  # the other model's memory is free before this one gets any
    engine().multiply_experts_in_fp32(module)
    module.init_weights(buffer_device=torch.device("cpu"))  # computes the buffers; parameters have no memory
    module.load_state_dict({name: weights[engine().saved_name(name)] for name in module.state_dict()}, assign=True)
    ours = module(tokens, positions=POSITIONS)
    difference, spread = (ours - theirs).abs().max().item(), theirs.std().item()
    version = importlib.metadata.version("transformers")
    peer = f"those of transformers {version} on {tokens.numel()} tokens after {layers} layers"
    if not difference <= TOLERANCE * spread:  # NaN, too
        raise ConfigError(
            f"{where}: the logits of TorchTitan's {model.name} differ from {peer} by up to {difference:.2g}, and their "
            f"standard deviation is {spread:.2g}: transformers reads config.json or the weights in another way"
        )
    return f"the logits are {peer}, up to {difference:.1g}; their standard deviation is {spread:.2g}"
