"""Mixtures of experts that an MXNorm feeds: router, shared and routed experts."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from mxtrain import ConfigError, convert
from mxtrain.conversion.schedule import attach_schedule, set_step
from mxtrain.formats.schedule import parse_entries
from mxtrain.nn.experts import QuantizedExperts
from mxtrain.nn.mixture import MXNormRouter
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.ready_weights import ReadyWeights

moe = pytest.importorskip("torchtitan.models.moe.moe", reason="mixtures of experts of TorchTitan 0.2.2")
from mxtrain.titan.v02.train_specs import histc  # noqa: E402

DIM, HIDDEN = 64, 96
AFTER = dict(num_experts=8, top_k=2, use_grouped_mm=False, score_before_experts=False)
MIXTURES = {
    "one shared expert": dict(AFTER, route_norm=True),
    "no shared expert": dict(AFTER, num_shared_experts=0),
    "softmax and a bias": dict(AFTER, score_func="softmax", gate_bias=True, load_balance_coeff=None),
    "scores first": dict(AFTER, score_before_experts=True),
}


class Block(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.norm, self.moe = nn.RMSNorm(DIM, eps=1e-5), moe.MoE(moe.MoEArgs(**settings), DIM, HIDDEN)

    def forward(self, x):
        return x + self.moe(self.norm(x))


class Model(nn.Module):
    """A mixture, and a norm with a linear, so that there is always something to convert."""

    def __init__(self, **settings):
        super().__init__()
        self.layers = nn.ModuleList([Block(**settings)])
        self.last = nn.Sequential(nn.RMSNorm(DIM, eps=1e-5), nn.Linear(DIM, DIM))

    def forward(self, x):
        return self.last(self.layers[0](x))


@pytest.fixture(autouse=True)
def counts_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch, "histc", histc)


def model_of(dtype=torch.float32, **settings) -> Model:
    torch.manual_seed(0)
    model = Model(**settings)
    mixture = model.layers[0].moe
    with torch.no_grad():
        mixture.init_weights(0.5, torch.device("cpu"))
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
        model.layers[0].norm.weight.normal_().add_(1)
        if mixture.expert_bias is not None:
            mixture.expert_bias.normal_(std=0.1)
    return model.to(dtype)


def tokens(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 40, DIM, generator=generator, dtype=torch.float64).to(dtype)


def converted(model, **settings):
    model = copy.deepcopy(model)
    plan = convert(model, "mxnorm", example_inputs=(tokens(),), mode="reference", **settings)
    return model, plan


def results(model, x):
    x = x.detach().requires_grad_()
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], tokens(x.dtype, seed=1))]


def errors(got, want):
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("settings", MIXTURES.values(), ids=MIXTURES)
def test_unquantized_it_is_rmsnorm_and_the_mixture(settings, monkeypatch):
    """In fp64, with the true RMS: result and every gradient, those of gain, gate and bias among them."""
    if settings["score_before_experts"]:  # in fp32, where rows with the gain and without are rounded differently
        monkeypatch.setattr(moe, "torch", SimpleNamespace(**{**vars(torch), "float32": torch.float64}))
    model = model_of(torch.float64, **settings)
    ours, plan = converted(model, recipe="unquantized", estimator="exact")
    assert isinstance(ours.layers[0].norm, MXNorm) and isinstance(ours.layers[0].moe.router.gate, MXNormRouter)
    assert isinstance(ours.layers[0].moe.experts, QuantizedExperts) and plan.mixtures.keys() == {"layers.0.norm"}
    assert "layers.0.norm: MXNorm with the exact RMS, feeds gate, " in str(plan)
    x = tokens(torch.float64)
    assert max(errors(results(ours, x), results(model, x))) < 1e-12
    assert torch.equal(ours.layers[0].moe.tokens_per_expert, model.layers[0].moe.tokens_per_expert)


@pytest.mark.parametrize("settings", [MIXTURES["one shared expert"], MIXTURES["scores first"]], ids=str)
def test_quantized_it_stays_as_near_as_casts_allow(settings):
    model = model_of(**settings)
    ours, _ = converted(model, estimator="exact")
    assert max(errors(results(ours, tokens()), results(model, tokens()))) < 0.12


def test_experts_get_the_values_that_the_norm_has_cast():
    """Cast again along the rows, no value changes, also of rows of very different blocks."""
    model, _ = converted(model_of(**AFTER))
    norm = model.layers[0].norm
    x = tokens() * torch.exp(3 * tokens(seed=2))
    xhat = norm(x).xhat.data
    gemms = model.layers[0].moe.experts.gemms(x.device)
    again = gemms.quantize_activation(norm(x).view(-1, DIM)[torch.arange(120)]).data
    assert torch.equal(again, xhat)


def test_scores_multiply_values_before_their_only_cast():
    """Rows in the place of codes: the experts cast score times row once."""
    model, _ = converted(model_of(**MIXTURES["scores first"]))
    x = tokens()
    normed = model.layers[0].norm(x)
    assert torch.equal(normed.view(-1, DIM)[torch.tensor([5, 3])], (normed.x * normed.rho[:, None])[[5, 3]])


STAYS = {
    "the gate is named": (AFTER, {"filter_fqns": ["gate"]}, "named in filter_fqns"),
    "experts are named": (AFTER, {"filter_fqns": ["experts"]}, "named in filter_fqns"),
    "experts in high precision": (AFTER, {"recipes": {"experts": "bf16"}}, "left in high precision"),
    "NVFP4": (AFTER, {"recipe": "nvfp4"}, "fprop in NVFP4"),
}


@pytest.mark.parametrize(("settings", "chosen", "reason"), STAYS.values(), ids=STAYS)
def test_norms_that_stay(settings, chosen, reason):
    model = model_of(**settings)
    plan = convert(model, "mxnorm", example_inputs=(tokens(),), **chosen)
    assert reason in plan.skipped["layers.0.norm"]
    if "recipe" in chosen:
        assert plan.experts == ["layers.0.moe.experts"]


def test_behind_a_norm_experts_have_nvfp4_in_dgrad_and_wgrad_only():
    """A schedule cannot change to NVFP4 in fprop."""
    model = model_of(**AFTER)
    recipe = "fprop=mxfp8, dgrad=nvfp4, wgrad=nvfp4"
    ours, plan = converted(model, recipe=recipe, high_precision_share=0.0, estimator="exact")
    assert plan.mixtures.keys() == {"layers.0.norm"} and ours.layers[0].moe.experts.recipe.wgrad.tensor_scaled
    assert max(errors(results(ours, tokens()), results(model, tokens()))) < 0.4
    entries = parse_entries([{"from_step": 2, "recipe": "nvfp4"}], 10, {}, "mxnorm.schedule")
    with pytest.raises(ConfigError, match="layers.0.moe.experts.*NVFP4"):
        attach_schedule(ours, plan.feeds, entries)


@pytest.mark.parametrize("shared", [0, 1])
def test_a_schedule_switches_norm_gate_and_experts(shared):
    """In high precision the experts fold no gain, because the norm has multiplied by it."""
    model = model_of(torch.float64, **AFTER, num_shared_experts=shared)
    ours, plan = converted(model, recipe="unquantized", estimator="exact")
    attach_schedule(ours, plan.feeds, parse_entries([{"from_step": 2, "recipe": "bf16"}], 10, {}, "mxnorm.schedule"))
    x = tokens(torch.float64)
    for step in (1, 2):
        set_step(ours, step)
        assert max(errors(results(ours, x), results(model, x))) < 1e-12


def test_a_schedule_cannot_part_experts_from_the_fprop_of_their_norm():
    """The norm would go on to round their rows."""
    ours, plan = converted(model_of(**AFTER))
    table = {"from_step": 2, "modules": ["layers.0.moe.experts"], "recipe": "fprop=bf16"}
    with pytest.raises(ConfigError, match="layers behind layers.0.norm different recipes of fprop .*moe.experts: bf16"):
        attach_schedule(ours, plan.feeds, parse_entries([table], 10, {}, "mxnorm.schedule"))


def test_experts_behind_a_norm_that_turns_plain_stay_quantized():
    """They no longer fold its gain, by which it has multiplied."""
    model = model_of(**AFTER)
    ours, plan = converted(model)
    attach_schedule(ours, plan.feeds, parse_entries([{"from_step": 2, "norm": "rmsnorm"}], 10, {}, "mxnorm.schedule"))
    layer = ours.layers[0]
    before = layer.moe.experts.recipe
    set_step(ours, 2)
    assert layer.norm.is_plain and layer.moe.experts.recipe == before
    assert max(errors(results(ours, tokens()), results(model, tokens()))) < 0.12


def test_weights_cast_ahead_change_no_bit():
    ours, _ = converted(model_of(**AFTER))
    want = results(ours, tokens())
    ready = ReadyWeights([ours])
    ready.refresh()
    assert ours.layers[0].moe.experts.ready is not None
    assert all(torch.equal(a, b) for a, b in zip(results(ours, tokens()), want, strict=True))
    first = ours.layers[0].moe.experts.ready
    with torch.no_grad():
        ours.layers[0].norm.weight.mul_(2)
    ready.refresh()
    assert ours.layers[0].moe.experts.ready is not first
