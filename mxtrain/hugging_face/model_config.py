"""A model's shape, and the config.json that describes it to Hugging Face's transformers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from mxtrain.errors import ConfigError
from mxtrain.files import read_json
from mxtrain.hugging_face.text import from_pretrained
from mxtrain.settings.model_settings import PLACES

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # in both files; eos may be a list
REPORT_FILE = "mxtrain.json"
"""In the folder of an export: which run and checkpoint it holds, and its losses"""


@dataclass(frozen=True)
class Architecture:
    """A model of transformers: what its config.json has besides the fields of ``ModelShape``."""

    name: str
    """The class"""
    model: str
    """The model in TorchTitan"""
    own: Mapping[str, str] = field(default_factory=dict)
    """The fields in ``ModelShape.own`` -> TorchTitan's sizes with their values"""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fields -> the only values that TorchTitan computes"""
    scaling: str = "llama3"
    """``rope_type`` of the scaled rotation"""
    load_balance_coeff: float | None = None
    """0 for routers that have no bias in transformers; None without routers"""


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama3", fixed={"mlp_bias": False}),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", fixed={"use_sliding_window": False}),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3",
        own={
            "num_experts": "num_experts",
            "num_experts_per_tok": "top_k",
            "moe_intermediate_size": "moe_inter_dim",
            "norm_topk_prob": "route_norm",
        },
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
        load_balance_coeff=0,
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        own={
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
        # transformers has no field for the first three. vLLM reads them.
        fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True},
        scaling="yarn",
        load_balance_coeff=1e-3,
    ),
}
"""``model_type`` -> the model in transformers"""
MODELS = tuple(dict.fromkeys(kind.model for kind in ARCHITECTURES.values()))
"""TorchTitan's models that have a Hugging Face form"""
SUPPORTED = {
    "model_type": tuple(ARCHITECTURES),
    "hidden_act": ("silu",),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "is_causal": (None, True),
    "quantization_config": (None,),
    "attention_factor": (None,),
    "truncate": (None, True),
}
"""Fields of config.json and its rotary parameters -> the values that can be imported. None stands for no field"""


SCALINGS = {
    "llama3": dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "yarn": {
        **dict.fromkeys(("factor", "original_max_position_embeddings")),
        **{"mscale": 0.0, "mscale_all_dim": 0.0, "beta_fast": 32.0, "beta_slow": 1.0},
    },
}
"""``rope_type``, of Llama 3.1 and of DeepSeek -> the parameters in config.json and their defaults"""


@dataclass(frozen=True)
class ModelShape:
    """Everything that decides what a model computes but its weights, with the names of config.json."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, float] | None
    tie_word_embeddings: bool
    max_position_embeddings: int
    """Computes nothing, but ends what a user may ask for"""
    own: Mapping[str, object] = field(default_factory=dict)
    """The fields of this ``model_type`` alone"""


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
FROM_CONFIG = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "tie_word_embeddings", "max_position_embeddings"),
)
"""Fields that a config of transformers has under the same name, and as the same value"""


@dataclass(frozen=True)
class Parameter:
    """A parameter's place in Hugging Face's model."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    """One; one for each expert; or none for a parameter that Hugging Face does not have"""
    order: torch.Tensor | None = None
    """int64 [N], the rows in Hugging Face's order; None if they keep their order"""


def require_computed_alike(model, where: str) -> None:
    """Raise ConfigError, which begins with ``where``, unless transformers has a model that computes the same."""
    if model.name not in MODELS:
        raise ConfigError(f"{where}: model.name = {model.name!r} cannot be exported; allowed are {', '.join(MODELS)}")
    required, sizes = REQUIRED.get(model.name, {}), model.sizes
    wrong = [f"{name} = {sizes[name]!r}" for name, values in required.items() if sizes[name] not in values]
    if "num_experts" in sizes and model.name != "deepseek_v3" and sizes["load_balance_coeff"]:
        wrong.append(f"load_balance_coeff = {sizes['load_balance_coeff']}")
    if wrong:
        raise ConfigError(f"{where}: a {model.name} with {', '.join(wrong)} has no counterpart in transformers")


def shape_of(model, positions: int) -> ModelShape:
    """Return the shape of one of ``MODELS``, a ``SizedModel``, with this many positions."""
    sizes = model.sizes
    kinds = [kind for kind, architecture in ARCHITECTURES.items() if architecture.model == model.name]
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
    own = {field: sizes[name] or NOTHING.get(field, sizes[name]) for field, name in ARCHITECTURES[kind].own.items()}
    is_yarn = kind == "deepseek_v3"
    if sizes.get("rope_factor", 1) != 1 and not (is_yarn and sizes["seq_len"] <= sizes["rope_original_seq_len"]):
        scaling = {field: sizes[setting] for field, setting in ROPE_SETTINGS.items() if setting in sizes}
        mscales = dict.fromkeys(("mscale", "mscale_all_dim"), sizes["mscale"]) if is_yarn else {}
        values["rope_scaling"] = SCALINGS[ARCHITECTURES[kind].scaling] | scaling | mscales
    return ModelShape(**values, vocab_size=sizes["vocab_size"], max_position_embeddings=positions, own=own)


