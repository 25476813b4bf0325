"""Linears, gates of routers, blocks and output heads."""

import pytest
import torch.nn as nn

from mxtrain import ConfigError, DecomposeKRouter, convert
from mxtrain.conversion.layers import LinearFacts, find_blocks, find_heads, find_linears

D, V = 32, 96


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.output = nn.RMSNorm(D), nn.Linear(D, D)


class OtherBlock(Block):
    pass


class Model(nn.Module):
    """Children by name, in this order."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def blocks(count: int = 2) -> list[nn.Module]:
    return [Block() for _ in range(count)]


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    return find_blocks(dict(model.named_modules()))


def heads_of(model: nn.Module) -> tuple[str, ...]:
    modules = dict(model.named_modules())
    return find_heads(modules, find_linears(modules), find_blocks(modules))


NANO_GPT = nn.ModuleDict(
    {"wte": nn.Embedding(V, D), "wpe": nn.Embedding(D, D), "h": nn.ModuleList(blocks()), "ln_f": nn.LayerNorm(D)}
)


def test_blocks_are_the_layers_that_a_model_repeats():
    for model, expected in [
        (Model(layers=nn.ModuleList(blocks())), ("layers.0", "layers.1")),
        (Model(layers=nn.ModuleDict({"0": Block()})), ("layers.0",)),
        (Model(layers=nn.ModuleList([Block(), OtherBlock()])), ("layers.0", "layers.1")),
        (Model(encoder=nn.ModuleList(blocks(1)), decoder=nn.ModuleList(blocks(1))), ("encoder.0", "decoder.0")),
        (Model(transformer=NANO_GPT), ("transformer.h.0", "transformer.h.1")),
        (nn.ModuleDict({"encoder": Block(), "decoder": OtherBlock()}), ()),
        (Model(layers=nn.ModuleList([Model(experts=nn.ModuleList(blocks()))])), ("layers.0",)),
        (Model(layers=nn.ModuleList(blocks(1)), heads=nn.ModuleList([nn.Linear(D, V)])), ("layers.0",)),
        (Model(layers=nn.ModuleList([nn.ModuleList([Block(), nn.Linear(D, D)])] * 1)), ("layers.0",)),
        (Model(norms=nn.ModuleList([nn.RMSNorm(D)])), ()),
    ]:
        assert blocks_of(model) == expected, model


def test_heads_are_known_by_name_or_by_the_shape_of_an_embedding():
    def layers():
        return nn.ModuleList(blocks())

    for model, expected in [
        (Model(lm_head=nn.Linear(D, V), layers=layers(), other=nn.Linear(D, D)), ("lm_head",)),
        (Model(m=nn.ModuleDict({"layers": layers(), "lm_head": nn.Linear(D, V)})), ("m.lm_head",)),
        (Model(e=nn.Embedding(V, D), layers=layers(), up=nn.Linear(D, V), h=nn.Linear(D, V)), ("h",)),
        (Model(patches=nn.Linear(48, D), layers=layers(), pooler=nn.Linear(D, D)), ()),
    ]:
        assert heads_of(model) == expected, model


def test_a_share_of_no_blocks_is_refused_and_the_recipes_own_is_in_the_plan():
    model = Model(**{name: Model(wo=nn.Linear(D, D)) for name in ("block0", "block1")}, lm_head=nn.Linear(D, V))
    line = "high_precision_share = {} finds no blocks in this Model: name the modules to keep in filter_fqns"
    line += ", together with the output head: lm_head"
    with pytest.raises(ConfigError, match=f"^{line.format(0.5)}$"):
        convert(model, "mx_linear", high_precision_share=0.5)
    plan = convert(model, "mx_linear", recipe="nvfp4")
    assert plan.linears == ["block0.wo", "block1.wo"] and line.format(0.15) in plan.details.splitlines()[0]


class Router(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.gate = linear


def test_the_linears_of_a_model():
    shared = nn.Linear(8, 8)
    routers = {"router": Router(nn.Linear(8, 4)), "own": Router(DecomposeKRouter(8, 4))}
    model = nn.ModuleDict({**routers, "a": nn.Sequential(shared), "b": nn.Linear(8, 8)})
    model["b"].weight = shared.weight
    linears = find_linears(dict(model.named_modules()))
    common = dict(is_gate=True, shares_weight=False)
    assert linears["router.gate"] == LinearFacts(8, 4, "Linear", is_plain=True, **common)
    assert linears["own.gate"] == LinearFacts(8, 4, "DecomposeKRouter", is_plain=False, **common)
    assert [fqn for fqn, facts in linears.items() if facts.shares_weight] == ["a.0", "b"]


def gate() -> nn.Linear:
    return nn.Linear(8, 4)


def gates_of(model: nn.Module) -> list[str]:
    return [fqn for fqn, facts in find_linears(dict(model.named_modules())).items() if facts.is_gate]


def test_a_gate_beside_experts_or_called_router():
    gates = nn.ModuleDict({"gate": nn.ModuleDict({"wg": gate()}), "experts": gate()})
    for name, model in [
        ("gate", nn.ModuleDict({"gate": gate(), "experts": nn.ModuleList()})),
        ("gating", nn.ModuleDict({"gating": gate(), "experts": nn.ModuleList()})),
        ("router", nn.ModuleDict({"router": gate(), "up": gate()})),
        ("router.layer", nn.ModuleDict({"router": nn.ModuleDict({"layer": gate()}), "input": gate()})),
        ("mlp.gate.wg", nn.ModuleDict({"mlp": gates})),
    ]:
        assert gates_of(model) == [name]
    assert not gates_of(nn.ModuleDict({"gate": gate(), "up": gate(), "gating": gate()})), "of a feed-forward"


def test_a_mixture_that_is_called_router_is_no_gate():
    mixture = nn.ModuleDict({"wg": nn.Linear(32, 32), "experts": nn.ModuleList([nn.Linear(32, 32)])})
    assert convert(nn.ModuleDict({"router": mixture}), "mx_linear").linears == ["router.wg", "router.experts.0"]
