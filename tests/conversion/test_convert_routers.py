"""The gates of routers: swapped by their own converter, left alone by the others."""

import pytest
import torch
import torch.nn as nn

from mxtrain import ConfigError, DecomposeKRouter, convert
from tests.support.conversion_models import DIM, Layer, Llama, kinds, loss


class TokenRouter(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.gate = nn.Linear(DIM, 4, bias=bias)

    def forward(self, x):
        return torch.sigmoid(self.gate(x).float())


class MixtureLayer(Layer):
    """A layer whose ffn_norm feeds a router and nothing but linears, the router's gate among them."""

    def __init__(self, bias=False):
        super().__init__()
        self.router, self.gate = TokenRouter(bias), nn.Linear(DIM, DIM)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        h = self.ffn_norm(x)
        return x + self.gate(h) * self.router(h).sum(-1, keepdim=True)


def mixture():
    torch.manual_seed(0)
    model = Llama()
    model.layers = nn.ModuleList([Layer(), MixtureLayer(), MixtureLayer(bias=True)])
    return model


GATES = ["layers.1.router.gate", "layers.2.router.gate"]


def test_decompose_k_router_swaps_gates_of_routers_only():
    model = mixture()
    before, state = kinds(model), dict(model.named_parameters())
    expected = loss(model)
    report = convert(model, "decompose_k_router")
    assert report.gates == GATES and not (report.norms or report.linears or report.fused_norms or report.skipped)
    assert kinds(model) == before | dict.fromkeys(GATES, DecomposeKRouter)
    after = dict(model.named_parameters())
    assert list(after) == list(state) and all(after[name] is state[name] for name in state)
    assert str(report).splitlines() == [
        "decompose_k_router: 2 gates swapped, 0 kept",
        "  layers.1-2.router.gate: DecomposeKRouter, in high precision",
    ]
    torch.testing.assert_close(loss(model), expected, rtol=1e-5, atol=1e-5)
    loss(model).backward()
    assert all(model.get_submodule(gate).weight.grad.any() for gate in GATES)


def test_filtered_gates_and_those_of_another_class_stay():
    model = mixture()
    report = convert(model, "decompose_k_router", filter_fqns=["layers.1"])
    assert report.gates == GATES[1:] and report.skipped == {GATES[0]: "is named in filter_fqns"}
    report = convert(model, "decompose_k_router")
    assert report.gates == GATES[:1] and report.skipped == {GATES[1]: "is of class DecomposeKRouter"}
    stays = r"\n  layers.1-2.router.gate: it is of class DecomposeKRouter"
    with pytest.raises(ConfigError, match=f"nothing to convert in this Llama{stays}"):
        convert(model, "decompose_k_router")


@pytest.mark.parametrize("converter", ["mxnorm", "fused_norm"])
def test_decompose_k_router_goes_before_or_after_the_others(converter):
    """Which leave the gates alone, swapped or not, and the norms that feed them."""
    kwargs = {} if converter == "fused_norm" else {"mode": "reference", "filter_fqns": ["output"]}
    first, last = mixture(), mixture()
    convert(first, "decompose_k_router")
    of_first = convert(first, converter, **kwargs)
    of_last = convert(last, converter, **kwargs)
    convert(last, "decompose_k_router")
    assert kinds(first) == kinds(last) and repr(first) == repr(last)
    assert all(kinds(first)[gate] is DecomposeKRouter for gate in GATES)
    for report in (of_first, of_last):
        assert converter == "fused_norm" or all("router" in report.skipped[gate].lower() for gate in GATES)
    if converter == "mxnorm":
        assert "layers.1.ffn_norm" in of_first.skipped and "layers.1.ffn_norm" in of_last.skipped
        assert of_last.skipped["layers.1.ffn_norm"].startswith(f"feeds {GATES[0]}, which is the gate of a router")
    loss(first).backward()
