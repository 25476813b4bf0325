"""TorchTitan's models under their Hugging Face names: which are supported, their shapes, names and order of rows."""

import re
from dataclasses import replace

import torch

from mxtrain.errors import ConfigError
from mxtrain.hugging_face.model_config import CONFIG_FILE, ModelShape, Parameter, RopeScaling, YarnScaling
from mxtrain.settings.model_settings import PLACES, wrong_sizes
from mxtrain.titan.releases import engine

MODELS = {
    "llama": "llama3",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "deepseek_v3": "deepseek_v3",
}
"""``model_type`` of transformers -> the model in TorchTitan"""
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
    "deepseek_v3": {
        "moe_intermediate_size": "moe_inter_dim",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "num_experts_per_tok": "top_k",
        "first_k_dense_replace": "n_dense_layers",
        "n_group": "groups",
        "topk_group": "limited_groups",
        "norm_topk_prob": "route_norm",
        "routed_scaling_factor": "route_scale",
        **{n: n for n in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    },
}
"""``model_type`` -> its own fields of config.json -> the size that has the value"""
NOTHING = {"q_lora_rank": None, "n_group": 1, "topk_group": 1}
"""Fields of config.json -> the values that stand for TorchTitan's None and 0"""
ROPE_SETTINGS = {
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_seq_len",
}
"""Field of rope_scaling -> the setting of [model_args] that has its value"""
REQUIRED = {"deepseek_v3": {"score_func": ("sigmoid",), "norm_eps": (1e-6,), "num_shared_experts": range(1, 2**31)}}
"""Model -> sizes -> the values that transformers compute: DeepSeek's norms of latents have an epsilon of their own"""
LONG = 2**30
"""More positions than any model has: TorchTitan scales DeepSeek's rotation in long sequences only"""
BALANCING = {"qwen3_moe": 0, "deepseek_v3": 1e-3}
"""``model_type`` -> load_balance_coeff: routers of Qwen3 have no bias in transformers"""


def require_computed_alike(model, where: str) -> None:
    """Raise ConfigError, which begins with ``where``, unless transformers has a model that computes the same."""
    if model.name not in MODELS.values():
        raise ConfigError(
            f"{where}: model.name = {model.name!r} has no Hugging Face form here; supported are: "
            f"{', '.join(dict.fromkeys(MODELS.values()))}"
        )
    required, sizes = REQUIRED.get(model.name, {}), model.sizes
    wrong = [f"{name} = {sizes[name]!r}" for name, values in required.items() if sizes[name] not in values]
    if "num_experts" in sizes and model.name != "deepseek_v3" and sizes["load_balance_coeff"]:
        wrong.append(f"load_balance_coeff = {sizes['load_balance_coeff']}")
    if wrong:
        raise ConfigError(f"{where}: a {model.name} with {', '.join(wrong)} has no counterpart in transformers")


