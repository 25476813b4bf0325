from dataclasses import replace

import pytest
import torch
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain.errors import ConfigError
from mxtrain.hugging_face.model_config import ModelShape, RopeScaling
from mxtrain.titan.hugging_face.models import meta_model, parameters, require_exportable, shape_of
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
    tie_word_embeddings=False,
    max_position_embeddings=2048,
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
    rope_scaling=None,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
)
"""config.json of Qwen/Qwen3-0.6B"""


@pytest.fixture(autouse=True)
def flavors(monkeypatch):
    saved_runs.add_flavors(monkeypatch)


def args_of(model, flavor):
    return get_train_spec(model).model_args[flavor]


@pytest.mark.parametrize(
    "model, flavor, shape",
    [("llama3", "8B", LLAMA31), ("llama3", "70B", replace(LLAMA31, **LARGE)), ("qwen3", "0.6B", QWEN3)],
)
def test_flavors_have_the_shapes_of_the_published_models(model, flavor, shape):
    assert shape_of(model, args_of(model, flavor), 2048) == shape


def test_shapes_of_experts_and_of_plain_rotation():
    shape = shape_of("qwen3", args_of("qwen3", "small_experts"), 64)
    assert (shape.model_type, shape.num_experts, shape.num_experts_per_tok) == ("qwen3_moe", 4, 2)
    assert (shape.moe_intermediate_size, shape.norm_topk_prob, shape.max_position_embeddings) == (32, True, 64)
    args = args_of("llama3", "small")
    plain = replace(args, rope_scaling_args=replace(args.rope_scaling_args, scaling_factor=1.0))
    assert shape_of("llama3", args, 64).rope_scaling and shape_of("llama3", plain, 64).rope_scaling is None


@pytest.mark.parametrize("model, permuted", [("llama3", {"wq", "wk"}), ("qwen3", set())])
def test_names_and_orders_of_rows_are_those_of_titans_adapter(model, permuted):
    args = args_of(model, "small")
    adapter, places = get_train_spec(model).state_dict_adapter(args, None), parameters(model, args)
    assert list(places) == list(meta_model(model, args).state_dict())
    moved = set()
    for fqn, place in places.items():
        weight = torch.randn(place.shape)
        ((name, expected),) = adapter.to_hf({fqn: weight}).items()
        assert place.names == (name,)
        assert torch.equal(weight if place.order is None else weight[place.order], expected)
        if not torch.equal(weight, expected):
            moved.add(fqn.split(".")[-2])
    assert moved == permuted


def test_stacked_experts_become_one_tensor_each():
    args = args_of("qwen3", "small_experts")
    places, stacked = parameters("qwen3", args), torch.randn(4, 32, 64)
    place = places["layers.1.moe.experts.w3"]
    assert place.names == tuple(f"model.layers.1.mlp.experts.{i}.up_proj.weight" for i in range(4))
    parts = get_train_spec("qwen3").state_dict_adapter(args, None).to_hf({"layers.1.moe.experts.w3": stacked})
    assert list(parts) == list(place.names) and torch.equal(torch.stack([*parts.values()]), stacked)
    assert places["layers.1.moe.expert_bias"].names == ()


def test_one_of_two_tied_weights_is_left_out():
    places = parameters("qwen3", args_of("qwen3", "small_tied"))
    assert places["output.weight"].names == ()
    assert places["tok_embeddings.weight"].names == ("model.embed_tokens.weight",)


@pytest.mark.parametrize("model", ["llama4", "deepseek_v3", "gpt_oss"])
def test_other_models_are_refused(model):
    with pytest.raises(ConfigError, match=rf"^RUN = 'a': .*'{model}'.*llama3, qwen3"):
        require_exportable(model, None, "RUN = 'a'")


@pytest.mark.parametrize("name, value", {"num_shared_experts": 1, "score_func": "sigmoid", "gate_bias": True}.items())
def test_experts_that_transformers_lacks_are_refused(name, value):
    args = args_of("qwen3", "small_experts")
    args = replace(args, moe_args=replace(args.moe_args, **{name: value}))
    with pytest.raises(ConfigError, match=f"^RUN = 'a': a qwen3 with {name} = {value!r} has no counterpart"):
        require_exportable("qwen3", args, "RUN = 'a'")
