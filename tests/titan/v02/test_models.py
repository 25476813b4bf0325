"""Llama 3 with additions, model arguments, models by their sizes."""

from functools import reduce
from operator import attrgetter

import pytest
import torch
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import FeedForward, Transformer
from torchtitan.protocols.train_spec import get_train_spec

import mxtrain.titan  # noqa: F401  registers the flavors
from mxtrain.errors import ConfigError
from mxtrain.settings.model_settings import PLACES
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.v02.engine import build_on_meta
from mxtrain.titan.v02.models import Llama3, Llama3Adapter, Llama3Args, sizes_of
from tests.support.jobs import with_setting

SMALL = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=96, max_seq_len=32)


def model(**changes):
    module = Llama3(Llama3Args(**SMALL, **changes))
    with torch.no_grad():
        module.init_weights()
    return module


@pytest.mark.parametrize("dim", [64, 100, 576, 2048, 3072, 4096, 8191, 16384])
def test_any_hidden_size_is_exact(dim):
    args = Llama3Args(dim=dim)
    for size in (1, 2, 3, 31, 32, 1536, 8192, 8193, 11008, 14336, 28672, 53248, 8 * dim + 7):
        args.hidden_dim = size
        with torch.device("meta"):
            built = FeedForward(dim, 4 * dim, args.multiple_of, args.ffn_dim_multiplier)
        assert built.w2.in_features == size == args.hidden_dim


def test_the_hidden_size_of_titans_own_arguments():
    assert Llama3Args(dim=4096, ffn_dim_multiplier=1.3, multiple_of=1024).hidden_dim == 14336


def test_without_tying_it_is_titans_model():
    torch.manual_seed(0)
    ours = model()
    torch.manual_seed(0)
    theirs = Transformer(TransformerModelArgs(**SMALL))
    with torch.no_grad():
        theirs.init_weights()
    assert ours.output.weight is not ours.tok_embeddings.weight
    assert all(torch.equal(ours.state_dict()[name], weight) for name, weight in theirs.state_dict().items())


def test_a_tied_head_is_the_embedding():
    tied = model(enable_weight_tying=True)
    assert tied.output.weight is tied.tok_embeddings.weight
    # Drawn as a head: TorchTitan's embedding has a standard deviation of 1, and its head 1 / sqrt(dim).
    assert tied.output.weight.std().item() == pytest.approx(64**-0.5, rel=0.1)
    assert {"output.weight", "tok_embeddings.weight"} <= tied.state_dict().keys()


def test_memory_that_is_given_later_is_shared_too():
    with torch.device("meta"):
        tied = Llama3(Llama3Args(**SMALL, enable_weight_tying=True))
    tied.to_empty(device="cpu")
    with torch.no_grad():
        tied.init_weights(buffer_device=torch.device("cpu"))
    assert tied.output.weight is tied.tok_embeddings.weight and not tied.output.weight.is_meta


def test_the_shared_weight_gets_both_gradients():
    tied, tokens = model(enable_weight_tying=True), torch.arange(16)[None]
    separate = model()
    separate.load_state_dict(tied.state_dict())
    for module in (tied, separate):
        torch.nn.functional.cross_entropy(module(tokens)[0], tokens[0].flip(0)).backward()
    expected = separate.output.weight.grad + separate.tok_embeddings.weight.grad
    assert separate.tok_embeddings.weight.grad.any() and separate.output.weight.grad.any()
    torch.testing.assert_close(tied.output.weight.grad, expected)


def test_hugging_face_has_one_name_for_the_shared_weight():
    tied = model(enable_weight_tying=True)
    adapter = Llama3Adapter(tied.model_args, None)
    theirs = adapter.to_hf(tied.state_dict())
    assert "model.embed_tokens.weight" in theirs and "lm_head.weight" not in theirs
    back = adapter.from_hf(theirs)
    assert all(torch.equal(back[name], weight) for name, weight in tied.state_dict().items())
    assert "lm_head.weight" in Llama3Adapter(Llama3Args(**SMALL), None).to_hf(model().state_dict())


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
    assert {name: attrgetter(PLACES[model][name])(module.model_args) for name in given} == given
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


NONE = "--model.converters="


