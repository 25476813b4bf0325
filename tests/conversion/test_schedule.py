"""Layers that change their recipe between steps, and the plan of a schedule for a model."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

import mxtrain
from mxtrain.conversion.schedule import attach_schedule, set_step
from mxtrain.errors import ConfigError
from mxtrain.formats.schedule import parse_entries
from tests.support.conversion_models import Llama

STEPS = 10
TOKENS = torch.arange(64).reshape(2, 32) % 96


def original():
    torch.manual_seed(0)
    return Llama()


def scheduled(*tables, recipe="mxfp8", converter="mxnorm", **settings):
    model = original()
    plan = mxtrain.convert(model, converter, recipe=recipe, high_precision_share=0.0, mode="reference", **settings)
    entries = parse_entries(tables, STEPS, {}, "mxnorm.schedule")
    attach_schedule(model, plan.norms, entries)
    return model


def results(model, step=None):
    """Logits and gradients at a step."""
    if step is not None:
        set_step(model, step)
    mxtrain.set_rounding_step(7)
    logits = model(TOKENS)
    return [logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()))]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_step_computes_what_a_model_with_its_recipe_computes():
    for change, settings in [
        ({"recipe": "nvfp4"}, {"recipe": "nvfp4"}),  # which needs random numbers that the first recipe did without
        (  # the norm draws signs for one of its linears
            {"recipe": "wgrad=nvfp4", "modules": ["wk"]},
            {"recipes": {"wk": "fprop=mxfp8, dgrad=mxfp8, wgrad=nvfp4"}},
        ),
        ({"recipe": "fprop=bf16"}, {"recipe": "fprop=bf16, dgrad=mxfp8, wgrad=mxfp8"}),
    ]:
        model = scheduled({"from_step": 3, "until_step": 5, **change})
        own = original()
        mxtrain.convert(own, mode="reference", high_precision_share=0.0, **settings)
        before = results(model, 2)
        assert same(results(model, 3), results(own)) and same(results(model, 5), results(own))
        assert not same(results(model, 5), before) and same(results(model, 6), before)


def test_plain_norms_and_their_linears_compute_what_they_did_before_the_conversion():
    model = scheduled({"from_step": 2, "norm": "rmsnorm"}, {"from_step": 2, "modules": ["wo", "w2"], "recipe": "bf16"})
    assert same(results(model, 2), results(original()))


def test_a_forward_in_high_precision_keeps_the_estimate():
    """Block maxima over the blocks of the format that is no longer cast to, and no new ratio c(p, B)."""
    model = scheduled({"from_step": 2, "recipe": "fprop=bf16"}, recipe="nvfp4")
    norm, x = model.layers[0].attention_norm, torch.randn(5, 64)
    before, with_cast = norm(x), model.layers[0].attention.wq(norm(x))
    set_step(model, 2)
    after = norm(x)
    assert torch.equal(after.rho, before.rho) and after.recipe.block_size == 16
    torch.testing.assert_close(after.xhat.data, x * before.rho[:, None])
    assert not torch.equal(model.layers[0].attention.wq(after), with_cast)


def test_a_pattern_selects_a_norm_with_its_linears():
    model = scheduled(
        {"from_step": 2, "modules": ["layers.1.attention_norm"], "norm": "rmsnorm"},
        {"from_step": 2, "modules": ["layers.0.*.w1"], "norm": "rmsnorm"},
        {"from_step": 2, "modules": ["w2"], "recipe": "nvfp4"},
    )
    set_step(model, 2)
    first, second = model.layers
    assert second.attention_norm.is_plain and second.attention.wk.is_plain and not second.ffn_norm.is_plain
    assert first.ffn_norm.is_plain and not first.attention_norm.is_plain
    assert [layer.feed_forward.w2.recipe.name for layer in model.layers] == ["nvfp4"] * 2
    assert first.attention.wq.recipe.name == second.attention.wo.recipe.name == "mxfp8"


def test_entries_of_mx_linear():
    model = scheduled({"from_step": 2, "modules": ["layers.0"], "recipe": "bf16"}, converter="mx_linear")
    set_step(model, 2)
    assert [layer.attention.wq.recipe.name for layer in model.layers] == ["bf16", "mxfp8"]


def at_2(**keys):
    return {"from_step": 2, **keys}


def test_mistakes_that_take_the_model_to_see():
    for tables, message in [
        ([at_2(modules=["layer.0"], norm="rmsnorm")], "mxnorm.schedule[0].modules: 'layer.0' matches no module; n"),
        (
            [at_2(modules=["w2", "output"], recipe="bf16")],
            "mxnorm.schedule[0].modules: 'output' selects only modules that ",
        ),
        (
            [at_2(modules=["layers.0", "w2"], norm="rmsnorm")],
            "mxnorm.schedule[0].modules: 'w2' selects no swapped norm for rmsnorm; name one",
        ),
        (
            [at_2(recipe="fprop=bf16", until_step=5), {"from_step": 5, "modules": ["layers.1"], "recipe": "nvfp4"}],
            "mxnorm.schedule[1] and mxnorm.schedule[0] both change fprop of layers.1.attention.wk and 6 more at steps "
            "5 to 5: end one",
        ),
        ([at_2(norm="rmsnorm"), at_2(modules=["wq"], norm="rmsnorm")], "mxnorm.schedule[1] and mxnorm.schedule[0] bo"),
        ([at_2(modules=["wq"], recipe="fprop=bf16")], "mxnorm.schedule[0] gives the layers behind layers.0.attention"),
    ]:
        with pytest.raises(ConfigError) as error:
            scheduled(*tables)
        assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_the_estimator_of_the_run_holds_for_the_recipes_of_entries():
    with pytest.raises(ConfigError, match=r"^mxnorm.schedule\[0\]: layers.0.attention_norm: estimator = 'post_round'"):
        scheduled(at_2(recipe="nvfp4"), estimator="post_round")


def test_different_things_may_change_at_the_same_step():
    first = {"from_step": 1, "until_step": 1, "recipe": "bf16"}
    scheduled(at_2(recipe="fprop=bf16"), at_2(recipe="wgrad=nvfp4"), first)
    # Neither of these can be without the other.
    scheduled(at_2(modules=["wq"], recipe="fprop=bf16"), at_2(modules=["wk", "wv"], recipe="fprop=bf16"))


def test_features_that_a_later_recipe_cannot_divide_are_found_before_training():
    model = original()
    model.layers[0].feed_forward.w2 = nn.Linear(128, 48, bias=False)  # 3 blocks of 16
    plan = mxtrain.convert(model, "mx_linear", recipe="nvfp4", high_precision_share=0.0)
    entries = parse_entries([at_2(recipe="mxfp8")], STEPS, {}, "mxnorm.schedule")
    with pytest.raises(ConfigError, match=r"mxnorm.schedule\[0\]: layers.0.feed_forward.w2: out_features = 48 is not"):
        attach_schedule(model, plan.norms, entries)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(32), nn.Linear(32, 32)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Blocks(nn.Module):
    """Two blocks, which are compiled as TorchTitan compiles its blocks: one by one, with the same code."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def compiled_beside_eager(recipe, tables) -> Callable[..., int]:
    """Return what gives two blocks the state of a step, compares them with eager ones, and counts all graphs so far."""
    model, x, graphs = Blocks(), torch.randn(16, 32, requires_grad=True), []
    plan = mxtrain.convert(model, recipe=recipe, mode="reference", filter_fqns=[], example_inputs=(x,))
    attach_schedule(model, plan.norms, parse_entries(tables, 4, {}, "mxnorm.schedule"))
    eager = copy.deepcopy(model)

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for index, block in enumerate(model.layers):
        model.layers[index] = torch.compile(block, backend=count, fullgraph=True)

    def compare(step: int) -> int:
        outputs = []
        for each in (model, eager):
            set_step(each, step)
            mxtrain.set_rounding_step(step)
            outputs.append(each(x))
        assert torch.equal(*outputs)
        return len(graphs)

    return compare


