from dataclasses import replace

import pytest
import torch
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain.errors import ConfigError
from mxtrain.hugging_face.model_config import ModelShape, RopeScaling
from mxtrain.titan.hugging_face.names import Names, require_supported, shape_of
from tests.support import saved_runs

LLAMA31 = ModelShape(
    model_type="llama",
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
)
"""config.json of meta-llama/Llama-3.1-8B"""
LARGE = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
QWEN3 = ModelShape(
    model_type="qwen3",
    hidden_size=1024,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151936,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    tie_word_embeddings=True,
)
"""config.json of Qwen/Qwen3-0.6B"""


@pytest.mark.parametrize(
    "model, flavor, shape",
    [("llama3", "8B", LLAMA31), ("llama3", "70B", replace(LLAMA31, **LARGE)), ("qwen3", "0.6B", QWEN3)],
)
def test_flavors_have_the_shapes_of_the_published_models(model, flavor, shape):
    assert shape_of(model, get_train_spec(model).model_args[flavor]) == shape


def test_experts_are_a_model_type_of_their_own():
    shape = shape_of("qwen3", saved_runs.FLAVORS["qwen3"]["small_experts"])
    assert (shape.model_type, shape.num_experts, shape.num_experts_per_tok) == ("qwen3_moe", 4, 2)
    assert (shape.moe_intermediate_size, shape.norm_topk_prob) == (32, True)


def test_a_scaling_factor_of_one_is_no_scaling():
    args = saved_runs.FLAVORS["llama3"]["small"]
    plain = replace(args, rope_scaling_args=replace(args.rope_scaling_args, scaling_factor=1.0))
    assert shape_of("llama3", args).rope_scaling and shape_of("llama3", plain).rope_scaling is None


@pytest.mark.parametrize("model, permuted", [("llama3", {"wq", "wk"}), ("qwen3", set())])
def test_the_order_of_rows_is_that_of_titans_adapter(model, permuted):
    args = saved_runs.FLAVORS[model]["small"]
    names, adapter = Names(model, args), get_train_spec(model).state_dict_adapter(args, None)
    with torch.device("meta"):
        weights = get_train_spec(model).model_cls(args).state_dict()
    moved = set()
    for fqn, shape in {fqn: weight.shape for fqn, weight in weights.items()}.items():
        weight = torch.randn(shape)
        ((name, expected),) = adapter.to_hf({fqn: weight}).items()
        assert list(names.to_hf(fqn, weight)) == [name]
        assert torch.equal(names.row_order(fqn, weight)(weight), expected)
        assert torch.equal(names.from_hf(name, expected), weight), "and back"
        if not torch.equal(weight, expected):
            moved.add(fqn.split(".")[-2])
    assert moved == permuted


def test_one_of_two_tied_weights_is_left_out():
    names = Names("qwen3", saved_runs.FLAVORS["qwen3"]["small_tied"])
    weight = torch.randn(4, 2)
    assert names.to_hf("output.weight", weight) == {}
    assert list(names.to_hf("tok_embeddings.weight", weight)) == ["model.embed_tokens.weight"]


def test_stacked_experts_become_one_tensor_each():
    names = Names("qwen3", saved_runs.FLAVORS["qwen3"]["small_experts"])
    stacked = torch.randn(4, 32, 64)
    parts = names.to_hf("layers.1.moe.experts.w3", stacked)
    assert [*parts] == [f"model.layers.1.mlp.experts.{i}.up_proj.weight" for i in range(4)]
    assert torch.equal(torch.stack([*parts.values()]), stacked)
    assert names.to_hf("layers.1.moe.expert_bias", torch.zeros(4)) == {}


@pytest.mark.parametrize("model", ["llama4", "deepseek_v3", "gpt_oss"])
def test_other_models_are_refused(model):
    with pytest.raises(ConfigError, match="has no Hugging Face form here; supported are: llama3, qwen3"):
        require_supported(model, "RUN = 'a'")
