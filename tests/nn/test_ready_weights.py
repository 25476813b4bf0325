"""Weights that are cast once for several forwards: the same bits as a cast in every forward, and never old ones."""

from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from layer_checks import NormBlock, draw, mx_linear
from torch.utils.checkpoint import checkpoint

from mxtrain import set_rounding_step
from mxtrain.nn.ready_weights import ReadyWeights, note_norms
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.ops import quantize
from mxtrain.recipes.parse import get_recipe

D, N, T = 32, 64, 16
MIXED = "fprop=nvfp4, dgrad=bf16, wgrad=mxfp8"

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture(autouse=True)
def no_step():
    yield
    set_rounding_step(None)


@pytest.fixture
def casts(monkeypatch):
    """Record the casts of weights ahead of the layers."""
    found, function = [], quantize.weight_for_both
    monkeypatch.setattr(quantize, "weight_for_both", lambda *args: found.append(args) or function(*args))
    return found


class Block(nn.Module):
    """A norm, two linears that it feeds, and a linear without a norm."""

    def __init__(self, recipe, mode="reference"):
        super().__init__()
        self.normed, self.out = NormBlock(D, N, recipe, recipe, mode=mode), mx_linear(N, D, recipe, mode)
        note_norms(self, {"normed.norm": ["normed.linears.0", "normed.linears.1"]})

    def forward(self, x):
        a, b = self.normed(x)
        return x + self.out(a * b)


def _no_layer_casts(*args):
    raise AssertionError("a layer casts its weight")


def gradients(
    recipe, mode, steps: int, microbatches: int, caches: bool, checkpointed=False, backend=None
) -> list[torch.Tensor]:
    """Gradients and weights of some steps of training with gradient accumulation."""
    block = Block(recipe, mode)
    ready = ReadyWeights([block])
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.1)
    run = block if backend is None else torch.compile(block, backend=backend, fullgraph=True)
    found = []
    for step in range(steps):
        for microbatch in range(microbatches):
            set_rounding_step(step, microbatch=microbatch)
            if caches:
                ready.refresh()
            x = draw(T, D, seed=10 * step + microbatch)
            y = checkpoint(run, x, use_reentrant=False) if checkpointed else run(x)
            y.square().sum().backward()
        ready.drop()
        optimizer.step()
        found += [tensor.clone() for p in block.parameters() for tensor in (p.grad, p.detach())]
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("recipe", "way", "steps", "microbatches"),
    [
        ("mxfp8", "eager", 3, 4),
        ("mxfp8", "checkpointed", 3, 4),
        ("mxfp8", "compiled", 2, 2),
        pytest.param("mxfp8", "compiled", 3, 4, marks=pytest.mark.sweep),
        pytest.param("mxfp8", "checkpointed and compiled", 3, 4, marks=pytest.mark.sweep),
        ("nvfp4", "eager", 3, 4),
        pytest.param("nvfp4", "compiled", 2, 2, marks=pytest.mark.sweep),
    ],
)
def test_every_weight_is_cast_once_per_step_and_no_bit_changes(
    recipe, way, steps, microbatches, casts, compile_backend, monkeypatch
):
    is_compiled = "compiled" in way
    # The casts of the kernels are single operations in a graph, those of plain PyTorch take long to trace.
    mode = "emulated" if is_compiled else "reference"
    how = dict(checkpointed="checkpointed" in way, backend=compile_backend if is_compiled else None)
    expected = gradients(recipe, mode, steps, microbatches, caches=False, **how)
    torch._dynamo.reset()
    if recipe == "mxfp8":  # whose casts ahead do not use this function
        monkeypatch.setattr(quantize, "weight", _no_layer_casts)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = gradients(recipe, mode, steps, microbatches, caches=True, **how)
    assert len(casts) == 3 * steps
    assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected))


def _write_weight(block):
    with torch.no_grad():
        block.out.weight.mul_(2)


def _write_gain(block):
    with torch.no_grad():
        block.normed.norm.weight[3] = 7


def _replace_weight(block):
    block.out.weight = nn.Parameter(block.out.weight.detach() * 2)


def _load(block):
    block.load_state_dict({name: value * 2 for name, value in block.state_dict().items()})


def _switch_recipe(block):
    for layer in (block.normed.norm, *block.normed.linears, block.out):
        layer.take(replace(layer.state, recipe=get_recipe("mxfp8", scale_rounding="floor")))


CHANGES = {_write_weight: 1, _write_gain: 2, _replace_weight: 1, _load: 3, _switch_recipe: 3}


@pytest.mark.parametrize(("change", "stale"), CHANGES.items(), ids=[change.__name__ for change in CHANGES])
def test_a_change_between_two_microbatches_is_seen(change, stale, casts):
    block, other, x = Block("mxfp8"), Block("mxfp8"), draw(T, D, seed=0)
    ready = ReadyWeights([block])
    ready.refresh()
    before = block(x)
    change(block), change(other)
    casts.clear()
    ready.refresh()
    assert len(casts) == stale
    assert torch.equal(block(x), other(x)) and not torch.equal(block(x), before)


def test_writes_through_data_are_seen_after_drop():
    """``tensor.data`` has a version counter of its own: a limit that the docstring names."""
    block, x = Block("mxfp8"), draw(T, D, seed=0)
    ready = ReadyWeights([block])
    ready.refresh()
    before = block(x)
    block.out.weight.data.mul_(2)
    ready.refresh()
    assert torch.equal(block(x), before)
    ready.drop()
    uncached = block(x)
    ready.refresh()
    assert torch.equal(block(x), uncached) and not torch.equal(uncached, before)


def test_what_is_left_out(casts):
    """Linears behind a norm that is not known, and plain ones; the others have operands until they are dropped."""
    block = Block("mxfp8")
    block.normed.linears[0].fed_by = None
    block.normed.linears[1].is_plain = True
    ready = ReadyWeights([block])
    ready.refresh()
    linears = [module for module in block.modules() if isinstance(module, QuantizedLinear)]
    assert [linear.ready is not None for linear in linears] == [False, False, True]
    ready.drop()
    assert all(linear.ready is None for linear in linears)
    assert not any("ready" in name or "fed_by" in name for name in block.state_dict())


@pytest.mark.parametrize(
    ("recipe", "mode"),
    [
        *(("mxfp8", mode) for mode in ("native", "emulated", "reference")),
        *(pytest.param("nvfp4", mode, marks=pytest.mark.sweep) for mode in ("native", "emulated")),
        ("nvfp4", "reference"),
        pytest.param("nvfp4 without tiles", "emulated", marks=pytest.mark.sweep),
        (MIXED, "reference"),
        ("unquantized", "emulated"),
    ],
)
def test_both_operands_of_a_weight_are_those_of_single_casts(recipe, mode):
    name, _, without = recipe.partition(" without ")
    recipe = get_recipe(name, weight_tiles=False) if without else get_recipe(name)
    w, gain = draw(32, 32, seed=0), draw(32, seed=1)
    both = quantize.weight_for_both(w, recipe, mode, gain)
    gemms = ((1, recipe.fprop), (0, recipe.dgrad))
    single = [quantize.weight(w, of_gemm, mode, dim, gain) for dim, of_gemm in gemms]
    for operand, expected in zip(both, single, strict=True):
        for a, b in zip(operand, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
                assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
