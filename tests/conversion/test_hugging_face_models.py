"""Models of transformers, tiny and with random weights: what converts, what is refused, and that they train."""

from collections import Counter

import pytest
import torch
import transformers

import mxtrain
from mxtrain import ConfigError
from mxtrain.nn.mx_linear import MXLinear
from mxtrain.nn.mxnorm import MXNorm, MXNormLinear

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
OWN = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64},
    "Qwen3Next": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64},
        **{"layer_types": ["linear_attention", "full_attention"], "moe_intermediate_size": 64},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    },
    "Qwen3_5": {
        **{"layer_types": ["linear_attention", "full_attention"]},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    },
    "Mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 16},
    "NemotronH": {
        **{"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2},
        **{"ssm_state_size": 16, "chunk_size": 16},
    },
}

# Per layer: norms swapped, linears that a norm feeds, other linears (wo and w2).
DENSE = (2, 5, 2)
CONVERTED = {
    "Llama": DENSE,
    "Qwen3": DENSE,  # the norms of queries and keys feed no linear
    "Phi3": (2, 2, 2),  # one linear for queries, keys and values, and one for gate and up
    "Mixtral": (1, 3, 1),  # experts are no linears, and the norm before them feeds them, too
    "Qwen2Moe": (1, 3, 4),  # and a shared expert, whose gate has one feature and stays
    "Gemma": DENSE,  # its gain is 1 + weight
    "Gemma2": DENSE,  # two more norms feed no linear
}
REFUSED = {
    "Olmo2": "post_attention_layernorm: it feeds something other than a linear: add",  # norms after attention and MLP
}


def build(name, **settings):
    torch.manual_seed(0)
    settings |= OWN.get(name, {})
    model = getattr(transformers, f"{name}ForCausalLM")
    return model(model.config_class(**SIZES | LAYERS | settings))


def loss(model):
    tokens = torch.randint(1, 96, (2, 32), generator=torch.Generator().manual_seed(1))
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize("name", CONVERTED)
def test_a_model_converts_trains_and_is_saved(name, tmp_path):
    model = build(name)
    untouched = {key: value.clone() for key, value in model.state_dict().items()}
    high_precision = loss(model).item()
    mxtrain.convert(model)
    kinds = Counter(type(module) for module in model.modules())
    assert (kinds[MXNorm], kinds[MXNormLinear], kinds[MXLinear]) == tuple(2 * number for number in CONVERTED[name])
    assert type(model.lm_head) is torch.nn.Linear
    assert model.state_dict().keys() == untouched.keys()
    assert all(torch.equal(value, untouched[key]) for key, value in model.state_dict().items())

    before = loss(model)
    assert before.item() == pytest.approx(high_precision, rel=0.02)
    before.backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    after = loss(model)
    assert after < before - 0.1

    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == untouched.keys()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())
    assert MXNorm not in {type(module) for module in loaded.modules()}, "a plain model of transformers"
    mxtrain.convert(loaded)
    assert torch.equal(loss(loaded), after)


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        *((name, "add_unit_offset", True) for name in ("Gemma2", "Gemma3", "Qwen3Next", "Qwen3_5")),
        *((name, "groups", 2) for name in ("Mamba2", "NemotronH")),
    ],
)
def test_a_model_with_other_norms_computes_the_same_without_rounding(name, attribute, value):
    model = build(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    expected = loss(model)
    gradients = torch.autograd.grad(expected, [*model.parameters()])
    settings = dict(recipe="unquantized", estimator="exact", mode="reference")
    plan = mxtrain.convert(model, **settings)
    assert any(getattr(model.get_submodule(fqn), attribute, None) == value for fqn in plan.norms)
    got = loss(model)
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)
    for a, b in zip(torch.autograd.grad(got, [*model.parameters()]), gradients, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6


@pytest.mark.parametrize("settings", [{"attn_implementation": "flex_attention"}, {"use_cache": False}], ids=str)
def test_a_model_with_other_settings_converts(settings):
    """Without a cache, transformers looks at position ids, unless they are fake tensors."""
    model = build("Llama", **settings)
    mxtrain.convert(model)
    kinds = Counter(type(module) for module in model.modules())
    assert (kinds[MXNorm], kinds[MXNormLinear], kinds[MXLinear]) == tuple(2 * number for number in DENSE)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_norms_cannot_be_swapped_is_refused_and_its_linears_convert(name):
    model = build(name)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match=f"finds nothing to convert in this {name}ForCausalLM") as refusal:
        mxtrain.convert(model)
    assert REFUSED[name] in str(refusal.value)
    assert [type(module) for module in model.modules()] == kinds
    mxtrain.convert(model, "mx_linear")
    assert sum(type(module) is MXLinear for module in model.modules()) == 14
    before = loss(model)
    before.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    assert loss(model) < before


@pytest.mark.parametrize("converter", ["mxnorm", "mx_linear"])
def test_linears_of_another_class_are_named(converter):
    config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    with pytest.raises(ConfigError, match=r"transformer.h.0-1.attn.c_attn: it is a Conv1D"):
        mxtrain.convert(transformers.GPT2LMHeadModel(config), converter)