def shape_of(model, positions: int) -> ModelShape:
    """Return the shape of one of ``MODELS``, a ``SizedModel``, with this many positions."""
    sizes = model.sizes
    kinds = [kind for kind, name in MODELS.items() if name == model.name]
    kind = kinds[-1 if "num_experts" in sizes else 0]
    values = {
        "model_type": kind,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "head_dim": sizes.get("qk_rope_head_dim", sizes["dim"] // sizes["n_heads"]),
        **{field: sizes[setting] for field, setting in SETTINGS.items() if setting in PLACES[model.name]},
        "num_key_value_heads": sizes.get("n_kv_heads") or sizes["n_heads"],
        "rms_norm_eps": float(sizes["norm_eps"]),
        "rope_theta": float(sizes["rope_theta"]),
    }
    own = {field: sizes[name] or NOTHING.get(field, sizes[name]) for field, name in OWN_SETTINGS.get(kind, {}).items()}
    if sizes.get("rope_factor", 1) == 1:
        pass
    elif kind == "deepseek_v3":
        if sizes["seq_len"] > sizes["rope_original_seq_len"]:
            factor, mscale = float(sizes["rope_factor"]), float(sizes["mscale"])
            values["rope_scaling"] = YarnScaling(factor, sizes["rope_original_seq_len"], mscale, mscale)
    else:
        *factors, original = (sizes[setting] for setting in ROPE_SETTINGS.values())
        values["rope_scaling"] = RopeScaling(*map(float, factors), original)
    return ModelShape(**values, vocab_size=sizes["vocab_size"], max_position_embeddings=positions, own=own)


def find_model(shape: ModelShape, where: str) -> tuple[str, dict[str, object], object]:
    """Find the flavor that needs the fewest settings of [model_args] to have a shape.

    All settings give a flavor its closest shape. Those without which it stays the same are left out.

    Returns:
        The flavor, the settings, and the ``SizedModel`` of this shape.

    Raises:
        ConfigError: TorchTitan has no model of this shape. The message begins with ``where``.
    """
    sized_model, name = engine().SizedModel, MODELS[shape.model_type]

    def with_settings(flavor: str, settings: dict[str, object]) -> tuple[object, ModelShape]:
        model = sized_model.of_flavor(name, flavor, settings, shape.vocab_size, LONG)
        closest = shape_of(model, shape.max_position_embeddings)
        if shape.model_type == "qwen3_moe":  # no layer has this size
            closest = replace(closest, intermediate_size=shape.intermediate_size)
        return model, closest

    found, asked = [], {**vars(shape), **shape.own}
    wanted = {setting: value for setting, value in _settings_of(shape).items() if setting in PLACES[name]}
    for flavor in sized_model.flavors(name):
        if with_settings(flavor, {})[1].model_type != shape.model_type:
            continue
        (model, closest), settings = with_settings(flavor, wanted), wanted
        for setting in wanted:
            fewer = {other: value for other, value in settings.items() if other != setting}
            if setting != "load_balance_coeff" and with_settings(flavor, fewer)[1] == closest:
                settings = fewer
        has = {**vars(closest), **closest.own, "own": shape.own}
        misfits = [(field, value, has[field]) for field, value in asked.items() if has[field] != value]
        found.append((flavor, settings, model, misfits))
    if not found:
        raise ConfigError(f"{where}: the installed TorchTitan has no model of model_type = {shape.model_type!r}")
    flavor, settings, model, misfits = min(found, key=lambda candidate: (len(candidate[3]), len(candidate[1])))
    for field, value, other in misfits:
        raise ConfigError(
            f"{where}: {field} = {value!r} in {CONFIG_FILE} does not fit TorchTitan's {model.name}, which would have "
            f"{other!r}"
        )
    for _, problem in wrong_sizes(model.name, model.sizes):
        raise ConfigError(f"{where}: {CONFIG_FILE} {problem}")
    return flavor, settings, model


def _settings_of(shape: ModelShape) -> dict[str, object]:
    """Return all settings of [model_args] that give a model its shape."""
    settings = {setting: getattr(shape, field) for field, setting in SETTINGS.items()}
    own = OWN_SETTINGS.get(shape.model_type, {})
    settings |= {setting: shape.own[field] or 0 for field, setting in own.items()}
    if shape.model_type in BALANCING:
        settings["load_balance_coeff"] = BALANCING[shape.model_type]
    if shape.rope_scaling is None:
        return settings | {"rope_factor": 1.0}
    scaling = vars(shape.rope_scaling)
    return settings | {setting: scaling[field] for field, setting in ROPE_SETTINGS.items() if field in scaling}


def parameters(model) -> dict[str, Parameter]:
    """Return the place of each parameter in Hugging Face's model, by TorchTitan's own adapter.

    Hugging Face does not have the second of two tied weights.
    """
    tied, adapter = model.sizes.get("enable_weight_tying", False), model.adapter()
    found, orders = {}, {}
    for name, weight in model.on_meta().state_dict().items():
        fqn = engine().saved_name(name)
        if tied and fqn == "output.weight":
            found[fqn] = Parameter(tuple(weight.shape), ())
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
