"""TorchTitan 0.3's configs of the models of 0.2.2: their layers, sizes and distributions of initial weights.

A flavor stands for sizes, under the names of ``[model_args]``, which may change them. Queries, keys and values are
three linears, as in 0.2.2: an MXNorm multiplies them as one, and checkpoints of both releases hold the same tensors.
"""

from collections.abc import Callable
from functools import partial

import torch.nn as nn
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, make_mla_attention_config, parallelize_deepseekv3
from torchtitan.models.deepseek_v3.model import DeepSeekV3TransformerBlock
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from mxtrain.errors import require_one_of
from mxtrain.settings.model_settings import OWN_FLAVORS, given_in

DEFAULTS = {
    "llama3": dict(
        norm_eps=1e-5, rope_theta=500000.0, n_kv_heads=None, enable_weight_tying=False, vocab_size=128256,
        rope_factor=8.0, rope_low_freq_factor=1.0, rope_high_freq_factor=4.0, rope_original_seq_len=8192,
    ),
    "qwen3": dict(
        norm_eps=1e-6, rope_theta=1000000.0, n_heads=16, n_kv_heads=8, head_dim=128, enable_weight_tying=False,
        vocab_size=151936, load_balance_coeff=1e-3, score_func="softmax", route_norm=True,
    ),
    "deepseek_v3": dict(
        norm_eps=1e-5, rope_theta=10000.0, rope_factor=40.0, rope_original_seq_len=4096, n_dense_layers=1,
        q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, mscale=0.7,
        num_shared_experts=2, load_balance_coeff=1e-3, vocab_size=102400, score_func="softmax", route_norm=False,
        route_scale=1.0, groups=None, limited_groups=None,
    ),
}  # fmt: skip
# An export of a model with experts in all layers has its hidden_dim, which no layer has.
_EXPERTS = dict(moe_inter_dim=768, num_experts=128, top_k=8)
FLAVORS = {
    "llama3": {
        "debugmodel": dict(dim=256, n_layers=6, n_heads=16, hidden_dim=768, vocab_size=2048),
        **OWN_FLAVORS["llama3"],
        "8B": dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, hidden_dim=14336),
        "70B": dict(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=28672),
        "405B": dict(dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, hidden_dim=53248),
    },
    "qwen3": {
        "debugmodel": dict(dim=256, n_layers=8, hidden_dim=3072, enable_weight_tying=True, vocab_size=2048),
        "debugmodel_moe": dict(
            dim=256, n_layers=8, hidden_dim=3072, **{**_EXPERTS, "num_experts": 64}, vocab_size=2048
        ),
        **OWN_FLAVORS["qwen3"],
        "0.6B": dict(dim=1024, n_layers=28, hidden_dim=3072, enable_weight_tying=True),
        "1.7B": dict(dim=2048, n_layers=28, hidden_dim=6144, enable_weight_tying=True),
        "4B": dict(dim=2560, n_layers=36, n_heads=32, hidden_dim=9728, enable_weight_tying=True),
        "8B": dict(dim=4096, n_layers=36, n_heads=32, hidden_dim=12288),
        "14B": dict(dim=5120, n_layers=40, n_heads=40, hidden_dim=17408),
        "32B": dict(dim=5120, n_layers=64, n_heads=64, hidden_dim=25600),
        "30B-A3B": dict(dim=2048, n_layers=48, n_heads=32, n_kv_heads=4, hidden_dim=6144, **_EXPERTS),
        "235B-A22B": dict(
            dim=4096, n_layers=94, n_heads=64, n_kv_heads=4, hidden_dim=12288, rope_theta=5000000.0,
            **{**_EXPERTS, "moe_inter_dim": 1536},
        ),
    },
    "deepseek_v3": {
        "debugmodel": dict(
            dim=256, n_layers=6, n_heads=16, hidden_dim=1024, moe_inter_dim=256, num_experts=8, top_k=3, vocab_size=2048
        ),
        "16B": dict(dim=2048, n_layers=27, n_heads=16, hidden_dim=10944, moe_inter_dim=1408, num_experts=64, top_k=6),
        "236B": dict(
            dim=5120, n_layers=60, n_heads=128, hidden_dim=12288, moe_inter_dim=1536, num_experts=160, top_k=6,
            q_lora_rank=1536, mscale=1.0, route_scale=16.0, groups=8, limited_groups=3,
        ),
        "671B": dict(
            dim=7168, n_layers=61, n_heads=128, hidden_dim=18432, moe_inter_dim=2048, num_experts=256, top_k=8,
            q_lora_rank=1536, mscale=1.0, n_dense_layers=3, num_shared_experts=1, vocab_size=129280,
            score_func="sigmoid", route_norm=True, route_scale=2.5, groups=8, limited_groups=4,
        ),
    },
}  # fmt: skip
"""Name of a model -> flavor -> sizes in which it differs from ``DEFAULTS``"""

