"""The gates of routers."""

import pytest
import torch.nn as nn

from mxtrain import convert
from mxtrain.conversion.gates import find_other_gates
from mxtrain.conversion.recognition import find_gates


class TopKRouter(nn.Module):
    """As the gates of transformers 5."""


def gate() -> nn.Linear:
    return nn.Linear(8, 4)


@pytest.mark.parametrize(
    "name, model",
    [
        ("gate", nn.ModuleDict({"gate": gate(), "experts": nn.ModuleList()})),
        ("gating", nn.ModuleDict({"gating": gate(), "experts": nn.ModuleList()})),
        ("router", nn.ModuleDict({"router": gate(), "up": gate()})),
        ("router.layer", nn.ModuleDict({"router": nn.ModuleDict({"layer": gate()}), "input": gate()})),
        (
            "mlp.gate.wg",
            nn.ModuleDict({"mlp": nn.ModuleDict({"gate": nn.ModuleDict({"wg": gate()}), "experts": gate()})}),
        ),
    ],
)
def test_a_gate_beside_experts_or_called_router(name, model):
    assert list(find_gates(model)) == [name] and not find_other_gates(dict(model.named_modules()))


def test_a_router_of_two_layers_stays_whole():
    layers = nn.ModuleDict({"up": nn.Linear(32, 32), "down": nn.Linear(32, 32)})
    model = nn.ModuleDict({"router": layers, "out": nn.Linear(32, 32)})
    assert not find_gates(model)
    report = convert(model, "mx_linear")
    assert report.linears == ["out"] and list(report.skipped) == ["router.up", "router.down"]
    assert all("is a part of a router" in reason for reason in report.skipped.values())
    assert find_other_gates(dict(model.named_modules())) == {"router": "ModuleDict"}


def test_a_mixture_that_is_called_router_is_no_gate():
    mixture = nn.ModuleDict({"wg": nn.Linear(32, 32), "experts": nn.ModuleList([nn.Linear(32, 32)])})
    assert convert(nn.ModuleDict({"router": mixture}), "mx_linear").linears == ["router.wg", "router.experts.0"]


def test_the_gate_of_a_feed_forward_is_none():
    assert not find_gates(nn.ModuleDict({"gate": gate(), "up": gate(), "gating": gate()}))


def test_gates_that_hold_no_linear():
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"gate": TopKRouter(), "experts": nn.ModuleList()})})
    assert find_other_gates(dict(model.named_modules())) == {"mlp.gate": "TopKRouter"} and not find_gates(model)
    router = nn.ModuleDict({"router": nn.ModuleDict({"layer": gate(), "act": nn.Softmax(1)})})
    assert not find_other_gates(dict(router.named_modules())), "its parts are no gates of their own"
