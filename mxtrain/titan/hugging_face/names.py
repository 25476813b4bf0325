"""TorchTitan's models under their Hugging Face names: which are supported, their shape, names and order of rows."""

import re
from dataclasses import replace

import torch
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain.errors import ConfigError
from mxtrain.hugging_face.formats import RowOrder
from mxtrain.hugging_face.model_config import ModelShape, RopeScaling
from mxtrain.titan.models.llama3 import hidden_dim, is_tied

MODELS = {"llama3": "llama", "qwen3": "qwen3"}
"""Supported models of TorchTitan -> ``model_type`` of their dense flavors in Hugging Face"""


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


def require_supported(model: str, argument: str) -> None:
    """Raise ConfigError unless weights of TorchTitan's ``model`` have a Hugging Face form here."""
    if model not in MODELS:
        raise ConfigError(
            f"{argument}: model.name = {model!r} has no Hugging Face form here; supported are: {', '.join(MODELS)}"
        )


def shape_of(model: str, args, max_seq_len: int | None = None) -> ModelShape:
    """Return the shape of one of ``MODELS`` with TorchTitan's model arguments ``args``, and this many positions."""
    shape = _llama_shape(args) if model == "llama3" else _qwen_shape(args)
    return ModelShape(
        hidden_size=args.dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads or args.n_heads,
        vocab_size=args.vocab_size,
        rms_norm_eps=float(args.norm_eps),
        rope_theta=float(args.rope_theta),
        max_position_embeddings=max_seq_len,
        **shape,
    )


def _llama_shape(args) -> dict:
    rope = args.rope_scaling_args
    scaling = RopeScaling(
        factor=float(rope.scaling_factor),
        low_freq_factor=float(rope.low_freq_factor),
        high_freq_factor=float(rope.high_freq_factor),
        original_max_position_embeddings=rope.original_max_position_embeddings,
    )
    return {
        "model_type": "llama",
        "head_dim": args.dim // args.n_heads,
        "intermediate_size": hidden_dim(args),
        "tie_word_embeddings": is_tied(args),
        "rope_scaling": None if scaling.factor == 1 else scaling,
    }


def _qwen_shape(args) -> dict:
    shape = {
        "model_type": "qwen3",
        "head_dim": args.head_dim,
        "intermediate_size": args.hidden_dim,
        "tie_word_embeddings": args.enable_weight_tying,
    }
    if args.moe_enabled:
        experts = args.moe_args
        shape |= {
            "model_type": "qwen3_moe",
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.top_k,
            "moe_intermediate_size": args.moe_inter_dim,
            "norm_topk_prob": experts.route_norm,
        }
    return shape


def settings_of(field: str, shape: ModelShape) -> dict[str, object]:
    """Return the settings of [model_args] that give a model this field of ``shape``, other than its experts."""
    if field == "rope_scaling":
        scaling = shape.rope_scaling
        if scaling is None:
            return {"rope_factor": 1.0}
        return {
            "rope_factor": scaling.factor,
            "rope_low_freq_factor": scaling.low_freq_factor,
            "rope_high_freq_factor": scaling.high_freq_factor,
            "rope_original_seq_len": scaling.original_max_position_embeddings,
        }
    return {SETTINGS[field]: getattr(shape, field)} if field in SETTINGS else {}


def require_exact(model: str, args, argument: str) -> None:
    """Raise ConfigError if transformers has no model that computes what TorchTitan computes with ``args``."""
    wrong = ""
    if model == "qwen3" and not args.qk_norm:
        wrong = "qk_norm = False"
    elif model == "qwen3" and args.moe_enabled:
        plain = {"num_shared_experts": 0, "score_func": "softmax", "route_scale": 1.0, "score_before_experts": False}
        plain |= {"gate_bias": False, "num_expert_groups": None}
        wrong = ", ".join(
            f"{name} = {getattr(args.moe_args, name)!r}"
            for name, value in plain.items()
            if getattr(args.moe_args, name) != value
        )
    if wrong:
        raise ConfigError(f"{argument}: a {model} with {wrong} has no counterpart in transformers")


class Names:
    """The names of one model's parameters in Hugging Face, by TorchTitan's own adapter.

    Args:
        model: one of ``MODELS``.
        args: TorchTitan's model arguments.
    """

    def __init__(self, model: str, args):
        adapter = get_train_spec(model).state_dict_adapter
        self._is_tied = is_tied(args)
        # The adapter wants both tied weights at once, and here it gets one parameter at a time.
        self._adapter = adapter(replace(args, enable_weight_tying=False) if self._is_tied else args, None)
        self._orders: dict[tuple, torch.Tensor | None] = {}

    def to_hf(self, fqn: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parameter as tensors of Hugging Face: one, one for each expert, or none.

        Hugging Face has neither the second of two tied weights nor the bias of experts.
        """
        if fqn.endswith(".expert_bias") or (self._is_tied and fqn == "output.weight"):
            return {}
        return self._adapter.to_hf({fqn: weight})

    def from_hf(self, hf_name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return a dense model's tensor of Hugging Face as TorchTitan's parameter."""
        (parameter,) = self._adapter.from_hf({hf_name: weight}).values()
        return parameter

    def row_order(self, fqn: str, weight: torch.Tensor) -> RowOrder:
        """Return the function that puts rows like those of ``weight`` into Hugging Face's order."""
        kind = (re.sub(r"\d+", "{}", fqn), *weight.shape)
        if kind not in self._orders:
            self._orders[kind] = self._find_order(fqn, weight.shape)
        order = self._orders[kind]
        return (lambda rows: rows) if order is None else (lambda rows: rows[order])

    def _find_order(self, fqn: str, shape: torch.Size) -> torch.Tensor | None:
        """Let the adapter permute the numbers of the rows. Return None if they stay in order, or are no matrix."""
        if len(shape) != 2:
            return None
        numbers = torch.arange(shape[0], dtype=torch.int32)
        (permuted,) = self.to_hf(fqn, numbers[:, None].expand(*shape)).values()
        order = permuted[:, 0].long()
        return None if torch.equal(order, numbers.long()) else order
