"""Stacked experts: TorchTitan's become QuantizedExperts, others stay, and settings reach them as they reach linears."""

import copy

import pytest
import torch
import torch.nn as nn

from mxtrain import ConfigError, convert
from mxtrain.conversion.converters import MXLinearConverter
from mxtrain.conversion.layers import find_experts
from mxtrain.conversion.schedule import attach_schedule, set_step
from mxtrain.formats.schedule import parse_entries
from mxtrain.nn.experts import QuantizedExperts
from tests.support.conversion_models import DIM, TOKENS, loss
from tests.support.converter_checks import model_and_args

moe = pytest.importorskip("torchtitan.models.moe.moe", reason="mixtures of experts of TorchTitan 0.2.2")
from mxtrain.titan.v02.train_specs import histc  # noqa: E402

EXPERTS = "layers.0.moe.experts"


# The kind of mixture that Qwen3 has, with fewer experts.
QWEN3 = moe.MoEArgs(4, 0, "softmax", route_norm=True, score_before_experts=False, top_k=2, use_grouped_mm=False)


class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.moe = moe.MoE(moe.MoEArgs(num_experts=4, top_k=2, use_grouped_mm=False), DIM, hidden)


class Mixtures(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.tok_embeddings, self.output = nn.Embedding(96, DIM), nn.Linear(DIM, 96, bias=False)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(2))

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = x + layer.moe(layer.norm(x))
        return self.output(x)


def mixtures(hidden=96):
    torch.manual_seed(0)
    model = Mixtures(hidden)
    with torch.no_grad():
        for layer in model.layers:
            layer.moe.init_weights(0.5, torch.device("cpu"))
    return model


def experts_of(model):
    return {fqn: module for fqn, module in model.named_modules() if fqn.endswith(".experts")}


def results(model, tokens=TOKENS):
    logits = model(tokens)
    return [logits, *torch.autograd.grad(logits.float().square().mean(), list(model.parameters()))]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(autouse=True)
def one_order_of_sums(monkeypatch):
    """The gradient of rows that are taken by index sums over threads in any order. Routers count tokens on a CPU."""
    monkeypatch.setattr(torch, "histc", histc)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("name", "flavor"), [("deepseek_v3", "debugmodel"), ("qwen3", "debugmodel_moe")])
def test_experts_of_torchtitans_models_have_the_bits_of_experts_swapped_by_hand(name, flavor):
    changes = {"moe_args": QWEN3} if name == "qwen3" else {}
    model, _ = model_and_args(name, flavor, n_layers=2, vocab_size=96, **changes)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    by_hand, before = copy.deepcopy(model), list(model.named_parameters())
    plan = convert(model, "mx_linear", mode="reference")
    without = convert(by_hand, "mx_linear", mode="reference", filter_fqns=["experts", "output"])
    assert plan.experts == list(experts_of(model)) != [] and plan.linears == without.linears
    assert plan.quantized_share > without.quantized_share
    for fqn, experts in experts_of(by_hand).items():
        assert without.skipped[fqn] == "is named in filter_fqns"
        by_hand.set_submodule(fqn, QuantizedExperts.from_experts(experts, mode="reference"))
    tokens = torch.arange(64).reshape(1, 64)
    assert same(results(model, tokens), results(by_hand, tokens))
    after = list(model.named_parameters())
    assert [name for name, _ in after] == [name for name, _ in before], "optimizers number their states by the order"
    assert all(a is b for (_, a), (_, b) in zip(after, before, strict=True))


def test_the_report_counts_stacks_of_experts():
    plan = convert(mixtures(), "mx_linear", mode="reference", recipes={EXPERTS: "unquantized"})
    assert plan.experts == [EXPERTS, "layers.1.moe.experts"]
    assert ": 6 linears and 2 stacks of experts swapped, 3 kept;" in plan.headline
    lines = plan.details.splitlines()
    (first,) = [line for line in lines if line.startswith(f"  {EXPERTS}: QuantizedExperts, unquantized, ")]
    assert first.endswith(" of the multiplications") and "  layers.1.moe.experts: QuantizedExperts, mxfp8" in lines
    assert plan.weights[f"{EXPERTS}.w1"].quantized == 0 and plan.weights["layers.1.moe.experts.w2"].quantized == 1
    assert plan.weights[f"{EXPERTS}.w1"].multiplications == 96 * DIM * 2


def test_experts_of_other_classes_stay():
    model, args = model_and_args("gpt_oss", "debugmodel")
    plan = convert(model, "mx_linear", mode="reference")
    stay = {fqn: plan.skipped.get(fqn) for fqn, module in model.named_modules() if hasattr(module, "mlp1_weight")}
    assert plan.experts == [] and stay and set(stay.values()) == {"is a GptOssGroupedExperts"}
    assert len(stay) == args.n_layers


class Subclass(moe.GroupedExperts):
    pass


def becomes(kind):
    def act(experts):
        experts.__class__ = kind

    return act


def hooked(experts):
    experts.register_forward_hook(lambda *args: None)


def with_its_own_forward(experts):
    experts.forward = lambda x, counts: x


