"""A model's shape, and the config.json that describes it to Hugging Face's transformers."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mxtrain.errors import ConfigError
from mxtrain.json_toml import read_json

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
REPORT_FILE = "mxtrain.json"
"""In the folder of an export: which run and checkpoint it holds, and its losses"""

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
"""``model_type`` -> name of the class in transformers"""
IMPORTED = ("llama", "qwen3")
"""The types of model that ``read_shape`` reads"""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of the rotary frequencies, with the names of config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


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
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int | None = None
    """Computes nothing, but ends what a user may ask for. None if config.json does not say"""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False

    def differences(self, other: "ModelShape", but: tuple[str, ...] = ()) -> list[str]:
        """Return the names of the fields that differ, in the order above, less those in ``but``."""
        names = [field.name for field in fields(self) if field.name not in but]
        return [name for name in names if getattr(self, name) != getattr(other, name)]


def config_json(shape: ModelShape, dtype: str, bos_token_id: int | None, eos_token_id: int | None) -> dict:
    """Return the content of config.json. ``dtype`` is that of the weights, such as "float32".

    The rotary parameters have the names of transformers 4, which transformers 5 and vLLM read, too.
    """
    values = asdict(shape)
    scaling = values.pop("rope_scaling")
    if not shape.num_experts:
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"):
            del values[name]
    else:
        values |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return {
        "architectures": [ARCHITECTURES[shape.model_type]],
        **values,
        "rope_scaling": None if scaling is None else {"rope_type": "llama3", **scaling},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        **({"mlp_bias": False} if shape.model_type == "llama" else {"use_sliding_window": False}),
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def generation_config_json(bos_token_id: int | None, eos_token_id: int | None) -> dict:
    """Return the content of generation_config.json."""
    ids = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id}
    return {name: value for name, value in ids.items() if value is not None}


def read_shape(folder: Path) -> ModelShape:
    """Read config.json, of transformers 4 or 5, of a dense Llama or Qwen3.

    Args:
        folder: holds config.json.

    Raises:
        ConfigError: config.json is missing or damaged, or describes a model that TorchTitan does not compute alike.
    """
    where = f"MODEL_DIR = {str(folder)!r}"
    try:
        config = read_json(folder / CONFIG_FILE, f"{where}: {CONFIG_FILE}")
    except FileNotFoundError:
        raise ConfigError(f"{where}: {CONFIG_FILE} is missing; give the folder of a Hugging Face model") from None
    return _Reader(where, config).shape()


class _Reader:
    """Reads the values of one config.json. Messages begin with ``where``."""

    def __init__(self, where: str, config: dict):
        self._where = where
        self._config = config

    def shape(self) -> ModelShape:
        kind = self._config.get("model_type")
        if kind not in IMPORTED:
            raise self._error("model_type", kind, f"is not supported; supported are: {', '.join(IMPORTED)}")
        self._require_plain_model()
        heads = self._get("num_attention_heads", int)
        size = self._get("hidden_size", int)
        default_head_dim = size // max(heads, 1) if kind == "llama" else 128
        theta, scaling = self._rope()
        return ModelShape(
            model_type=kind,
            hidden_size=size,
            num_hidden_layers=self._get("num_hidden_layers", int),
            num_attention_heads=heads,
            num_key_value_heads=self._get("num_key_value_heads", int, heads),
            head_dim=self._get("head_dim", int, default_head_dim),
            intermediate_size=self._get("intermediate_size", int),
            vocab_size=self._get("vocab_size", int),
            rms_norm_eps=self._get("rms_norm_eps", float, 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=self._get("tie_word_embeddings", bool, False),
            max_position_embeddings=self._positions(),
        )

    def _positions(self) -> int | None:
        is_given = self._config.get("max_position_embeddings") is not None
        return self._get("max_position_embeddings", int) if is_given else None

    def _require_plain_model(self) -> None:
        """Refuse parts that TorchTitan's models do not have."""
        plain = {
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "use_sliding_window": (False,),
            "quantization_config": (),
        }
        for name, allowed in plain.items():
            value = self._config.get(name)
            if value is not None and value not in allowed:
                if isinstance(value, dict) and "quant_method" in value:  # one line cannot hold all of it
                    name, value = f"{name}.quant_method", value["quant_method"]
                only = f"supported is {allowed[0]!r}" if allowed else "supported are unquantized weights"
                raise self._error(name, value, f"is not supported; {only}")

    def _rope(self) -> tuple[float, RopeScaling | None]:
        parameters = self._config.get("rope_parameters") or {}
        scaling = parameters or self._config.get("rope_scaling") or {}
        if not (isinstance(parameters, dict) and isinstance(scaling, dict)):
            raise self._error("rope_parameters", scaling, "is not an object")
        theta = self._number("rope_theta", parameters.get("rope_theta", self._config.get("rope_theta", 10000.0)), float)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind != "llama3":
            raise self._error("rope_type", kind, "is not supported; supported are: default, llama3")
        types = {field.name: field.type for field in fields(RopeScaling)}
        values = {name: self._number(name, scaling.get(name), kind) for name, kind in types.items()}
        return theta, None if values["factor"] == 1 else RopeScaling(**values)

    def _get(self, name: str, kind: type, default=None):
        value = self._config.get(name)
        return self._number(name, default if value is None else value, kind)

    def _number(self, name: str, value, kind: type):
        allowed = (int, float) if kind is float else (kind,)
        if type(value) not in allowed or (kind is int and value < 1):
            expected = {int: "a positive integer", float: "a number", bool: "true or false"}[kind]
            raise self._error(name, value, f"is not {expected}")
        return kind(value)

    def _error(self, name: str, value, problem: str) -> ConfigError:
        return ConfigError(f"{self._where}: {name} = {value!r} in {CONFIG_FILE} {problem}")
