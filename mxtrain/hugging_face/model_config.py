"""A model's shape, and the config.json that describes it to Hugging Face's transformers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch

from mxtrain.errors import ConfigError
from mxtrain.files import read_json
from mxtrain.hugging_face.text import from_pretrained

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # in both files; eos may be a list
REPORT_FILE = "mxtrain.json"
"""In the folder of an export: which run and checkpoint it holds, and its losses"""


@dataclass(frozen=True)
class Architecture:
    """A model of transformers: what its config.json has besides the fields of ``ModelShape``."""

    name: str
    """The class"""
    own: tuple[str, ...] = ()
    """The fields in ``ModelShape.own``"""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fields -> the only values that TorchTitan computes"""
    scaling: str = "llama3"
    """``rope_type`` of the scaled rotation"""


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", fixed={"mlp_bias": False}),
    "qwen3": Architecture("Qwen3ForCausalLM", fixed={"use_sliding_window": False}),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        own=("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3ForCausalLM",
        own=(
            *("moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
            *("first_k_dense_replace", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"),
            *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        ),
        # transformers has no field for the first three. vLLM reads them.
        fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True},
        scaling="yarn",
    ),
}
"""``model_type`` -> the model in transformers"""
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


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of the rotary frequencies, with the names of config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """DeepSeek's scaling of the rotary frequencies and of the attention, with the names of config.json."""

    factor: float
    original_max_position_embeddings: int
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


SCALINGS = {"llama3": RopeScaling, "yarn": YarnScaling}
"""``rope_type`` -> its parameters"""


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
    rope_scaling: RopeScaling | YarnScaling | None
    tie_word_embeddings: bool
    max_position_embeddings: int
    """Computes nothing, but ends what a user may ask for"""
    own: Mapping[str, object] = field(default_factory=dict)
    """The fields of this ``model_type`` alone"""


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


def config_json(shape: ModelShape, dtype: str, generation: dict) -> dict:
    """Return the content of config.json beside ``generation``, the content of generation_config.json.

    ``dtype`` is that of the weights, such as "float32". The rotary parameters have the names of transformers 4, which
    transformers 5 and vLLM read, too.
    """
    values, kind = asdict(shape), ARCHITECTURES[shape.model_type]
    scaling, own = values.pop("rope_scaling"), values.pop("own")
    if isinstance(shape.rope_scaling, RopeScaling):
        # transformers warns unless this number is below the positions. Frequencies depend on the ratios of three
        # numbers, so halving all of them changes no bit.
        original = before = shape.rope_scaling.original_max_position_embeddings
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
    """Read a model's shape from config.json, as transformers reads it.

    Raises:
        ConfigError: transformers cannot read config.json, or TorchTitan does not compute such a model.
    """
    where = f"MODEL_DIR = {str(folder)!r}"
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{where}: {CONFIG_FILE} is missing; give the folder of a Hugging Face model")
    config = from_pretrained("AutoConfig", folder, where)
    # The names of transformers 5, which has the base among them, or of transformers 4.
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {"rope_type": "default"}
    kind = ARCHITECTURES.get(config.model_type, Architecture(""))
    fixed = {name: (None, value) for name, value in kind.fixed.items()}
    for name, allowed in {**SUPPORTED, "rope_type": ("default", kind.scaling), **fixed}.items():
        value = rope[name] if name in rope else getattr(config, name, None)
        if value not in allowed:
            choices = ", ".join(repr(choice) for choice in allowed if choice is not None) or "models without it"
            raise ConfigError(
                f"{where}: {name} = {repr(value)[:200]} in {CONFIG_FILE} is not supported; supported are: {choices}"
            )
    scaling = None
    if rope["rope_type"] == kind.scaling and rope["factor"] != 1:
        kinds = {field.name: field.type for field in fields(SCALINGS[kind.scaling])}
        given = {name: kinds[name](value) for name, value in rope.items() if name in kinds and value is not None}
        scaling = SCALINGS[kind.scaling](**given)
    sizes = {name: getattr(config, name, None) for name in FROM_CONFIG}
    sizes["head_dim"] = sizes["head_dim"] or sizes["hidden_size"] // sizes["num_attention_heads"]
    own = {name: getattr(config, name) for name in kind.own}
    eps, theta = float(config.rms_norm_eps), float(rope.get("rope_theta") or config.rope_theta)
    return ModelShape(**sizes, rms_norm_eps=eps, rope_theta=theta, rope_scaling=scaling, own=own)
