import copy
from dataclasses import fields
from inspect import signature
from typing import get_args

import pytest
import torch
import torch.nn as nn

from mxtrain import (
    ConfigError,
    FusedLayerNorm,
    FusedRMSNorm,
    MXLinear,
    MXNorm,
    MXNormLinear,
    convert,
)
from mxtrain.conversion.convert import Settings
from mxtrain.conversion.converters import CONVERTERS
from tests.support.conversion_models import DIM, Llama, kinds, llama, loss


def test_mxnorm_swaps_what_the_norms_feed_and_the_other_linears():
    model = llama()
    report = convert(model)
    assert report.norms == {
        f"layers.{i}.{norm}": [f"layers.{i}.{linear}" for linear in linears]
        for i in range(2)
        for norm, linears in {
            "attention_norm": ("attention.wq", "attention.wk", "attention.wv"),
            "ffn_norm": ("feed_forward.w1", "feed_forward.w3"),
        }.items()
    }
    assert report.linears == [f"layers.{i}.{w}" for i in range(2) for w in ("attention.wo", "feed_forward.w2")]
    assert report.skipped == {
        "norm": "feeds output, which is the output head",
        "output": "is the output head",
    }
    layer = model.layers[1]
    assert type(layer.attention_norm) is MXNorm and layer.attention_norm.estimate.eps == 1e-5
    assert type(layer.ffn_norm) is MXNorm and layer.ffn_norm.estimate.eps == 1e-6
    assert type(layer.attention.wk) is MXNormLinear and type(layer.attention.wo) is MXLinear
    assert type(model.norm) is nn.RMSNorm and type(model.output) is nn.Linear
    assert report.headline.endswith(
        ": 4 norms and 14 linears swapped, 2 kept; 93.0 % of the weights' multiplications are quantized"
    )
    assert "layers.0-1.ffn_norm: MXNorm, feeds w1, w3" in str(report)


def test_a_norm_groups_its_own_linears_also_in_a_copy_of_the_model():
    model = llama()
    report = convert(model)
    assert report.groups == report.norms
    assert list(convert(llama(layers=1), filter_fqns=[]).groups) == ["layers.0.attention_norm", "layers.0.ffn_norm"], (
        "the last norm has one linear"
    )
    for layer in (model.layers[1], copy.deepcopy(model).layers[1]):
        attention, ffn = layer.attention, layer.feed_forward
        assert layer.attention_norm.group.linears == (attention.wq, attention.wk, attention.wv)
        assert layer.ffn_norm.group.linears == (ffn.w1, ffn.w3)
    single = llama()
    assert convert(single, group_linears=False).groups == {} and single.layers[1].ffn_norm.group is None


def test_mx_linear_swaps_every_linear_and_no_norm():
    model = llama()
    report = convert(model, "mx_linear")
    assert report.norms == {} and len(report.linears) == 14 and report.skipped == {"output": "is the output head"}
    assert type(model.layers[0].attention_norm) is nn.RMSNorm and type(model.layers[0].attention.wq) is MXLinear


def test_fused_norm_swaps_every_norm_and_no_linear():
    model = llama()
    before = kinds(model)
    report = convert(model, "fused_norm", when_compiled="kernel")
    norms = [f"layers.{i}.{norm}" for i in range(2) for norm in ("attention_norm", "ffn_norm")] + ["norm"]
    assert report.fused_norms == norms and not (report.norms or report.linears or report.skipped)
    assert kinds(model) == before | dict.fromkeys(norms, FusedRMSNorm)
    assert [model.get_submodule(fqn).eps for fqn in norms] == [1e-5, 1e-6, 1e-5, 1e-6, 1e-5]
    assert model.norm.when_compiled == "kernel"
    assert str(report).splitlines() == [
        "fused_norm: 5 norms swapped, 0 kept",
        "  layers.0-1.attention_norm: FusedRMSNorm",
        "  layers.0-1.ffn_norm: FusedRMSNorm",
        "  norm: FusedRMSNorm",
    ]


def test_fused_norm_goes_before_or_after_the_others():
    """Also where the other leaves it nothing to do."""
    for converter, filters in [("mxnorm", []), ("mx_linear", [])]:
        first, last = llama(), llama()
        convert(first, "fused_norm")
        convert(first, converter, mode="reference", filter_fqns=filters)
        convert(last, converter, mode="reference", filter_fqns=filters)
        convert(last, "fused_norm")
        assert kinds(first) == kinds(last) and repr(first) == repr(last)
        assert nn.RMSNorm not in kinds(first).values()
        assert (MXNorm in kinds(first).values()) == (converter == "mxnorm")
        assert torch.equal(loss(first), loss(last))


