"""A model's shape, and the config.json that describes it to Hugging Face's transformers."""

import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mxtrain.errors import ConfigError
from mxtrain.json_toml import read_json

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # in both files; eos may be a list
REPORT_FILE = "mxtrain.json"
"""In the folder of an export: which run and checkpoint it holds, and its losses"""

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
"""``model_type`` -> name of the class in transformers"""
IMPORTED = ("llama", "qwen3")
"""The types of model that ``read_shape`` reads"""
PLAIN = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "is_causal": (True,),
    "quantization_config": (),
}
"""Fields of config.json that may be missing -> the values of TorchTitan's models"""
KINDS = {int: "a positive integer below 2^63", float: "a positive number", bool: "true or false"}
ORIGINAL = "original_max_position_embeddings"


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


def config_json(shape: ModelShape, dtype: str, generation: dict) -> dict:
    """Return the content of config.json beside ``generation``, the content of generation_config.json.

    ``dtype`` is that of the weights, such as "float32". The rotary parameters have the names of transformers 4, which
    transformers 5 and vLLM read, too.
    """
    values = asdict(shape)
    scaling = values.pop("rope_scaling")
    if scaling is not None:
        # transformers warns unless this number is below the positions. Frequencies depend on the ratios of three
        # numbers, so halving all of them changes no bit.
        original = before = scaling[ORIGINAL]
        while original >= (shape.max_position_embeddings or sys.maxsize) and original > 1:
            original //= 2
        factors = {name: scaling[name] * original / before for name in ("low_freq_factor", "high_freq_factor")}
        scaling = {"rope_type": "llama3", **scaling, **factors, ORIGINAL: original}
    if not shape.num_experts:
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"):
            del values[name]
    else:
        values |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return {
        "architectures": [ARCHITECTURES[shape.model_type]],
        **values,
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        **({"mlp_bias": False} if shape.model_type == "llama" else {"use_sliding_window": False}),
        **{name: generation.get(name) for name in SPECIAL_IDS},
        "use_cache": True,
        "torch_dtype": dtype,
    }


def read_generation(folder: Path) -> dict:
    """Return the content of generation_config.json, and where it has none, config.json's ids of special tokens."""
    config, own = (_read(folder, name) if (folder / name).is_file() else {} for name in (CONFIG_FILE, GENERATION_FILE))
    return {name: config[name] for name in SPECIAL_IDS if config.get(name) is not None} | own


def read_shape(folder: Path) -> ModelShape:
    """Read config.json, of transformers 4 or 5, of a dense Llama or Qwen3.

    Args:
        folder: holds config.json.

    Raises:
        ConfigError: config.json is missing or damaged, or describes a model that TorchTitan does not compute alike.
    """
    config = _Values(folder, _read(folder, CONFIG_FILE))
    kind = config.get("model_type")
    if kind not in IMPORTED:
        raise config.error("model_type", kind, f"is not supported; supported are: {', '.join(IMPORTED)}")
    for name, allowed in PLAIN.items():
        value = config.get(name)
        if value is not None and value not in allowed:
            if isinstance(value, dict) and "quant_method" in value:  # one line cannot hold all of it
                name, value = f"{name}.quant_method", value["quant_method"]
            only = f"supported is {allowed[0]!r}" if allowed else "supported are unquantized weights"
            raise config.error(name, value, f"is not supported; {only}")
    heads, size = config.number("num_attention_heads", int), config.number("hidden_size", int)
    theta, scaling = _rope(config)
    return ModelShape(
        model_type=kind,
        hidden_size=size,
        num_hidden_layers=config.number("num_hidden_layers", int),
        num_attention_heads=heads,
        num_key_value_heads=config.number("num_key_value_heads", int, heads),
        head_dim=config.number("head_dim", int, size // heads if kind == "llama" else 128),
        intermediate_size=config.number("intermediate_size", int),
        vocab_size=config.number("vocab_size", int),
        rms_norm_eps=config.number("rms_norm_eps", float, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=config.number("tie_word_embeddings", bool, False),
        max_position_embeddings=_positions(config),
    )


class _Values(dict):
    """The values of one config.json."""

    def __init__(self, folder: Path, values: dict):
        super().__init__(values)
        self._folder = folder

    def number(self, name: str, kind: type, default=None):
        """Return a value of this kind; ``default`` where it is missing or null. Raises ConfigError."""
        value = default if self.get(name) is None else self[name]
        allowed = (int, float) if kind is float else (kind,)
        largest = sys.float_info.max if kind is float else sys.maxsize  # of integers, too; NaN is not below it
        if type(value) not in allowed or not (kind is bool or 0 < value <= largest):
            raise self.error(name, value, f"is not {KINDS[kind]}")
        return kind(value)

    def error(self, name: str, value, problem: str) -> ConfigError:
        return ConfigError(f"MODEL_DIR = {str(self._folder)!r}: {name} = {value!r} in {CONFIG_FILE} {problem}")

    def with_values(self, values: dict) -> "_Values":
        return _Values(self._folder, self | values)


def _positions(config: _Values) -> int | None:
    name = "max_position_embeddings"
    return None if config.get(name) is None else config.number(name, int)


def _rope(config: _Values) -> tuple[float, RopeScaling | None]:
    """Resolve the rotary parameters as transformers 5 does: it reads no rope_parameters beside a rope_scaling."""
    rope, rope_type = {}, "default"
    for name in ("rope_parameters", "rope_scaling"):
        given = config.get(name) or {}
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            raise config.error(name, given, "is not an object of numbers")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise config.error("rope_type", kind, "is not supported; supported are: default, llama3")
        rope, rope_type = (given, kind) if given else (rope, rope_type)
    theta = config.with_values(rope).number("rope_theta", float, 10000.0)
    if rope_type == "default":
        return theta, None
    # A number outside of the object wins; without any it is that of the positions, which is 2,048 by default.
    original = config.get(ORIGINAL, rope.get(ORIGINAL, _positions(config) or 2048))
    rope = config.with_values(
        {field.name: rope.get(field.name) for field in fields(RopeScaling)} | {ORIGINAL: original}
    )
    values = {field.name: rope.number(field.name, field.type) for field in fields(RopeScaling)}
    return theta, None if values["factor"] == 1 else RopeScaling(**values)


def _read(folder: Path, name: str) -> dict:
    where = f"MODEL_DIR = {str(folder)!r}"
    try:
        return read_json(folder / name, f"{where}: {name}")
    except FileNotFoundError:
        raise ConfigError(f"{where}: {name} is missing; give the folder of a Hugging Face model") from None
