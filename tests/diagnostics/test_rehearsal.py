"""The errors that a rehearsal measures are those of layers that are converted with the recipe."""

import copy

import pytest
import torch
from torch import nn

import mxtrain
from mxtrain import MXNormLinear
from mxtrain.diagnostics.recording import Numerics
from mxtrain.diagnostics.rehearsal import UNQUANTIZED, Rehearsal
from mxtrain.formats.parse import get_recipe
from mxtrain.nn.gated_norm import GatedMXNorm
from mxtrain.rng.rounding import set_rounding_step
from tests.support.expert_checks import quantized_experts
from tests.support.layer_checks import draw, fill

TOKENS, DIM, HIDDEN = 64, 64, 96
NAMES = ["mxfp8", "fprop=nvfp4, dgrad=mxfp8, wgrad=nvfp4"]


def relative(got, want) -> float:
    return ((got - want).norm() / want.norm()).item()


def converted(model, converter: str, recipe: str):
    model = copy.deepcopy(model)
    mxtrain.convert(model, converter, example_inputs=(torch.zeros(32, DIM),), recipe=recipe, mode="reference")
    return model


def rehearse(model, *inputs, dy):
    rehearsal = Rehearsal({name: get_recipe(name) for name in NAMES}, TOKENS, model)
    with rehearsal.recording():
        model(*inputs).backward(dy)
    return rehearsal.errors


class Gated(nn.Module):
    def __init__(self, recipe):
        super().__init__()
        self.norm = GatedMXNorm(DIM, estimator="exact", recipe=recipe, mode="reference")
        self.norm.groups = 2
        self.linear = MXNormLinear(DIM, HIDDEN, bias=False, recipe=recipe, mode="reference")
        fill(self)
        nn.init.ones_(self.norm.weight)  # so that the gradient of the weight is wgrad's result

    def forward(self, x, gate):
        return self.linear(self.norm(x, gate))


@pytest.mark.parametrize("converter, name", [("mx_linear", NAMES[0]), ("mx_linear", NAMES[1]), ("mxnorm", NAMES[0])])
def test_errors_of_a_linear_and_behind_a_norm(converter, name):
    torch.manual_seed(0)
    set_rounding_step(0)
    plain = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, HIDDEN, bias=False))
    if converter == "mx_linear":
        plain[0] = nn.Identity()  # so that the gradient of x is dgrad's result
    x, dy, results = draw(TOKENS, DIM, seed=1), draw(TOKENS, HIDDEN, seed=2), []
    for recipe in (name, UNQUANTIZED):
        model, own = converted(plain, converter, recipe), x.clone().requires_grad_()
        y = model(own)
        y.backward(dy)
        results.append((y.detach(), own.grad, model[1].weight.grad))
    got = rehearse(model, x.clone().requires_grad_(), dy=dy)["1", name].tolist()
    wanted = [relative(*pair) for pair in zip(*results)]
    if converter == "mxnorm":
        assert 0.02 < got.pop(1) < 0.05 and wanted.pop(1)
    assert got == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("name", [NAMES[0], "nvfp4_row"])
def test_errors_behind_a_gated_norm(name):
    set_rounding_step(0)
    recipe, results = get_recipe(name, stochastic_rounding=False if "nvfp4" in name else None), []
    x, gate, dy = (draw(TOKENS, size, seed=seed) for seed, size in enumerate((DIM, DIM, HIDDEN)))
    for own in (recipe, get_recipe(UNQUANTIZED)):
        block = Gated(own)
        y = block(x.clone().requires_grad_(), gate)
        y.backward(dy)
        results.append((y.detach(), block.linear.weight.grad))
        numerics = Numerics(1, None, TOKENS, [block])
        with numerics.recording():
            block(x.clone().requires_grad_(), gate).backward(dy)
        if own is recipe:
            figures = numerics.figures()
    rehearsal = Rehearsal({name: recipe}, TOKENS, block)
    with rehearsal.recording():
        block(x.clone().requires_grad_(), gate).backward(dy)
    wanted = pytest.approx([relative(*pair) for pair in zip(*results)], rel=1e-4)
    assert rehearsal.errors["linear", name].tolist()[::2] == wanted
    assert [figures[f"numerics/linear/{gemm}_error"] for gemm in ("fprop", "wgrad")] == wanted
    assert figures["numerics/norm/rms_ratio_max"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_errors_of_experts(name):
    set_rounding_step(0)
    counts = torch.tensor([32, 0, 29, 3])
    x, dy = draw(TOKENS, DIM, seed=1), draw(TOKENS, DIM, seed=2)
    results = []
    for recipe in (name, UNQUANTIZED):
        experts, own = quantized_experts(DIM, HIDDEN, 4, recipe), x.clone().requires_grad_()
        y = experts(own, counts)
        y.backward(dy)
        results.append((y.detach(), own.grad, torch.cat([w.grad.flatten() for w in experts.weights])))
    got = rehearse(experts, x.clone().requires_grad_(), counts, dy=dy)["", name]
    assert got.tolist() == pytest.approx([relative(*pair) for pair in zip(*results)], rel=1e-4)
    assert experts.recipe.name == UNQUANTIZED