def test_parameters_and_their_names_stay():
    for converter in ("mxnorm", "mx_linear", "fused_norm"):
        model = llama()
        before = dict(model.named_parameters())
        convert(model, converter)
        after = dict(model.named_parameters())
        assert list(before) == list(after) and all(after[name] is p for name, p in before.items())
        llama().load_state_dict(model.state_dict())


def test_exact_and_unquantized_is_the_model_itself():
    model = llama()
    converted = copy.deepcopy(model)
    convert(converted, estimator="exact", recipe="unquantized", mode="reference")
    torch.testing.assert_close(loss(converted), loss(model), rtol=1e-6, atol=1e-6)


def test_meta_device_and_train_mode():
    with torch.device("meta"):
        model = Llama().eval()
    convert(model)
    assert model.layers[0].attention.wq.weight.is_meta
    assert not any(module.training for module in model.modules())


def test_layer_norms_are_fused_with_their_parameters():
    torch.manual_seed(0)
    norms = nn.LayerNorm(DIM), nn.LayerNorm(DIM, bias=False), nn.RMSNorm(DIM, 1e-3)
    model = nn.Sequential(*norms)
    model[0].tag = "mine"
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x, parameters = torch.randn(3, DIM), dict(model.named_parameters())
    want = model(x)
    report = convert(model, "fused_norm", when_compiled="kernel")
    assert [type(norm) for norm in model] == [FusedLayerNorm, FusedLayerNorm, FusedRMSNorm]
    assert report.headline == "fused_norm: 3 norms swapped, 0 kept" and model[0].tag == "mine"
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    torch.testing.assert_close(model(x), want)
    assert convert(model, "fused_norm").fused_norms == ["0", "1", "2"], "as before a first conversion"


def test_filtering_one_linear_of_a_group_keeps_its_norm_exact():
    model = llama()
    report = convert(model, filter_fqns=["output", "layers.0.attention.wk"])
    assert report.skipped["layers.0.attention_norm"] == "feeds layers.0.attention.wk, which is named in filter_fqns"
    assert type(model.layers[0].attention_norm) is nn.RMSNorm
    assert type(model.layers[0].attention.wq) is MXLinear and type(model.layers[0].attention.wk) is nn.Linear
    loss(model).backward()


def test_a_shared_weight_stays_in_high_precision():
    model = llama()
    model.output.weight = model.tok_embeddings.weight
    report = convert(model, filter_fqns=[])
    assert report.skipped["output"] == "shares its weight with another module"
    assert type(model.output) is nn.Linear and "output" not in report.linears


def test_mistakes_leave_the_model_unchanged():
    for kwargs, message in [
        ({"converter": "mxnorms"}, "converter = 'mxnorms' is not one of: 'mxnorm', 'mx_linear', 'fused_norm', 'dec"),
        (
            {"converter": "decompose_k_router"},
            "converter = 'decompose_k_router' finds nothing to convert in this Llama",
        ),
        (
            {"converter": "fused_norm", "filter_fqns": ["layers", "norm"]},
            r"finds nothing to convert in this Llama\n  layers.0-1.attention_norm: it is named in filter_fqns\n",
        ),
        ({"filter_fqns": ["lm_head"]}, "filter_fqns: 'lm_head' matches no module; name one of tok_emb"),
        ({"filter_fqns": "output"}, "filter_fqns = 'output' is not a list of module names"),
        ({"filter_fqns": [1]}, "filter_fqns: 1 is not the name of a module"),
        ({"tensor_scale": 0}, "tensor_scale = 0 needs recipe 'nvfp4', not 'mxfp8'"),
        ({"recipe": "nvfp4", "scale_rounding": False}, "scale_rounding = False does not apply to recipe 'nvfp4'"),
        ({"example_inputs": ()}, "one forward pass without data failed with TypeError"),
    ]:
        model = llama()
        before = kinds(model)
        with pytest.raises(ConfigError, match=message):
            convert(model, **kwargs)
        assert kinds(model) == before


def test_advice_to_name_a_module_keeps_the_output_head():
    """filter_fqns keeps the head only while it is unset."""
    settings = {"recipes": {"w1": "nvfp4", "w3": "nvfp4"}, "estimator": "post_round"}
    fqn = "layers.0.feed_forward.w1"
    with pytest.raises(ConfigError, match=f"^{fqn}: .* name it in filter_fqns .* with the output head: output$"):
        convert(llama(), **settings)
    with pytest.raises(ConfigError, match=f"^{fqn}: .* to leave it in high precision$"):
        convert(llama(), **settings, filter_fqns=["output"])


def test_editors_and_type_checkers_see_the_settings_of_the_converters():
    assert Settings.__annotations__ == {
        field.name: field.type | None for converter in CONVERTERS.values() for field in fields(converter)
    }
    assert get_args(signature(convert).parameters["converter"].annotation) == tuple(CONVERTERS)