_NORM = {"weight": nn.init.ones_}


def _drawn(std: float) -> dict[str, Callable]:
    return {"weight": partial(nn.init.trunc_normal_, std=std)}


def _std(layer: int) -> float:
    """Of weights whose products a layer adds to the residual stream, and of those beside them."""
    return 0.02 / (2 * (layer + 1)) ** 0.5


def _norm(size: int, eps: float | None) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=eps, param_init=_NORM)


def _feed_forward(dim: int, hidden: int, layer: int):
    return make_ffn_config(dim=dim, hidden_dim=hidden, w1_param_init=_drawn(0.02), w2w3_param_init=_drawn(_std(layer)))


def _attention(s: dict, layer: int, rope, head_dim: int | None = None, qk_norm=None):
    return make_gqa_config(
        dim=s["dim"],
        n_heads=s["n_heads"],
        n_kv_heads=s["n_kv_heads"],
        head_dim=head_dim,
        wqkv_param_init=_drawn(0.02),
        wo_param_init=_drawn(_std(layer)),
        inner_attention=ScaledDotProductAttention.Config(),
        rope=rope,
        qk_norm=qk_norm,
    )


def _mixture(s: dict, layer: int):
    std, shared = _std(layer), s.get("num_shared_experts")
    draws = {name: _drawn(own)["weight"] for name, own in (("w1_EFD", 0.02), ("w2_EDF", std), ("w3_EFD", std))}
    sizes = {name: s[name] for name in ("dim", "num_experts", "top_k")}
    return make_moe_config(
        num_experts=s["num_experts"],
        router=make_router_config(
            **sizes,
            gate_param_init=_drawn(std),
            score_func=s["score_func"],
            route_norm=s["route_norm"],
            route_scale=s.get("route_scale", 1.0),
            num_expert_groups=s.get("groups"),
            num_limited_groups=s.get("limited_groups"),
        ),
        routed_experts=make_routed_experts_config(
            **sizes, hidden_dim=s["moe_inter_dim"], param_init=draws, comm_backend="standard"
        ),
        shared_experts=_feed_forward(s["dim"], s["moe_inter_dim"] * shared, layer) if shared else None,
        load_balance_coeff=s["load_balance_coeff"] or None,
    )


def _llama3(s: dict) -> Callable:
    rope = ComplexRoPE.Config(
        dim=s["dim"] // s["n_heads"],
        max_seq_len=s["seq_len"],
        theta=s["rope_theta"],
        scaling="llama",
        scaling_factor=s["rope_factor"],
        low_freq_factor=s["rope_low_freq_factor"],
        high_freq_factor=s["rope_high_freq_factor"],
        original_max_position_embeddings=s["rope_original_seq_len"],
    )
    return lambda layer: _attention(s, layer, rope)


def _qwen3(s: dict) -> Callable:
    rope = CosSinRoPE.Config(dim=s["head_dim"], max_seq_len=s["seq_len"], theta=s["rope_theta"])
    return lambda layer: _attention(s, layer, rope, s["head_dim"], _norm(s["head_dim"], s["norm_eps"]))


