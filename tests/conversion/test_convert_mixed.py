"""Conversion with a recipe for each GEMM, and with recipes by name."""

import pytest
import torch
import torch.nn as nn

from mxtrain import ConfigError, MXLinear, MXNorm, MXNormLinear, convert
from tests.support.conversion_models import kinds, llama, loss

FORWARD = "fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8"
NO_SHARE = {"high_precision_share": 0, "mode": "reference"}


def recipes_of(model, *fqns):
    return [model.get_submodule(fqn).recipe.name for fqn in fqns]


def test_recipes_by_name():
    """The last of several that name a linear holds; norms go with the linears that they feed."""
    model = llama(layers=3)
    recipes = {
        "layers.*.feed_forward.w2": "mxfp8",
        "layers.0": "bf16",
        "attention": "fprop=nvfp4, dgrad=nvfp4, wgrad=bf16",
    }
    report = convert(model, recipe=FORWARD, recipes=recipes, **NO_SHARE)
    assert [type(layer.ffn_norm) for layer in model.layers] == [nn.RMSNorm, MXNorm, MXNorm]
    assert [type(layer.attention_norm) for layer in model.layers] == [MXNorm] * 3
    assert {type(m) for m in model.layers[0].feed_forward.children()} == {nn.Linear}
    reason = "is left in high precision by recipes.'layers.0' = 'bf16'"
    assert report.skipped["layers.0.feed_forward.w2"] == reason
    assert report.skipped["layers.0.ffn_norm"] == f"feeds layers.0.feed_forward.w1, which {reason}"
    names = recipes_of(model, "layers.0.attention.wq", "layers.1.feed_forward.w1", "layers.1.feed_forward.w2")
    assert names == [recipes["attention"], FORWARD, "mxfp8"]
    assert "\n  layers.1-2.feed_forward.w2: MXLinear, mxfp8\n" in str(report)
    assert f"\n  layers.0-2.attention.wq: MXNormLinear, {recipes['attention']}\n" in str(report)
    loss(model).backward()


def test_linears_of_a_norm_with_different_recipes_of_fprop_keep_it():
    model = llama()
    report = convert(model, recipe="mxfp8", recipes={"layers.0.attention.wk": FORWARD}, **NO_SHARE)
    assert type(model.layers[0].attention_norm) is nn.RMSNorm
    assert report.skipped["layers.0.attention_norm"] == (
        "feeds linears with different recipes of fprop (layers.0.attention.wq: mxfp8, layers.0.attention.wk: nvfp4, "
        "layers.0.attention.wv: mxfp8)"
    )
    assert [type(m) for m in model.layers[0].attention.children()] == [MXLinear] * 4
    assert recipes_of(model, "layers.0.attention.wq", "layers.0.attention.wk") == ["mxfp8", FORWARD]
    loss(model).backward()


def test_linears_of_a_norm_may_differ_backward_and_share_signs():
    model = llama()
    recipes = {"wk": "fprop=mxfp8, dgrad=bf16, wgrad=nvfp4", "wv": "fprop=mxfp8, dgrad=mxfp8, wgrad=bf16"}
    convert(model, recipes=recipes, **NO_SHARE)
    attention, norm = model.layers[1].attention, model.layers[1].attention_norm
    assert type(norm) is MXNorm and norm.recipe.fprop == attention.wq.recipe
    assert recipes_of(attention, "wq", "wk", "wv", "wo") == ["mxfp8", recipes["wk"], recipes["wv"], "mxfp8"]
    assert norm(torch.randn(3, 64)).signs is not None
    assert model.layers[1].ffn_norm(torch.randn(3, 64)).signs is None
    loss(model).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_filters_and_the_share_come_first():
    """The share is that of ``recipe``, whatever the recipes by name are."""
    model = llama(layers=6)
    report = convert(model, recipe="nvfp4", recipes={"layers": "mxfp8"}, filter_fqns=["layers.2", "output"])
    assert {fqn.split(".")[1] for fqn in report.norms} == {"0", "1", "3", "4"}
    assert report.skipped["layers.2.attention.wo"] == "is named in filter_fqns"
    assert "last 1 of 6 blocks" in report.skipped["layers.5.attention.wo"]
    assert len(convert(llama(layers=6), recipe="mxfp8", recipes={"layers.1": "nvfp4"}).norms) == 12


def test_mistakes_leave_the_model_unchanged():
    for kwargs, message in [
        ({"recipes": {"wo": "fprop=mxfp8"}}, "recipes.'wo' = 'fprop=mxfp8' leaves out dgrad and wgrad"),
        ({"recipes": {"lm_head": "bf16"}}, "recipes: 'lm_head' matches no module; name one of tok_emb"),
        (
            {"recipes": {"attention_norm": "nvfp4"}},
            "recipes: 'attention_norm' names no linear and no experts; name the linears",
        ),
        (
            {"recipes": {"layers": "bf16"}},
            "nothing to convert in this Llama\n(.*\n)*  layers.0-1.attention_norm: it f",
        ),
        (
            {"recipe": "fprop=bf16, dgrad=dequantized, wgrad=bf16"},
            "nothing to convert in this Llama\n(.*\n)*.*dgrad=dequantized, wgrad=bf16', whose fprop has no codes",
        ),
        (
            {"recipes": {"w1": "nvfp4", "w3": "nvfp4"}, "estimator": "post_round"},
            "^layers.*w1: estimator = 'post_round' reads rounded block scales, and those of recipe = 'nvfp4'",
        ),
    ]:
        model = llama()
        before = kinds(model)
        with pytest.raises(ConfigError, match=message):
            convert(model, **kwargs)
        assert kinds(model) == before


def test_features_that_no_block_divides_are_those_of_the_layers_recipe():
    plan = convert(llama(vocab=80), recipes={"layers": "nvfp4"}, filter_fqns=[])
    reason = "does not fit: out_features = 80 is not a multiple of the block size 32 of recipe 'mxfp8'"
    assert plan.skipped == {"norm": f"feeds output, which {reason}", "output": reason}
    model = llama(vocab=80)
    convert(model, recipes={"output": "nvfp4"}, filter_fqns=[], **NO_SHARE)
    assert type(model.output) is MXNormLinear and model.norm.recipe.name == "nvfp4"
