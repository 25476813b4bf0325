from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mxtrain.errors import ConfigError
from mxtrain.hugging_face.model_config import ModelShape, require_computed_alike, shape_of
from mxtrain.titan.hugging_face.models import parameters
from mxtrain.titan.releases import engine
from tests.support.saved_runs import sized

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
    rope_scaling={
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    },
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


@pytest.mark.parametrize(
    "model, flavor, shape",
    [("llama3", "8B", LLAMA31), ("llama3", "70B", replace(LLAMA31, **LARGE)), ("qwen3", "0.6B", QWEN3)],
)
def test_flavors_have_the_shapes_of_the_published_models(model, flavor, shape):
    assert shape_of(engine().SizedModel.of_flavor(model, flavor), 2048) == shape


def test_shapes_of_experts_and_of_plain_rotation():
    shape = shape_of(sized("qwen3", "small_experts"), 64)
    assert (shape.model_type, shape.max_position_embeddings) == ("qwen3_moe", 64)
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    assert shape.own == sizes
    scaled, plain = sized("llama3", "small"), sized("llama3", "small", rope_factor=1.0)
    assert shape_of(scaled, 64).rope_scaling and shape_of(plain, 64).rope_scaling is None


@pytest.mark.parametrize("name, permuted", [("llama3", {"wq", "wk"}), ("qwen3", set())])
def test_names_and_orders_of_rows_are_those_of_titans_adapter(name, permuted):
    model = sized(name, "small")
    adapter, places = model.adapter(), parameters(model)
    moved = set()
    for (fqn, place), titans in zip(places.items(), model.on_meta().state_dict(), strict=True):
        weight = torch.randn(place.shape)
        ((name, expected),) = adapter.to_hf({titans: weight}).items()
        assert place.names == (name,)
        assert torch.equal(weight if place.order is None else weight[place.order], expected)
        if not torch.equal(weight, expected):
            moved.add(fqn.split(".")[-2])
    assert moved == permuted


def test_stacked_experts_become_one_tensor_each():
    places = parameters(sized("qwen3", "small_experts"))
    place = places["layers.1.moe.experts.w3"]
    assert place.names == tuple(f"model.layers.1.mlp.experts.{i}.up_proj.weight" for i in range(4))
    assert place.shape == (4, 32, 64) and place.order is None


def test_one_of_two_tied_weights_is_left_out():
    places = parameters(sized("qwen3", "small_tied"))
    assert places["output.weight"].names == ()
    assert places["tok_embeddings.weight"].names == ("model.embed_tokens.weight",)


def test_other_models_are_refused():
    with pytest.raises(ConfigError, match="^RUN = 'a': .*'gpt_oss'.* llama3, qwen3, deepseek_v3$"):
        require_computed_alike(SimpleNamespace(name="gpt_oss"), "RUN = 'a'")
