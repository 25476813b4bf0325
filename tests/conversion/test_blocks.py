"""Blocks and output heads."""

import pytest
import torch.nn as nn

from mxtrain import ConfigError, convert
from mxtrain.conversion.blocks import find_blocks, find_heads
from mxtrain.conversion.recognition import find_linears

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


STAGES = ("stages.0.0", "stages.0.1", "stages.1.0")
NANO_GPT = nn.ModuleDict(
    {"wte": nn.Embedding(V, D), "wpe": nn.Embedding(D, D), "h": nn.ModuleList(blocks()), "ln_f": nn.LayerNorm(D)}
)


@pytest.mark.parametrize(
    "model, expected",
    [
        (Model(layers=nn.ModuleList(blocks())), ("layers.0", "layers.1")),
        (Model(layers=nn.ModuleDict({"0": Block()})), ("layers.0",)),
        (Model(layers=nn.ModuleList([Block(), OtherBlock()])), ("layers.0", "layers.1")),
        (Model(encoder=nn.ModuleList(blocks(1)), decoder=nn.ModuleList(blocks(1))), ("encoder.0", "decoder.0")),
        (Model(transformer=NANO_GPT), ("transformer.h.0", "transformer.h.1")),
        (nn.ModuleDict({"a": Block(), "b": Block(), "head": nn.Linear(D, V)}), ("a", "b")),
        (nn.ModuleDict({"encoder": Block(), "decoder": OtherBlock()}), ()),
        (nn.Sequential(nn.Embedding(V, D), *blocks(3), nn.RMSNorm(D), nn.Linear(D, V)), ("1", "2", "3")),
        (Model(models=nn.ModuleList([Model(emb=nn.Embedding(V, D), h=nn.ModuleList(blocks(1)))])), ("models.0.h.0",)),
        (Model(layers=nn.ModuleList([Model(experts=nn.ModuleList(blocks()))])), ("layers.0",)),
        (Model(layers=nn.ModuleList(blocks(1)), heads=nn.ModuleList([nn.Linear(D, V)])), ("layers.0",)),
        (Model(layers=nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])), ("layers.0", "layers.1")),
        (Model(layers=nn.ModuleList([Model(rel=nn.Embedding(4, 2), block=Block())])), ("layers.0",)),
        (Model(layers=nn.ModuleList([nn.ModuleList([Block(), nn.Linear(D, D)])] * 1)), ("layers.0",)),
        (Model(stages=nn.ModuleList([nn.ModuleList(blocks()), nn.ModuleList(blocks(1))])), STAGES),
        (Model(layers=nn.ModuleList(blocks(1)), proj=nn.Sequential(*blocks())), ("layers.0",)),
        (nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)), ()),
        (Model(norms=nn.ModuleList([nn.RMSNorm(D)])), ()),
    ],
)
def test_blocks_are_the_layers_that_a_model_repeats(model, expected):
    assert blocks_of(model) == expected


def test_a_second_name_of_a_block_does_not_count():
    shared = nn.ModuleList(blocks(1))
    assert blocks_of(Model(layers=shared, again=shared)) == ("layers.0",)
    layers = nn.ModuleList(blocks(4))
    halves = Model(layers=layers, first=layers[:2], last=layers[2:], all=nn.Sequential(*layers))
    assert blocks_of(halves) == ("layers.0", "layers.1", "layers.2", "layers.3")
    assert convert(halves, "mx_linear", mode="reference", filter_fqns=[]).linears == [
        f"layers.{i}.output" for i in range(4)
    ]


@pytest.mark.parametrize(
    "model, expected",
    [
        (Model(lm_head=nn.Linear(D, V), layers=nn.ModuleList(blocks()), other=nn.Linear(D, D)), ("lm_head",)),
        (Model(m=nn.ModuleDict({"layers": nn.ModuleList(blocks()), "lm_head": nn.Linear(D, V)})), ("m.lm_head",)),
        (nn.ModuleDict({"embedding": nn.Embedding(V, D), "lm_head": nn.Linear(D, V)}), ("lm_head",)),
        (Model(e=nn.Embedding(V, D), layers=nn.ModuleList(blocks()), up=nn.Linear(D, V), h=nn.Linear(D, V)), ("h",)),
        (Model(h=nn.Linear(D, V), e=nn.Embedding(V, D), pos=nn.Embedding(D, D), mix=nn.Linear(D, D)), ("h",)),
        (Model(e=nn.Embedding(V - 1, D), layers=nn.ModuleList(blocks()), head=nn.Linear(D, V)), ("head",)),
        (Model(e=nn.Embedding(D, D), layers=nn.ModuleList(blocks()), head=nn.Linear(D, D)), ("head",)),
        (Model(patches=nn.Linear(48, D), layers=nn.ModuleList(blocks()), head=nn.Linear(D, 10)), ("head",)),
        (Model(patches=nn.Linear(48, D), layers=nn.ModuleList(blocks())), ()),
        (Model(layers=nn.ModuleList(blocks()), pooler=nn.Linear(D, D)), ()),
        (Model(layers=nn.ModuleList(blocks()), last=Model(modulation=nn.Linear(D, 4))), ()),
        (Model(layers=nn.ModuleList(blocks()), text=nn.Linear(D, 4), image=nn.Linear(D, 4)), ()),
        (Model(moe=Model(experts=nn.ModuleList(blocks())), ff=Model(up=nn.Linear(D, 32), down=nn.Linear(32, D))), ()),
        (Model(h=nn.Linear(D, D), e=nn.Embedding(D, D), layers=nn.ModuleList(blocks())), ("h",)),
        (nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)), ()),
    ],
)
def test_heads_are_known_by_name_shape_or_place(model, expected):
    assert heads_of(model) == expected


def test_a_share_of_no_blocks_is_refused():
    model = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 32))
    with pytest.raises(
        ConfigError, match="^high_precision_share = 0.5 finds no blocks in this Sequential: name the mod"
    ):
        convert(model, "mx_linear", high_precision_share=0.5)
    assert convert(model, "mx_linear", recipe="nvfp4").linears == ["1"], "the recipe's own share"
