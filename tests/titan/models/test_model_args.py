"""The settings of [model_args] on models as they are built."""

from dataclasses import replace
from functools import reduce

import pytest
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.protocols import train_spec
from torchtitan.protocols.train_spec import get_train_spec

import mxtrain.titan  # noqa: F401  registers the flavors
from mxtrain.errors import ConfigError
from mxtrain.settings.model_settings import PLACES
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.models.describe import build_on_meta
from mxtrain.titan.models.model_args import value_of
from mxtrain.titan.models.train_specs import with_mxtrain

FAMILY = {name: ["--model.name", name, "--model.flavor", "debugmodel"] for name in PLACES}
GIVEN = {
    "llama3": {"dim": 192, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "hidden_dim": 352, "rope_factor": 32.0,
               "rope_low_freq_factor": 2.0, "rope_high_freq_factor": 3.0, "rope_original_seq_len": 512},
    "llama4": {"dim": 192, "n_layers": 4, "n_heads": 6, "n_kv_heads": 2, "multiple_of": 32, "ffn_dim_multiplier": 1.5,
               "interleave_moe_layer_step": 4, "num_experts": 6, "num_shared_experts": 2, "top_k": 3,
               "rope_factor": 4.0, "rope_low_freq_factor": 2.0, "rope_high_freq_factor": 3.0,
               "rope_original_seq_len": 512},
    "qwen3": {"dim": 192, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "head_dim": 64, "hidden_dim": 352},
    "deepseek_v3": {"dim": 192, "n_layers": 4, "n_heads": 6, "hidden_dim": 352, "moe_inter_dim": 96,
                    "n_dense_layers": 2, "q_lora_rank": 64, "kv_lora_rank": 96, "qk_nope_head_dim": 32,
                    "qk_rope_head_dim": 32, "v_head_dim": 64, "num_experts": 6, "num_shared_experts": 3, "top_k": 2,
                    "rope_factor": 8.0, "rope_original_seq_len": 512},
}  # fmt: skip
COMMON = {"norm_eps": 0.125, "rope_theta": 777.0}
SHAPES = {
    "llama3": {"attention.wq": (192, 192), "attention.wk": (64, 192), "feed_forward.w1": (352, 192)},
    # 8/3 of dim, times 1.5, and for an expert by the 3 + 2 that a token uses; rounded up to 32
    "llama4": {"attention.wk": (64, 192), "feed_forward.w1": (768, 192)},
    "qwen3": {"attention.wq": (384, 192), "attention.wk": (128, 192), "feed_forward.w2": (192, 352)},
    "deepseek_v3": {
        "attention.wq_a": (64, 192), "attention.wkv_a": (96 + 32, 192), "attention.wo": (192, 6 * 64),
        "feed_forward.w1": (352, 192),
    },
}  # fmt: skip


def flags(given):
    return [f"--model_args.{name}={value}" for name, value in given.items()]


@pytest.mark.parametrize("model", PLACES)
def test_settings_reach_the_model(model):
    given = {**COMMON, **GIVEN[model]}
    module = build_on_meta(parse_job_config([*FAMILY[model], "--model.converters=", *flags(given)]))
    assert {name: value_of(model, module.model_args, name) for name in given} == given
    assert module.layers["0"].ffn_norm.eps == 0.125 and len(module.layers) == given["n_layers"]
    for name, shape in SHAPES[model].items():
        assert module.get_submodule(f"layers.0.{name}").weight.shape == shape, name
    experts = [layer for layer in module.layers.values() if getattr(layer, "moe_enabled", False)]
    assert len(experts) == {"llama4": 1, "deepseek_v3": 2}.get(model, 0)
    if experts:
        hidden = {"llama4": 160, "deepseek_v3": 96}[model]
        assert experts[0].moe.experts.w1.shape == (6, hidden, 192)
    # Settings that are not given are the flavor's, which stay as they were.
    flavor = get_train_spec(model).model_args["debugmodel"]
    assert flavor.dim == 256 and flavor.norm_eps != 0.125


def test_experts_of_qwen3():
    given = {"num_experts": 8, "top_k": 3, "moe_inter_dim": 96, "load_balance_coeff": 0.0}
    config = ["--model.name=qwen3", "--model.flavor=debugmodel_moe_16", "--model.converters=", *flags(given)]
    moe = build_on_meta(parse_job_config(config)).layers["0"].moe
    assert moe.experts.w1.shape == (8, 96, 256) and moe.router.top_k == 3 and moe.expert_bias is None