def settings_of(shape: ModelShape) -> dict[str, object]:
    """Return all settings of [model_args] that give a model its shape."""
    kind = ARCHITECTURES[shape.model_type]
    settings = {setting: getattr(shape, field) for field, setting in SETTINGS.items()}
    settings |= {setting: shape.own[field] or 0 for field, setting in kind.own.items()}
    settings |= {"load_balance_coeff": kind.load_balance_coeff, "rope_factor": 1.0}
    if shape.model_type == "qwen3_moe":
        del settings["hidden_dim"]  # no layer has this size
    scaling = shape.rope_scaling or {}
    settings |= {setting: scaling[field] for field, setting in ROPE_SETTINGS.items() if field in scaling}
    return {
        setting: value for setting, value in settings.items() if setting in PLACES[kind.model] and value is not None
    }


def config_json(shape: ModelShape, dtype: str, generation: dict) -> dict:
    """Return the content of config.json beside ``generation``, the content of generation_config.json.

    ``dtype`` is that of the weights, such as "float32". The rotary parameters have the names of transformers 4, which
    transformers 5 and vLLM read, too.
    """
    values, kind = asdict(shape), ARCHITECTURES[shape.model_type]
    scaling, own = values.pop("rope_scaling"), values.pop("own")
    if scaling and kind.scaling == "llama3":
        # transformers warns unless this number is below the positions. Frequencies depend on the ratios of three
        # numbers, so halving all of them changes no bit.
        original = before = scaling["original_max_position_embeddings"]
        while original >= shape.max_position_embeddings and original > 1:
            original //= 2
        factors = {name: scaling[name] * original / before for name in ("low_freq_factor", "high_freq_factor")}
        scaling |= {**factors, "original_max_position_embeddings": original}
    return {
        "architectures": [kind.name],
        **values,
        **own,
        "rope_scaling": scaling and {"rope_type": kind.scaling, **scaling},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        **kind.fixed,
        **{name: generation.get(name) for name in SPECIAL_IDS},
        "use_cache": True,
        "torch_dtype": dtype,
    }


def read_generation(folder: Path) -> dict:
    """Return the content of generation_config.json, and where it has none, config.json's ids of special tokens."""
    files = [folder / name for name in (CONFIG_FILE, GENERATION_FILE)]
    config, own = (read_json(file) if file.is_file() else {} for file in files)
    return {name: config[name] for name in SPECIAL_IDS if config.get(name) is not None} | own


def read_shape(folder: Path) -> ModelShape:
    """Read a model's shape from config.json, as transformers reads it."""
    where = f"MODEL_DIR = {str(folder)!r}"
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{where}: {CONFIG_FILE} is missing; name the folder of a Hugging Face model")
    config = from_pretrained("AutoConfig", folder, where)
    # The names of transformers 5, which has the base among them, or of transformers 4.
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {"rope_type": "default"}
    kind = ARCHITECTURES.get(config.model_type, Architecture("", ""))
    fixed = {name: (None, value) for name, value in kind.fixed.items()}
    for name, allowed in {**SUPPORTED, "rope_type": ("default", kind.scaling), **fixed}.items():
        value = rope[name] if name in rope else getattr(config, name, None)
        if value not in allowed:
            choices = ", ".join(repr(choice) for choice in allowed if choice is not None) or "models without it"
            raise ConfigError(f"{where}: {name} = {repr(value)[:200]} in {CONFIG_FILE} is not one of: {choices}")
    scaling = None
    if rope["rope_type"] == kind.scaling and rope["factor"] != 1:
        defaults = SCALINGS[kind.scaling]
        scaling = defaults | {name: rope[name] for name in defaults if rope.get(name) is not None}
    sizes = {name: getattr(config, name, None) for name in FROM_CONFIG}
    sizes["head_dim"] = sizes["head_dim"] or sizes["hidden_size"] // sizes["num_attention_heads"]
    own = {name: getattr(config, name) for name in kind.own}
    eps, theta = float(config.rms_norm_eps), float(rope.get("rope_theta") or config.rope_theta)
    return ModelShape(**sizes, rms_norm_eps=eps, rope_theta=theta, rope_scaling=scaling, own=own)