def test_more_experts_than_there_are():
    with pytest.raises(ConfigError, match="^model_args.top_k = 9 does not fit: top_k = 9 is more than num_experts = 8"):
        parse_job_config([*FAMILY["llama4"], NONE, "--model_args.top_k=9"])


def build(*flags):
    job_config = parse_job_config(list(flags))
    spec = get_train_spec(job_config.model.name)
    args = spec.model_args[job_config.model.flavor]
    args.update_from_config(job_config)
    with torch.device("meta"):
        return spec.model_cls(args), args, job_config


@pytest.mark.parametrize(
    ("flavor", "dim", "layers", "parameters"),
    [("125M", 768, 12, 135e6), ("1B", 2048, 16, 1.498e9), ("8B", 4096, 32, 8.03e9)],
)
def test_llama3_flavors(flavor, dim, layers, parameters):
    model, args, _ = build(f"--model.flavor={flavor}")
    assert (args.dim, args.n_layers) == (dim, layers)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)


PUBLISHED = {
    # meta-llama's model cards and safetensors indices on Hugging Face
    ("llama3", "3.2-1B"): 1_235_814_400,
    ("llama3", "3.2-3B"): 3_212_749_824,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "405B"): 405_853_388_800,
    # Qwen's; those up to 4B share one weight between embedding and head
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "30B-A3B"): 30_532_122_624,
}
"""Parameters of the published models"""


@pytest.mark.parametrize("name, flavor", PUBLISHED)
def test_flavors_have_the_parameters_of_the_published_models(name, flavor):
    model, args, _ = build(f"--model.name={name}", f"--model.flavor={flavor}")
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name, flavor]
    parameters, flops = args.get_nparams_and_flops(model, seq_len=0)
    assert parameters == PUBLISHED[name, flavor]
    if name == "llama3":  # without experts, every weight multiplies but an embedding of its own
        idle = 0 if args.enable_weight_tying else model.tok_embeddings.weight.numel()
        assert flops == 6 * (parameters - idle)


def test_a_separate_head_makes_a_tied_model_larger():
    model, *_ = build("--model.name=qwen3", "--model.flavor=0.6B", "--model_args.no_enable_weight_tying")
    assert sum(p.numel() for p in model.parameters()) == 751_632_384


@pytest.mark.parametrize(
    ("name", "flavor"),
    [
        ("deepseek_v3", "debugmodel"),
        ("llama4", "debugmodel"),
        ("qwen3", "debugmodel_moe"),
        ("qwen3", "debugmodel_moe_16"),
    ],
)
def test_experts_run_one_by_one_where_there_is_no_grouped_product(name, flavor, monkeypatch, caplog):
    models = [f"torchtitan.models.{model}.model.args" for model in ("deepseek_v3", "llama4")]
    for capability in ((8, 0), (9, 0)):
        for module in ("mxtrain.titan.v02.models", *models):
            monkeypatch.setattr(f"{module}.has_cuda_capability", lambda *needed, has=capability: has >= needed)
        model, args, _ = build(f"--model.name={name}", f"--model.flavor={flavor}")
        experts = [layer.moe.experts for layer in model.layers.values() if layer.moe_enabled]
        assert experts and {e.use_grouped_mm for e in experts} == {args.moe_args.use_grouped_mm} == {
            capability >= (9, 0)
        }
    assert "grouped mm" not in caplog.text  # TorchTitan's warning of a failure


@pytest.mark.parametrize("name", ["llama3", "llama4", "qwen3", "deepseek_v3"])
def test_the_configured_vocabulary_is_the_models(name):
    model, _, job_config = build(f"--model.name={name}", "--data.vocab_size=4096")
    assert sizes_of(job_config)["vocab_size"] == 4096
    assert model.tok_embeddings.num_embeddings == model.output.out_features == 4096


def test_without_one_the_flavors_stays():
    model, _, job_config = build("--model.flavor=debugmodel")
    assert sizes_of(job_config)["vocab_size"] == model.tok_embeddings.num_embeddings == 2048


def test_unknown_flavor():
    job_config = with_setting(parse_job_config([]), "model.flavor", "0B")
    with pytest.raises(ConfigError, match="model.flavor = '0B' is not one of"):
        sizes_of(job_config)