@pytest.mark.parametrize("model", PLACES)
def test_every_place_exists(model):
    args = get_train_spec(model).model_args["debugmodel"]
    for name, place in PLACES[model].items():
        assert not place or reduce(getattr, place.split("."), args) is not args, name


def test_a_flavor_without_scaling_gets_titans_scaling():
    config = ["--model.name=llama4", "--model.flavor=17bx128e", "--model.converters=", "--model_args.rope_factor=3"]
    args = build_on_meta(parse_job_config(config)).model_args
    assert (args.rope_scaling_args.scaling_factor, args.rope_scaling_args.low_freq_factor) == (3.0, 1.0)


MXNORM, NONE = "--model.converters=mxnorm", "--model.converters="


@pytest.mark.parametrize(
    "model, words, message",
    [
        ("llama3", f"{NONE} --model_args.n_heads=3", "n_heads = 3 does not fit: dim = 256 is no multiple of n_heads"),
        ("llama3", f"{NONE} --model_args.dim=250", "dim = 250 does not fit: dim = 250 is no multiple of n_heads = 16"),
        ("llama3", f"{NONE} --model_args.n_kv_heads=3", "n_kv_heads = 3 does not fit: n_heads = 16 is no multiple of"),
        ("llama3", f"{NONE} --model_args.dim=48", "dim = 48 does not fit: a head has dim / n_heads = 3 features, and"),
        ("llama3", f"{NONE} --model_args.rope_low_freq_factor=5", "rope_low_freq_factor = 5.0 does not fit: rope_lo"),
        ("llama4", f"{NONE} --model_args.top_k=9", "top_k = 9 does not fit: top_k = 9 is more than num_experts = 8"),
        ("qwen3", f"{NONE} --model_args.head_dim=63", "head_dim = 63 is odd, and rotation needs an even number"),
        ("qwen3", f"{NONE} --model_args.n_heads=12", "n_heads = 12 does not fit: n_heads = 12 is no multiple of n_kv"),
        ("qwen3", f"{NONE} --model_args.top_k=2", "top_k = 2 has no effect: model.flavor = 'debugmodel' has no expert"),
        ("deepseek_v3", f"{NONE} --model_args.n_layers=1 --model_args.n_dense_layers=2", "n_dense_layers = 2 does not"),
        ("deepseek_v3", f"{NONE} --model_args.qk_rope_head_dim=3", "qk_rope_head_dim = 3 is odd"),
        ("llama3", f"{MXNORM} --model_args.dim=272 --model_args.n_heads=8", "dim = 272 does not fit: a linear would"),
        ("llama3", f"{MXNORM} --model_args.n_kv_heads=1", "n_kv_heads = 1 does not fit: a linear would have 1"),
        ("llama3", f"{MXNORM} --model_args.hidden_dim=400", "hidden_dim = 400 does not fit: a linear would"),
        ("llama3", f"{MXNORM} --mxnorm.recipe=nvfp4 --model_args.hidden_dim=408", "hidden_dim = 408 does not fit"),
        ("deepseek_v3", f"{MXNORM} --model_args.kv_lora_rank=100", "kv_lora_rank = 100 does not fit"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_one_line(model, words, message):
    with pytest.raises(ConfigError) as error:
        parse_job_config([*FAMILY[model], *words.split()])
    assert str(error.value).startswith(f"model_args.{message}") and "\n" not in str(error.value)


@pytest.mark.parametrize("more", ["--mxnorm.recipe=nvfp4", "--model.converters=", "--mxnorm.filter_fqns=layers.0"])
def test_blocks_are_those_of_the_recipe_and_of_layers_that_are_converted(more):
    parse_job_config([*FAMILY["llama3"], MXNORM, "--model_args.hidden_dim=400", more])


def test_experts_of_a_flavor_keep_their_own_size():
    config = ["--model.name=qwen3", "--model.flavor=debugmodel_moe_16", "--model_args.hidden_dim=512"]
    with pytest.raises(ConfigError, match="^model_args.hidden_dim = 512 has no effect: all layers of model.flavor = "):
        parse_job_config(config)


@pytest.mark.parametrize("wrap", [lambda spec: spec, with_mxtrain])
def test_a_model_of_the_users_own_is_named(monkeypatch, wrap):
    own = replace(get_train_spec("llama3"), model_args={"debugmodel": TransformerModelArgs()})
    monkeypatch.setitem(train_spec._extra_train_specs, "llama3", wrap(own))
    with pytest.raises(ConfigError, match="^model_args.dim = 64 has no effect: model.name = 'llama3' is registered by"):
        parse_job_config(["--model.flavor=debugmodel", "--model_args.dim=64"])
