"""Surveying a model: facts as values, and a model that stays as it was."""

import pytest
import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mxtrain import ConfigError
from mxtrain.conversion.forward_pass import Uses
from mxtrain.conversion.layers import NormFacts
from mxtrain.conversion.survey import matches, selected, survey
from tests.support.conversion_models import llama


def test_a_survey_holds_the_facts_of_a_model():
    facts = survey(llama(), watch_norms=True)
    assert (facts.kind, facts.device_type, facts.converted, facts.unswappable) == ("Llama", "cpu", {}, {})
    assert list(facts.fqns)[:4] == ["tok_embeddings", "layers", "layers.0", "layers.0.attention_norm"]
    assert facts.blocks == ("layers.0", "layers.1")
    assert list(facts.norms) == [f"layers.{i}.{n}" for i in (0, 1) for n in ("attention_norm", "ffn_norm")] + ["norm"]
    assert facts.norms["layers.1.ffn_norm"] == NormFacts(nn.RMSNorm, (64,), 1e-6)
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


def test_patterns_match_whole_segments():
    for fqn, pattern, expected in [
        ("layers.1.attention.wq", "layers.1", True),
        ("layers.10.attention.wq", "layers.1", False),
        ("layers.10.attention.wq", "layers.1*", True),
        ("layers.3.attention.wq", "layers.[0-3]", True),
        ("layers.3.attention.wq", "wq", True),
        ("layers.3.attention.wq", "w", False),
        ("layers.3.attention.wq", "attention.*", True),
        ("layers.3.attention", "attention.*", False),
    ]:
        assert matches(fqn, pattern) is expected, (fqn, pattern)


MODULES = ("embedding", "layers", *(f"layers.{i}{part}" for i in range(12) for part in ("", ".norm", ".wo")), "output")


def test_selected_modules_are_in_the_models_order():
    assert selected(MODULES, "layers.1", "filter_fqns") == ["layers.1", "layers.1.norm", "layers.1.wo"]
    assert selected(MODULES, "norm", "filter_fqns") == [f"layers.{i}.norm" for i in range(12)]
    for pattern, choices in {
        "wq": "embedding, layers, output, or a module inside of one",
        "layers.12": "layers.0 ... layers.11",
        "layers.99.wo": "layers.0 ... layers.11",
        "layers.*.wq": "layers.0.norm, layers.0.wo, or a module inside of one",
        "output.wo": "embedding, layers, output, or a module inside of one",
    }.items():
        with pytest.raises(ConfigError) as error:
            selected(MODULES, pattern, "field")
        assert str(error.value) == f"field: {pattern!r} matches no module; name one of {choices}"
