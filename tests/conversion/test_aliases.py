"""Modules with several names, and errors on the way: weights and names stay whatever happens."""

import pytest
import torch
import torch.nn as nn

from mxtrain import ConfigError, FusedRMSNorm, MXLinear, MXNorm, MXNormLinear, convert
from tests.support.conversion_models import DIM, TOKENS, Layer, Llama

ROWS = torch.randn(3, DIM, generator=torch.Generator().manual_seed(0))


class TwoNames(Llama):
    """The output head, and the whole list of layers, have a second name each."""

    def __init__(self):
        super().__init__()
        self.head, self.backbone = self.output, self.layers


class Repeated(nn.Module):
    """One block object, three times."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer()] * 3)

    def forward(self, x):
        x = x[None]
        for layer in self.layers:
            x = layer(x)
        return x


class SharedLinear(nn.Module):
    """Two norms feed one linear object, which has two names."""

    def __init__(self):
        super().__init__()
        self.a = nn.ModuleDict({"norm": nn.RMSNorm(DIM), "linear": nn.Linear(DIM, DIM)})
        self.b = nn.ModuleDict({"norm": nn.RMSNorm(DIM), "linear": self.a["linear"]})
        self.c = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, DIM))

    def forward(self, x):
        return self.c(self.a["linear"](self.a["norm"](x)) + self.b["linear"](self.b["norm"](x.flip(0))))


class SharedNorm(nn.Module):
    """One norm object under two names feeds one linear each."""

    def __init__(self):
        super().__init__()
        self.a = nn.ModuleDict({"norm": nn.RMSNorm(DIM), "linear": nn.Linear(DIM, DIM)})
        self.b = nn.ModuleDict({"norm": self.a["norm"], "linear": nn.Linear(DIM, DIM)})

    def forward(self, x):
        return self.a["linear"](self.a["norm"](x)) + self.b["linear"](self.b["norm"](x.flip(0)))


def state_of(model):
    """Every name of every module and parameter, and copies of the values."""
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return modules, parameters, {name: parameter.detach().clone() for name, parameter in parameters.items()}


def assert_weights_stay(model, before):
    _, parameters, values = before
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameters[name] and torch.equal(after[name], values[name]) for name in after)


def test_a_module_is_swapped_under_all_its_names():
    for kind, inputs, converter in [
        (TwoNames, TOKENS, "mxnorm"),
        (TwoNames, TOKENS, "fused_norm"),
        (Repeated, ROWS, "mx_linear"),
        (SharedNorm, ROWS, "mxnorm"),
    ]:
        torch.manual_seed(0)
        model = kind()
        before = state_of(model)
        expected = model(inputs)
        settings = {} if converter == "fused_norm" else {"filter_fqns": [], "mode": "reference"}
        if converter == "mxnorm":
            settings["example_inputs"] = (inputs,)
        plan = convert(model, converter, **settings)
        assert_weights_stay(model, before)
        modules, old_names = dict(model.named_modules(remove_duplicate=False)), {}
        for name, module in before[0].items():
            old_names.setdefault(id(module), []).append(name)
        for names in old_names.values():
            assert len({id(modules[name]) for name in names}) == 1, f"{names} are one module, as before"
        swapped = (MXNorm, MXNormLinear, MXLinear, FusedRMSNorm)
        assert plan.swaps and all(type(modules[fqn]) in swapped for fqn in plan.swaps)
        torch.testing.assert_close(model(inputs), expected, rtol=0.2, atol=0.2)


def test_a_block_that_runs_three_times_keeps_its_norms():
    model = Repeated()
    before = state_of(model)
    with pytest.raises(ConfigError, match="layers.0.ffn_norm: it feeds .*w1, .*w3, which is called more than once"):
        convert(model, filter_fqns=[], mode="reference", example_inputs=(ROWS,))
    assert dict(model.named_modules(remove_duplicate=False)) == before[0]
    assert_weights_stay(model, before)


def test_a_linear_that_two_norms_feed_keeps_both():
    model = SharedLinear()
    before = state_of(model)
    plan = convert(model, filter_fqns=[], mode="reference", example_inputs=(ROWS,))
    assert plan.norms == {"c.0": ["c.1"]} and plan.linears == ["a.linear"]
    assert plan.skipped == dict.fromkeys(("a.norm", "b.norm"), "feeds a.linear, which is called more than once")
    assert model.a["linear"] is model.b["linear"] and type(model.a["linear"]) is MXLinear
    assert_weights_stay(model, before)
    model(ROWS).sum().backward()


@pytest.mark.parametrize("broken", ["forward", "copy", "build"])
def test_an_error_leaves_the_model_as_it_was(broken, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("broken")

    place = {"forward": (TwoNames, "forward"), "copy": (Layer, "__deepcopy__"), "build": (MXLinear, "from_linear")}
    model = TwoNames()
    before = state_of(model)
    monkeypatch.setattr(*place[broken], fail, raising=False)
    with pytest.raises((ConfigError, RuntimeError)):
        convert(model)
    assert dict(model.named_modules(remove_duplicate=False)) == before[0]
    assert_weights_stay(model, before)
