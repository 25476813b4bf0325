"""Diagnostics in training: they change nothing, and they measure every module that is swapped."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mxtrain
from mxtrain.analysis.metrics_file import NUMERICS as PREFIX
from mxtrain.analysis.numerics import by_figure
from mxtrain.diagnostics.recording import Numerics, check_patterns, figures_of, sampled_tokens
from mxtrain.diagnostics.totals import numbers
from mxtrain.errors import ConfigError
from mxtrain.formats.parse import get_recipe
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.rng.rounding import set_rounding_step
from tests.support.expert_checks import OfEqualCounts


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(64), nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Model()
    mxtrain.convert(model, example_inputs=(torch.randn(1, 32, 64),), mode="reference", filter_fqns=[])
    set_rounding_step(0)
    yield model
    torch._dynamo.reset()


def measure(model, x, fqns=None) -> dict[str, float]:
    numerics = Numerics(1, fqns, 64, [model])
    with numerics.recording():
        model(x).square().mean().backward()
    return numerics.figures()


def test_modules_that_are_called_with_a_keyword_are_measured(model, monkeypatch):
    x = torch.randn(2, 32, 64)
    expected = measure(model, x)
    call = nn.Module.__call__
    swapped = (MXNorm, QuantizedLinear)
    monkeypatch.setattr(nn.Module, "__call__", lambda m, *a: call(m, x=a[0]) if isinstance(m, swapped) else call(m, *a))
    assert len(expected) > 20 and measure(model, x) == expected


def test_compiled_blocks_are_measured_as_eager_ones_and_stay_compiled(model):
    eager, x = copy.deepcopy(model), torch.randn(2, 48, 64)
    model.layers[1].compile(backend="eager", fullgraph=True)
    set_rounding_step(1)
    before = model(x)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    set_rounding_step(0)
    figures = measure(model, x)
    set_rounding_step(1)
    assert torch.equal(model(x), before)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0
    set_rounding_step(0)
    assert measure(eager, x) == figures
    assert len(by_figure([{"step": 1, **figures}])["wgrad_error"]) == 4


def test_a_pass_leaves_no_trace(model):
    x = torch.randn(2, 48, 64)
    gradient = torch.ones(64)
    model.layers[0].norm.weight.grad = gradient
    state, calls = torch.get_rng_state(), model.layers[1].calls.clone()
    assert measure(model, x)
    assert model.layers[0].norm.weight.grad is gradient and torch.equal(gradient, torch.ones(64))
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["layers.0.norm.weight"]
    with Numerics(1, None, 64, [model]).recording():
        model(x).sum().backward()
        found = [name for name, p in model.named_parameters() if p.grad is not None]
        assert found == ["layers.0.up.bias", "layers.1.up.bias"], "none of quantized weights"
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(model.layers[1].calls, calls)
    assert not any(module._forward_hooks for module in model.modules())
    assert model(x).grad_fn is not None


def test_experts_get_no_gradients_and_change_the_figures_of_no_other_layer(model):
    experts, x = OfEqualCounts(64, 96), torch.randn(2, 32, 64)
    numerics = Numerics(1, None, 64, [model, experts])
    with numerics.recording():
        (model(x).square().mean() + experts(x).sum()).backward()
        assert all(p.grad is None for p in experts.parameters())
    set_rounding_step(0)
    others = {key: value for key, value in numerics.figures().items() if not key.startswith(f"{PREFIX}experts/")}
    assert len(others) < len(numerics.figures()) and others == measure(model, x)
    experts(x).sum().backward()
    assert all(p.grad is not None for p in experts.parameters())


def test_as_many_sequences_as_hold_the_tokens_are_taken(model):
    batch, positions = torch.arange(8 * 48).view(8, 48), [3]
    for tokens, count in ((48, 1), (64, 2), (4096, 8)):
        inputs, labels = Numerics(1, None, tokens, [model]).sample({"input": batch, "positions": positions}, batch + 1)
        assert torch.equal(inputs["input"], batch[:count]) and torch.equal(labels, batch[:count] + 1)
        assert inputs["positions"] is positions


def test_patterns_select_modules(model):
    figures = measure(model, torch.randn(1, 64, 64), ["layers.1.norm", "up"])
    modules = {key.removeprefix(PREFIX).partition("/")[0] for key in figures}
    assert modules == {"layers.1.norm", "layers.0.up", "layers.1.up", "model"}


def test_layers_that_are_in_high_precision_now_have_no_figures(model):
    first, second = model.layers
    for layer in (first.norm, first.up):
        layer.take(replace(layer.layer_state, is_plain=True))
    second.down.take(replace(second.down.layer_state, recipe=get_recipe("bf16")))
    figures = measure(model, torch.randn(1, 64, 64))
    modules = {key.removeprefix(PREFIX).partition("/")[0] for key in figures}
    assert modules == {"layers.0.down", "layers.1.norm", "layers.1.up", "model"}


def test_a_pattern_must_match(model):
    check_patterns(["layers.*.up", "norm"], model)
    with pytest.raises(
        ConfigError,
        match=r"mxnorm.diagnostics.fqns = \['up', 'gate'\]: 'gate' matches no swapped",
    ):
        check_patterns(["up", "gate"], model)


def test_two_processes_with_half_of_the_rows_each_have_the_figures_of_all(model):
    """MXFP8's casts along features and the norms see rows alone; other figures depend on which tokens are together."""
    x = torch.randn(2, 32, 64)
    whole, halves = measure(model, x), []
    for half in x:
        numerics = Numerics(1, ["layers.0.norm"], 64, [model])
        with numerics.recording():
            model(half).sum().backward()
        halves.append(numbers(numerics._found))
    together = figures_of(halves)
    assert len(together) == 8
    for key, value in together.items():
        assert value == pytest.approx(whole[key], rel=1e-5)


def test_weights_that_a_validation_leaves_whole_keep_no_gradients_of_the_pass(model):
    """FSDP2 gathers the weights of the last layers in a forward, and frees them in the backward, which is missing."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for part in (*model.layers, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=False)
        x = torch.randn(2, 32, 64)
        with torch.no_grad():
            model(x)
        with Numerics(every=1, fqns=None, tokens=64, model_parts=[model]).recording():
            model(x).sum().backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == []
    finally:
        dist.destroy_process_group()


CPU = torch.device("cpu")


def test_groups_of_32_spread_over_the_tokens():
    index = sampled_tokens(32 * 10 + 5, 32 * 5, CPU)
    assert index.view(-1, 32)[:, 0].tolist() == [0, 64, 128, 192, 256]
    assert index.view(-1, 32).diff(dim=1).eq(1).all()
    assert sampled_tokens(100, 512, CPU).tolist() == list(range(96)), "all tokens if there are fewer than wanted"
    assert sampled_tokens(31, 512, CPU).tolist() == [], "fewer tokens than a group"