def test_blocks_compile_at_most_once_for_an_entry():
    """A state that comes back, and a second block with the same state, are not compiled again."""
    tables = [{"from_step": 2, "until_step": 2, "recipe": "fprop=bf16"}, {"from_step": 3, "norm": "rmsnorm"}]
    compare = compiled_beside_eager("mxfp8", tables)
    assert [compare(step) for step in (1, 2, 3, 4, 1, 4, 2)] == [1, 2, 3, 3, 3, 3, 3]


def test_compiled_blocks_take_another_format():
    """Formats differ in the share of blocks in high precision. Dynamo cannot compare a number that has changed."""
    tables = [{"from_step": 2, "until_step": 2, "recipe": "mxfp8"}, {"from_step": 3, "recipe": "bf16"}]
    compare = compiled_beside_eager("nvfp4", tables)
    assert [compare(step) for step in (1, 2, 3, 1, 2)] == [1, 2, 3, 3, 3]


def test_a_plain_norm_has_the_eps_of_the_norm_before_conversion():
    model, x = Blocks(), torch.randn(4, 32)
    before = model(x)
    plan = mxtrain.convert(model, eps=0.5, mode="reference", filter_fqns=[], example_inputs=(x,))
    attach_schedule(model, plan.norms, parse_entries([at_2(norm="rmsnorm")], 4, {}, "mxnorm.schedule"))
    set_step(model, 2)
    assert torch.equal(model(x), before)
