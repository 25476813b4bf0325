"""Surveying a model: facts as values, and a model that stays as it was."""

import collections
import dataclasses
import functools

import pytest
import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mxtrain import convert
from mxtrain.conversion.forward_pass import Uses
from mxtrain.conversion.norms import NormFacts
from mxtrain.conversion.survey import survey
from tests.support.conversion_models import DIM, llama


def test_a_survey_holds_the_facts_of_a_model():
    facts = survey(llama(), watch_norms=True)
    assert (facts.kind, facts.device_type, facts.converted, facts.unswappable) == ("Llama", "cpu", {}, {})
    assert list(facts.names)[:4] == ["tok_embeddings", "layers", "layers.0", "layers.0.attention_norm"]
    assert facts.blocks == ("layers.0", "layers.1")
    assert list(facts.norms) == [f"layers.{i}.{n}" for i in (0, 1) for n in ("attention_norm", "ffn_norm")] + ["norm"]
    assert facts.norms["layers.1.ffn_norm"] == NormFacts(nn.RMSNorm, (64,), 1e-6, recognised="RMSNorm by type")
    assert not any(facts.lookalikes.values())
    assert len(facts.linears) == 15 and facts.linears["output"].out_features == 96
    uses: Uses = facts.uses
    assert uses.linears["layers.0.ffn_norm"] == ["layers.0.feed_forward.w1", "layers.0.feed_forward.w3"]
    assert uses.linears["norm"] == ["output"] and not any(uses.others.values()) and uses.unfollowed == []
    assert set(uses.calls.values()) == {1}


def test_devices():
    with torch.device("meta"):
        assert survey(llama()).device_type is None
    model = llama()
    model.output = nn.Linear(64, 96, device="meta")
    assert survey(model).device_type == "cpu", "parameters on the meta device have no device yet"
    with FakeTensorMode():
        model.output.weight = nn.Parameter(torch.empty(96, 64, device="cuda"))
    assert survey(model).device_type is None, "there are two"


def test_surveying_leaves_the_model_as_it_was():
    model = llama()
    state, modules = {name: (p, p.clone()) for name, p in model.named_parameters()}, dict(model.named_modules())
    survey(model, watch_norms=True)
    assert dict(model.named_modules()) == modules
    assert all(p is state[name][0] and torch.equal(p, state[name][1]) for name, p in model.named_parameters())
    assert all("forward" not in vars(module) for module in model.modules())


class SkipsAtRandom(nn.Sequential):
    """Stochastic depth, of which the survey sees one draw."""

    def forward(self, x):
        return super().forward(x) if torch.rand(()) < 1 else x


def test_surveying_draws_no_random_numbers_of_the_user():
    before = torch.get_rng_state()
    model = SkipsAtRandom(nn.RMSNorm(64, device="meta"), nn.Linear(64, 64, device="meta"))
    survey(model, (torch.zeros(1, 64),), watch_norms=True)
    assert torch.equal(torch.get_rng_state(), before)


class Listed(nn.Module):
    """Holds its linears in a list, too, and calls them from there."""

    def __init__(self, held):
        super().__init__()
        self.norm, self.a, self.b = nn.RMSNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.held = held(self)

    def forward(self, x):
        call = self.held if callable(self.held) else next(iter(self.held.values() if "a" in self.held else self.held))
        return self.b(call(self.norm(x)))


class Caller:
    """A plain object, whose attributes are no children of a module."""

    def __init__(self, linear):
        self.linear = linear

    def __call__(self, x):
        call = self.linear[0] if isinstance(self.linear, list) else self.linear
        return call(x)


@dataclasses.dataclass(slots=True, eq=False)
class Slots:
    linear: nn.Linear

    def __call__(self, x):
        return self.linear(x)


def calling(linear):
    return lambda x: linear(x)


@pytest.mark.parametrize(
    "held",
    [
        lambda m: [m.a],
        lambda m: (m.a,),
        lambda m: {"a": m.a},
        lambda m: {m.a},
        lambda m: m.a.forward,
        lambda m: functools.partial(m.a.forward),
        lambda m: Caller(m.a),
        lambda m: calling(m.a),
        lambda m: Caller(Caller(Caller([m.a]))),
        lambda m: [nn.Sequential(m.a)],
        lambda m: collections.deque([m.a]),
        lambda m: lambda x, a=m.a: a(x),
        lambda m: lambda x, *, a=m.a: a(x),
        lambda m: Slots(m.a),
    ],
)
def test_a_linear_that_a_list_holds_as_well_stays(held):
    model = nn.Sequential(Listed(held))
    plan = convert(model, "mx_linear", mode="reference")
    assert plan.linears == ["0.b"]
    assert plan.skipped["0.a"] == (
        "is also held by 0.held, which a swap would not reach: hold it as a child module only"
    )
    with pytest.raises(ValueError, match="0.norm: (feeds 0.a, is also held by 0.held|its output is used by .*linear)"):
        convert(nn.Sequential(Listed(held)), filter_fqns=[], example_inputs=(torch.zeros(3, DIM),))


def test_a_linear_that_only_it_itself_holds_is_swapped():
    model = Listed(lambda m: [m.b])
    model.a.state = Caller(model.a)
    model.circle = circle = Caller(None)
    circle.linear = circle
    assert convert(model, "mx_linear", mode="reference").linears == ["a"]
