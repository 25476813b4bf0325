"""How many multiplications each weight does, and what share of them a conversion quantizes."""

import pytest
import torch
import torch.nn as nn

from mxtrain import convert
from mxtrain.conversion.plan import WeightUse, weight_uses
from mxtrain.conversion.survey import WeightFacts, find_weights
from mxtrain.formats.parse import get_recipe
from tests.support.conversion_models import DIM, FeedForward, llama, loss

MIXED = "fprop=nvfp4, dgrad=mxfp8, wgrad=bf16"


def weights_of(model):
    return find_weights(dict(model.named_modules()))


def test_a_linear_multiplies_and_an_embedding_is_looked_up():
    weights = weights_of(llama(layers=1))
    assert weights["layers.0.feed_forward.w1.weight"] == WeightFacts((128, 64), ("layers.0.feed_forward.w1",), 1.0, "")
    assert weights["tok_embeddings.weight"] == WeightFacts((96, 64), (), 1.0, "only looked up")
    assert len(weights) == 9, "four of attention, three of the feed-forward, embedding, output"
    uses = weight_uses(weights, {})
    assert uses["layers.0.feed_forward.w1.weight"] == WeightUse(128 * 64, 0.0, "")
    assert uses["tok_embeddings.weight"] == WeightUse(0, 0.0, "only looked up")


def test_a_tied_head_multiplies_under_its_own_name():
    model = llama(layers=1)
    model.output.weight = model.tok_embeddings.weight
    weights = weights_of(model)
    assert weights["output.weight"] == WeightFacts((96, 64), ("output",), 1.0, "")
    assert "tok_embeddings.weight" not in weights
    assert weight_uses(weights, {})["output.weight"].multiplications == 96 * 64


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.bias = nn.Parameter(torch.zeros(5, 7)), nn.Parameter(torch.zeros(7))
        self.up_bias, self.batched = nn.Parameter(torch.zeros(8, 7)), nn.Parameter(torch.zeros(1, 3, 7))


def test_other_weights_multiply_with_all_elements():
    model = nn.ModuleDict({"conv": nn.Conv1d(4, 6, 3), "positions": Positions(), "lookup": nn.EmbeddingBag(9, 2)})
    uses = weight_uses(weights_of(model), {})
    assert uses["positions.batched"].note == uses["conv.weight"].note == "", "no experts"
    assert {name: use.multiplications for name, use in uses.items()} == {
        "conv.weight": 72,
        "positions.table": 35,
        "positions.up_bias": 0,
        "positions.batched": 21,
        "lookup.weight": 0,
    }
    assert list(weights_of(Positions())) == ["table", "up_bias", "batched"], "the model itself may hold weights"


class Stacked(nn.Module):
    """As Hugging Face's mixtures hold their experts."""

    def __init__(self, experts):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(experts, DIM, 2 * DIM))


class Mixture(nn.Module):
    def __init__(self, experts, **attributes):
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, 8, bias=False), experts
        self.shared_experts = nn.Linear(DIM, DIM, bias=False)
        for name, value in attributes.items():
            setattr(self, name, value)


class TopKRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.top_k = 2


ONE_IN_FOUR = (0.25, "top 2 of 8 experts")


def test_of_the_experts_a_token_uses_top_k():
    for attributes, expected in [
        ({"top_k": 2}, ONE_IN_FOUR),
        ({"num_experts_per_tok": 2}, ONE_IN_FOUR),
        ({"router": TopKRouter()}, ONE_IN_FOUR),
        ({}, (1.0, "all 8 experts count: no top_k was found")),
        ({"top_k": 9}, (1.0, "all 8 experts count: no top_k was found")),
        ({"top_k": 0.5}, (1.0, "all 8 experts count: no top_k was found")),
    ]:
        for experts in (
            Stacked(8),
            nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM)) for _ in range(8)),
            nn.ModuleDict({f"expert_{i}": nn.Linear(DIM, DIM) for i in range(8)}),
        ):
            weights = weights_of(nn.ModuleDict({"layer": Mixture(experts, **attributes)}))
            of_experts = {name: facts for name, facts in weights.items() if ".experts." in name}
            assert len(of_experts) == (1 if isinstance(experts, Stacked) else 8)
            assert all((facts.share, facts.note) == expected for facts in of_experts.values())
            for other in ("layer.gate.weight", "layer.shared_experts.weight"):
                assert (weights[other].share, weights[other].note) == (1.0, "")


def test_each_of_the_three_products_counts():
    weights = weights_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    for recipe, quantized in [("mxfp8", 1.0), ("unquantized", 0.0), (MIXED, 2 / 3)]:
        uses = weight_uses(weights, {"1": get_recipe(recipe)})
        assert [use.quantized for use in uses.values()] == [0.0, quantized]


def test_the_plan_holds_the_shares_and_says_them():
    plan = convert(llama(), "mx_linear", recipes={"layers.1": "unquantized"}, mode="reference")
    layer, head = 4 * 64 * 64 + 3 * 128 * 64, 96 * 64
    assert plan.quantized_share == pytest.approx(layer / (2 * layer + head))
    assert plan.headline == (
        "mx_linear mxfp8 + 1 by name, mode reference: "
        "14 linears swapped, 1 kept; 46.5 % of the weights' multiplications are quantized"
    )
    lines = [line for line in plan.details.splitlines() if "%" in line or "high precision" in line]
    assert lines[0] == "  layers.1.attention.wq: MXLinear, unquantized; 4.7 % of the multiplications"
    assert lines[-2] == "  output: kept because it is the output head; 7.0 % of the multiplications"
    assert lines[-1] == "  tok_embeddings.weight: in high precision, only looked up" and len(lines) == 9


def test_only_what_is_exact_is_said_to_be_all_or_nothing():
    for settings, vocab, said in [
        ({"filter_fqns": []}, 32, "100 %"),
        ({"recipe": "unquantized"}, 1, "0 %"),
        ({"recipe": "mxfp8"}, 1, "more than 99.9 %"),
    ]:
        plan = convert(llama(layers=4, vocab=vocab), "mx_linear", mode="reference", **settings)
        assert plan.headline.endswith(f"; {said} of the weights' multiplications are quantized")


class SparseMixture(nn.Module):
    """As older models on the Hugging Face hub: a loop over experts, which runs on no meta device."""

    def __init__(self):
        super().__init__()
        self.gate, self.top_k = nn.Linear(DIM, 4, bias=False), 2
        self.experts = nn.ModuleList(FeedForward() for _ in range(4))

    def forward(self, x):
        scores, chosen = self.gate(x).softmax(-1).topk(self.top_k)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).any(-1).nonzero(as_tuple=True)
            y[rows] += expert(x[rows]) * scores.sum(-1)[rows].unsqueeze(-1)
        return y


def test_experts_in_a_list_count_by_top_k_quantized_or_not():
    model = llama()
    model.layers[1].feed_forward = SparseMixture()
    model.output.weight = model.tok_embeddings.weight
    plan = convert(model, mode="reference", filter_fqns=["experts.3"])
    expert, dense, gate, head = 3 * 128 * 64, 4 * 64 * 64, 4 * 64, 96 * 64
    total = 2 * dense + expert + 4 * expert * 2 / 4 + gate + head
    assert sum(use.multiplications for use in plan.weights.values()) == total
    quantized = 2 * dense + expert + 3 * expert * 2 / 4
    assert plan.quantized_share == pytest.approx(quantized / total)
    assert plan.weights["layers.1.feed_forward.experts.3.w2.weight"] == WeightUse(
        64 * 128 / 2, 0.0, "top 2 of 4 experts"
    )
    loss(model).backward()