def _deepseek_v3(s: dict) -> Callable:
    rope = ComplexRoPE.Config(
        dim=s["qk_rope_head_dim"],
        max_seq_len=s["seq_len"],
        theta=s["rope_theta"],
        scaling="yarn" if s["seq_len"] > s["rope_original_seq_len"] else "none",
        rope_factor=s["rope_factor"],
        original_seq_len=s["rope_original_seq_len"],
    )
    names = ("dim", "n_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

    def attention(layer: int):
        config = make_mla_attention_config(
            layer_id=layer,
            **{name: s[name] for name in names},
            mscale=s["mscale"],
            attn_backend="flex",  # replaced below: the function has no name for ours
            linear_init=_drawn(0.02),
            norm_init=_NORM,
            depth_init=lambda layer: _drawn(_std(layer)),
            rope=rope,
        )
        config.inner_attention = ScaledDotProductAttention.Config()
        for norm in (config.q_norm, config.kv_norm):
            norm.eps = s["norm_eps"]
        return config

    return attention


MODELS = {
    "llama3": (_llama3, Llama3Model, Llama3TransformerBlock, parallelize_llama, Llama3StateDictAdapter),
    "qwen3": (_qwen3, Qwen3Model, Qwen3TransformerBlock, parallelize_qwen3, Qwen3StateDictAdapter),
    "deepseek_v3": (
        *(_deepseek_v3, DeepSeekV3Model, DeepSeekV3TransformerBlock, parallelize_deepseekv3),
        DeepSeekV3StateDictAdapter,
    ),
}
"""Its attentions, classes of model and layer, parallelize function, and adapter to the names of Hugging Face"""


def config_of(name: str, s: dict):
    attentions, model, block, *_ = MODELS[name]
    dim, vocabulary, std, attention = s["dim"], s["vocab_size"], s["dim"] ** -0.5, attentions(s)
    dense_layers = s.get("n_dense_layers", 0) if "num_experts" in s else s["n_layers"]
    layers = [
        block.Config(
            attention=attention(layer),
            attention_norm=_norm(dim, s["norm_eps"]),
            ffn_norm=_norm(dim, s["norm_eps"]),
            feed_forward=_feed_forward(dim, s["hidden_dim"], layer) if layer < dense_layers else None,
            moe=None if layer < dense_layers else _mixture(s, layer),
        )
        for layer in range(s["n_layers"])
    ]
    head = {"weight": partial(nn.init.trunc_normal_, std=std, a=-3 * std, b=3 * std)}
    return model.Config(
        dim=dim,
        vocab_size=vocabulary,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=dim, param_init={"weight": nn.init.normal_}
        ),
        norm=_norm(dim, None if name == "deepseek_v3" else s["norm_eps"]),  # as in 0.2.2, which gives PyTorch none
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=head),
        layers=layers,
        enable_weight_tying=s.get("enable_weight_tying", False),
    )


def sizes_of(job) -> dict[str, object]:
    """The sizes of a job's model, by their names in ``[model_args]``; also those that only flavors have."""
    name, given = job.model.name, given_in(job)
    require_one_of("model.flavor", job.model.flavor, FLAVORS[name])
    if job.data.vocab_size > 0:
        given["vocab_size"] = job.data.vocab_size
    return {**DEFAULTS[name], **FLAVORS[name][job.model.flavor], **given, "seq_len": job.training.seq_len}


def model_spec(job) -> ModelSpec:
    *_, parallelize, adapter = MODELS[job.model.name]
    return ModelSpec(
        name=job.model.name,
        flavor=job.model.flavor,
        model=config_of(job.model.name, sizes_of(job)),
        parallelize_fn=parallelize,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None if job.model.name == "llama3" else register_moe_load_balancing_hook,
        state_dict_adapter=adapter,
    )