def test_experts_with_something_of_their_own_stay():
    for act, reason in [
        (hooked, "has a forward hook"),
        (with_its_own_forward, "has its own forward"),
        (becomes(Subclass), "is a Subclass"),
        (becomes(type("GroupedExperts", (moe.GroupedExperts,), {})), f"is a {__name__}.GroupedExperts"),
    ]:
        model = mixtures()
        experts = model.layers[0].moe.experts
        act(experts)
        plan = convert(model, "mx_linear", mode="reference")
        assert plan.experts == ["layers.1.moe.experts"] and plan.skipped[EXPERTS].startswith(reason)
        assert model.layers[0].moe.experts is experts


def test_experts_that_share_a_weight_stay():
    model = mixtures()
    model.layers[0].moe.experts.w1 = model.layers[1].moe.experts.w1
    plan = convert(model, "mx_linear", mode="reference")
    assert plan.experts == []
    assert {plan.skipped[f"layers.{i}.moe.experts"] for i in (0, 1)} == {"shares its weight with another module"}


def test_settings_keep_experts():
    for settings, reasons in [
        ({"recipe": "nvfp4", "high_precision_share": 0.0, "recipes": {"experts": "mxfp8"}}, [None, None]),
        ({"recipe": "nvfp4", "high_precision_share": 0.5}, [None, "is in the last 1 of 2 blocks"]),
        ({"recipes": {"layers.1": "bf16"}}, [None, "is left in high precision by recipes.'layers.1'"]),
        ({"filter_fqns": ["layers.0"]}, ["is named in filter_fqns", None]),
    ]:
        model = mixtures()
        model.layers[0].moe.experts.tags = tags = {"init": "mine"}
        plan = convert(model, "mx_linear", mode="reference", **settings)
        assert model.layers[0].moe.experts.tags is tags
        for (fqn, experts), reason in zip(experts_of(model).items(), reasons, strict=True):
            assert isinstance(experts, QuantizedExperts) == (fqn in plan.experts) == (reason is None)
            assert reason is None or plan.skipped[fqn].startswith(reason)
    loss(model).backward()
    model = mixtures()
    convert(model, "mx_linear", recipe="bf16", recipes={"layers.0.moe": "fprop=bf16, dgrad=mxfp8, wgrad=mxfp8"})
    gemms = model.layers[0].moe.experts.recipe
    assert gemms.fprop.format is None and gemms.dgrad.format is not None


def test_features_without_whole_blocks_and_dtypes_are_refused():
    model = mixtures(hidden=48)
    line = r"\n  layers.0-1.moe.experts: it does not fit: out_features = 48 is not"
    with pytest.raises(ConfigError, match=f"nothing to convert(?s:.*){line}"):
        convert(model, "mx_linear", filter_fqns=["shared_experts", "output"])
    assert type(model.layers[0].moe.experts) is moe.GroupedExperts


def test_a_second_conversion_is_refused_and_other_converters_go_on():
    model = mixtures()
    convert(model, "mx_linear", mode="reference", filter_fqns=["shared_experts", "output"])
    expected = results(model)
    with pytest.raises(ConfigError, match=f"was converted before \\({EXPERTS} is an MXGroupedExperts"):
        convert(model, "mx_linear")
    assert len(convert(model, "decompose_k_router", example_inputs=(TOKENS,)).gates) == 2
    assert all(torch.allclose(a, b) for a, b in zip(results(model), expected, strict=True))


def scheduled(*tables, **settings):
    model = mixtures()
    plan = convert(model, "mx_linear", mode="reference", **settings)
    attach_schedule(model, plan.norms, parse_entries(tables, 10, {}, "mxnorm.schedule"))
    return model


def test_a_schedule_reaches_experts():
    unchanged = mixtures()
    convert(unchanged, "mx_linear", mode="reference")
    for change, settings in [
        ({"recipe": "unquantized", "modules": ["experts"]}, {"recipes": {"experts": "unquantized"}}),
        ({"recipe": "fprop=nvfp4"}, {"recipe": "fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8", "high_precision_share": 0.0}),
    ]:
        model, expected = scheduled({"from_step": 5, **change}), mixtures()
        convert(expected, "mx_linear", mode="reference", **settings)
        set_step(model, 4)
        assert same(results(model), results(unchanged))
        set_step(model, 5)
        assert same(results(model), results(expected)) and not same(results(expected), results(unchanged))


def test_native_nvfp4_keeps_experts(monkeypatch):
    monkeypatch.setattr(MXLinearConverter, "_mode_on", lambda *_: "native")
    settings = {"recipe": "wgrad=nvfp4, fprop=mxfp8, dgrad=mxfp8", "high_precision_share": 0.0}
    plan = convert(mixtures(), "mx_linear", mode="reference", **settings)
    assert plan.experts == [] and "native" in plan.skipped[EXPERTS]


def test_only_modules_with_stacked_weights_are_experts():
    listed = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(8, 8)]), "conv": nn.Conv1d(8, 8, 3)})
    assert find_experts(dict(listed.named_modules())) == {}
    found = find_experts(dict(mixtures().named_modules()))
    assert list(found) == [EXPERTS, "layers.1.moe.experts"]
    assert (found[EXPERTS].in_features, found[EXPERTS].out_features) == (DIM, 96)
