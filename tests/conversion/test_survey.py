"""Surveying a model: facts as values, and a model that stays as it was."""

import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mxtrain import convert
from mxtrain.conversion.norm_uses import NormUses
from mxtrain.conversion.survey import survey
from tests.support.conversion_models import llama


def test_a_survey_holds_the_facts_of_a_model():
    facts = survey(llama(), watch_norms=True)
    assert (facts.kind, facts.device_type, facts.converted, facts.unswappable) == ("Llama", "cpu", {}, {})
    assert facts.modules[:4] == ("tok_embeddings", "layers", "layers.0", "layers.0.attention_norm")
    assert facts.blocks == ("layers.0", "layers.1")
    assert list(facts.norms) == [f"layers.{i}.{n}" for i in (0, 1) for n in ("attention_norm", "ffn_norm")] + ["norm"]
    assert facts.norms["layers.1.ffn_norm"] == ((64,), 1e-6, True) and facts.lookalikes == {}
    assert len(facts.linears) == 15 and facts.linears["output"].out_features == 96
    uses: NormUses = facts.uses
    assert uses.linears["layers.0.ffn_norm"] == ("layers.0.feed_forward.w1", "layers.0.feed_forward.w3")
    assert uses.linears["norm"] == ("output",) and not any(uses.others.values()) and uses.unfollowed == ()
    assert set(uses.calls.values()) == {1}


def test_an_rms_norm_that_is_called_a_layer_norm_is_no_lookalike():
    t5 = type(
        "T5LayerNorm", (nn.Module,), {"forward": lambda self, x: nn.functional.rms_norm(x, (8,), self.weight, 1e-6)}
    )
    model = nn.Sequential(t5())
    model[0].eps, model[0].weight = 1e-6, nn.Parameter(torch.ones(8))
    facts = survey(model)
    assert list(facts.norms) == ["0"] and not facts.layer_norms and not facts.layer_norm_lookalikes


def test_norms_are_watched_only_when_asked():
    assert survey(llama()).uses is None
    assert survey(nn.Sequential(nn.Linear(2, 2)), watch_norms=True).uses is None, "there is no norm to watch"


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


def test_mxnorms_of_an_earlier_conversion_are_noticed():
    model = llama()
    convert(model)
    converted = survey(model).converted
    assert converted["layers.0.ffn_norm"] == "MXNorm" and converted["layers.1.attention.wo"] == "MXLinear"
