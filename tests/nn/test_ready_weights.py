"""Weights that are cast once for several forwards: the bits of a cast in every forward, and never old operands."""

import pickle
from collections import Counter
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from torch._dynamo import lookup_backend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from mxtrain import set_rounding_step
from mxtrain.formats.hardware import runs_kernels
from mxtrain.formats.parse import get_recipe
from mxtrain.nn.group import LinearGroup
from mxtrain.nn.ready_weights import ReadyWeights
from mxtrain.nn.split import WHOLE, by_output_features
from mxtrain.nn.three_gemms import QuantizedLinear, ThreeGEMMs
from tests.support.expert_checks import OfEqualCounts
from tests.support.layer_checks import NormBlock, draw, mx_linear

D, N, T = 32, 64, 16
AHEAD = (1, 0)
"""The dimensions of a cast ahead of a layer. A layer casts along one of them."""
MIXED = "fprop=nvfp4, dgrad=bf16, wgrad=mxfp8"

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def casts(monkeypatch):
    """Record how many weights each cast ahead of the layers is of: one of a single linear, several of a group."""
    found, quantize_weights = [], ThreeGEMMs.quantize_weights

    def record(gemms, ws, gain, dims=AHEAD, **settings):
        if dims == AHEAD:
            found.append(len(ws))
        return quantize_weights(gemms, ws, gain, dims, **settings)

    monkeypatch.setattr(ThreeGEMMs, "quantize_weights", record)
    return found


class Block(nn.Module):
    """A norm, two linears that it feeds, and a linear without a norm. The two are one GEMM if ``grouped``."""

    def __init__(self, recipe, mode="reference", grouped=True, joins_fprop=True):
        super().__init__()
        self.normed, self.out = NormBlock(D, N, recipe, recipe, mode=mode), mx_linear(N, D, recipe, mode)
        for linear in self.normed.linears:
            linear.fed_by = (self.normed.norm,)
        if grouped:
            self.normed.norm.group = LinearGroup(self.normed.linears)
            self.group.joins_fprop = joins_fprop

    @property
    def group(self) -> LinearGroup:
        return self.normed.norm.group

    def forward(self, x):
        a, b = self.normed(x)
        return x + self.out(a * b)


def without_layer_casts(quantize_weights):
    def only_ahead(gemms, ws, gain, dims=AHEAD, **settings):
        assert dims == AHEAD, "a layer casts its weight"
        return quantize_weights(gemms, ws, gain, dims, **settings)

    return only_ahead


class Graphs:
    """A backend of ``torch.compile`` that keeps the names of the inputs of every graph."""

    def __init__(self, backend: str):
        self.backend, self.inputs = lookup_backend(backend), []

    def __call__(self, graph, example_inputs):
        assert not any(node.op == "get_attr" and "ready" in str(node.target) for node in graph.graph.nodes)
        self.inputs.append([node.name for node in graph.graph.nodes if node.op == "placeholder"])
        return self.backend(graph, example_inputs)


def gradients(
    block: Block, steps: int, microbatches: int, caches: bool, checkpointed=False, backend=None, inside=False
) -> list[torch.Tensor]:
    """Gradients of inputs and weights, and weights, of some steps of training with gradient accumulation.

    inside: the compiled code holds the checkpoint, as in TorchTitan. Otherwise the checkpoint calls the compiled code.
    """
    ready = ReadyWeights([block])
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.1)
    run = block
    if checkpointed and inside:
        run = checkpoint_wrapper(run)
    if backend is not None:
        run = torch.compile(run, backend=backend, fullgraph=True)
    found = []
    for step in range(steps):
        for microbatch in range(microbatches):
            set_rounding_step(step, microbatch=microbatch)
            if caches:
                ready.refresh()
            x = draw(T, D, seed=10 * step + microbatch).requires_grad_()
            y = checkpoint(run, x, use_reentrant=False) if checkpointed and not inside else run(x)
            y.square().sum().backward()
            found.append(x.grad)
        ready.drop()
        optimizer.step()
        found += [tensor.clone() for p in block.parameters() for tensor in (p.grad, p.detach())]
        optimizer.zero_grad()
    return found


SINGLE, ONE_BY_ONE = dict(grouped=False), dict(joins_fprop=False)


@pytest.fixture
def sums_in_one_order():
    """Inductor times no launches, so reductions in two graphs sum in one order."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("sums_in_one_order")
@pytest.mark.parametrize(
    ("recipe", "mode", "way", "settings", "steps", "microbatches"),
    [
        ("mxfp8", "reference", "eager", SINGLE, 2, 2),
        ("mxfp8", "reference", "checkpointed", {}, 2, 3),
        ("mxfp8", "reference", "checkpointed", ONE_BY_ONE, 2, 2),
        ("nvfp4", "reference", "eager", {}, 2, 2),
        ("fprop=nvfp4, dgrad=dequantized, wgrad=dequantized", "reference", "eager", {}, 2, 2),
        # The casts of the kernels are single operations in a graph, those of plain PyTorch take long to trace.
        ("mxfp8", "emulated", "checkpointed inside what is compiled", {}, 1, 2),
        pytest.param("mxfp8", "emulated", "checkpointed and compiled", ONE_BY_ONE, 2, 2, marks=pytest.mark.sweep),
        pytest.param("mxfp8", "emulated", "compiled", SINGLE, 2, 2, marks=pytest.mark.sweep),
        pytest.param("mxfp8_2d", "emulated", "compiled", {}, 2, 2, marks=pytest.mark.sweep),
    ],
)
def test_every_weight_is_cast_once_per_step_and_no_bit_changes(
    recipe, mode, way, settings, steps, microbatches, casts, compile_backend, monkeypatch
):
    graphs = Graphs(compile_backend) if "compiled" in way else None
    how = dict(checkpointed="checkpointed" in way, backend=graphs, inside="inside" in way)
    expected = gradients(Block(recipe, mode, **settings), steps, microbatches, caches=False, **how)
    torch._dynamo.reset()
    if recipe != "nvfp4":
        monkeypatch.setattr(ThreeGEMMs, "quantize_weights", without_layer_casts(ThreeGEMMs.quantize_weights))
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = gradients(Block(recipe, mode, **settings), steps, microbatches, caches=True, **how)
    joined = 0 if settings == SINGLE else 1
    single = 3 if settings == SINGLE else 1
    assert Counter(casts) == Counter({2: joined * steps, 1: single * steps})
    assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected))
    if graphs is not None:
        uncached, cached = graphs.inputs
        of_group = 0 if settings == SINGLE else 3 if settings == ONE_BY_ONE else 2
        assert sum("ready" in name for name in uncached) == 0
        assert sum("group" in name and "ready" in name for name in cached) == of_group
        assert sum("ready" in name for name in cached) == of_group + 2 * single


def _write_weight(block):
    with torch.no_grad():
        block.out.weight.mul_(2)


def _write_weight_of_group(block):
    with torch.no_grad():
        block.normed.linears[1].weight.mul_(2)


def _write_gain(block):
    with torch.no_grad():
        block.normed.norm.weight[3] = 7


def _replace_weight(block):
    first = block.normed.linears[0]
    first.weight = nn.Parameter(first.weight.detach() * 2)


def _move_weight(block):
    """As ``Module.to`` does."""
    block.out.weight.data = block.out.weight.detach() * 2


def _load(block):
    block.load_state_dict({name: value * 2 for name, value in block.state_dict().items()})


def _switch_recipe(block):
    for layer in (block.normed.norm, *block.normed.linears, block.out):
        layer.take(replace(layer.layer_state, recipe=get_recipe("mxfp8", scale_rounding="floor")))


# How many single linears, and how many of them in a group, cast again.
CHANGES = {
    _write_weight: (1, 1),
    _write_weight_of_group: (1, 1),
    _write_gain: (2, 1),
    _replace_weight: (1, 1),
    _move_weight: (1, 1),
    _load: (3, 2),
    _switch_recipe: (3, 2),
}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("change", "stale"), CHANGES.items(), ids=[change.__name__ for change in CHANGES])
def test_a_change_between_two_microbatches_is_seen(change, stale, grouped, casts):
    block, other, x = Block("mxfp8", grouped=grouped), Block("mxfp8", grouped=grouped), draw(T, D, seed=0)
    ready = ReadyWeights([block])
    ready.refresh()
    before = block(x)
    change(block), change(other)
    casts.clear()
    ready.refresh()
    assert len(casts) == stale[grouped]
    assert torch.equal(block(x), other(x)) and not torch.equal(block(x), before)


def expert_gradients(experts: nn.Module, steps: int, caches: bool) -> list[torch.Tensor]:
    """Gradients of inputs, and weights, of some steps of two microbatches."""
    ready, found = ReadyWeights([experts]), []
    for step in range(steps):
        for microbatch in range(2):
            if caches:
                ready.refresh()
            x = draw(T, D, seed=10 * step + microbatch).requires_grad_()
            checkpoint(experts, x, use_reentrant=False).square().sum().backward()
            found.append(x.grad)
        with torch.no_grad():
            for p in experts.parameters():
                p -= p.grad
                found.append(p.detach().clone())
                p.grad = None
    return found


def test_weights_of_experts_are_cast_once_per_step_and_no_bit_changes(casts, monkeypatch):
    expected = expert_gradients(OfEqualCounts(D, N), 2, caches=False)
    monkeypatch.setattr(ThreeGEMMs, "quantize_weights", without_layer_casts(ThreeGEMMs.quantize_weights))
    found = expert_gradients(OfEqualCounts(D, N), 2, caches=True)
    assert casts == [2, 1] * 2  # w1 with w3, and w2
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_experts_use_the_operands_of_their_own_weights_until_drop():
    """Not those of weights that were replaced, or of a functional call; and those of a write after ``refresh``."""
    block, other, x = OfEqualCounts(D, N), OfEqualCounts(D, N), draw(T, D, seed=0)
    ready, experts = ReadyWeights([block]), block.experts
    ready.refresh()
    first = experts.ready
    assert [operands.dgrad.data.shape for operands in first] == [(D, 2 * 2 * N), (N, 2 * D)]
    assert not first[0].fprop[0].data.requires_grad
    replaced = {"experts.w2": other.experts.w2.detach() * 2}
    assert torch.equal(torch.func.functional_call(block, replaced, x), torch.func.functional_call(other, replaced, x))
    with torch.no_grad():
        block.experts.w3.mul_(2), other.experts.w3.mul_(2)
    ready.refresh()
    assert experts.ready is not first and torch.equal(block(x), other(x))
    second = experts.ready
    ready.refresh()
    assert experts.ready is second
    ready.drop()
    assert experts.ready is None and torch.equal(block(x), other(x))
    register_parametrization(experts, "w1", nn.Identity())
    ready.refresh()
    assert experts.ready is None


def test_compiled_experts_take_operands_as_inputs(compile_backend):
    block, x = OfEqualCounts(D, N, mode="emulated"), draw(T, D, seed=0)
    graphs = Graphs(compile_backend)
    compiled = torch.compile(block, backend=graphs, fullgraph=True)
    expected = compiled(x)
    ReadyWeights([block]).refresh()
    assert torch.equal(compiled(x), expected)
    assert [sum("ready" in name for name in names) for names in graphs.inputs] == [0, 2 * 2]


@pytest.mark.parametrize("name", ["normed.norm.weight", "normed.linears.1.weight", "out.weight"])
@pytest.mark.parametrize("settings", [{}, SINGLE, ONE_BY_ONE], ids=["grouped", "single", "one by one"])
def test_a_functional_call_uses_the_weights_that_it_is_given(settings, name):
    block, x = Block("mxfp8", **settings), draw(T, D, seed=0)
    other = {name: (block.get_parameter(name).detach() * 2 + 1).requires_grad_()}

    def results():
        y = torch.func.functional_call(block, other, x)
        return [y, *torch.autograd.grad(y.square().sum(), [other[name], block.normed.linears[0].weight])]

    expected = results()
    ReadyWeights([block]).refresh()
    assert all(torch.equal(a, b) for a, b in zip(results(), expected, strict=True))


def test_a_compiled_functional_call_uses_the_weights_that_it_is_given(compile_backend):
    block, x = Block("mxfp8", "emulated"), draw(T, D, seed=0)
    other = {name: p.detach() * 2 + 1 for name, p in block.named_parameters()}
    call = torch.compile(lambda x: torch.func.functional_call(block, other, x), backend=compile_backend, fullgraph=True)
    with torch.no_grad():
        expected = call(x)
        ReadyWeights([block]).refresh()
        assert torch.equal(call(x), expected)


@pytest.mark.parametrize("joins_fprop", [True, False])
def test_linears_that_become_single_use_no_old_operand(joins_fprop):
    block, other = (Block("mxfp8", joins_fprop=joins_fprop) for _ in range(2))
    x, (first, second) = draw(T, D, seed=0), block.normed.linears
    ready = ReadyWeights([block])
    ready.refresh()
    assert block.group.ready is not None and first.ready is None and second.ready is None
    with torch.no_grad():
        for changed in (block, other):
            changed.normed.linears[0].weight.mul_(2)
    hook = first.register_forward_pre_hook(lambda module, args: None)
    # Before the next refresh, too: the single linears cast.
    assert torch.equal(block(x), other(x))
    ready.refresh()
    assert block.group.ready is None and first.ready is not None and second.ready is not None
    assert torch.equal(block(x), other(x))
    hook.remove()
    with torch.no_grad():
        for changed in (block, other):
            changed.normed.linears[1].weight.mul_(2)
    # The group casts, and does not use the single operands.
    assert torch.equal(block(x), other(x))
    ready.refresh()
    assert block.group.ready is not None and first.ready is None and second.ready is None
    assert torch.equal(block(x), other(x))


@pytest.mark.parametrize("copy", [deepcopy, lambda block: pickle.loads(pickle.dumps(block))], ids=["copy", "pickle"])
def test_copies_have_no_operands(copy):
    """Nothing would renew them when the weights of the copy change."""
    block = Block("mxfp8")
    ReadyWeights([block]).refresh()
    other = copy(block)
    assert block.group.ready is not None and block.out.ready is not None
    assert other.group.ready is None and other.out.ready is None
    assert other.group.linears == (*other.normed.linears,) and other.normed.linears[0].fed_by == (other.normed.norm,)


def test_layers_that_are_not_cast_ahead(casts):
    """Linears whose norm is not known, and plain linears. The other layers have operands until ``drop``."""
    block = Block("mxfp8", grouped=False)
    block.normed.linears[0].fed_by = None
    block.normed.linears[1].is_plain = True
    ready = ReadyWeights([block])
    ready.refresh()
    linears = [module for module in block.modules() if isinstance(module, QuantizedLinear)]
    assert [linear.ready is not None for linear in linears] == [False, False, True]
    ready.drop()
    assert all(linear.ready is None for linear in linears)
    assert not any("ready" in name or "fed_by" in name for name in block.state_dict())

    block = Block("mxfp8")
    for layer in (block.normed.norm, *block.normed.linears):
        layer.is_plain = True
    ReadyWeights([block]).refresh()
    assert block.group.ready is None and all(linear.ready is None for linear in block.normed.linears)


@pytest.mark.parametrize(
    ("fqn", "cast_ahead"),
    [("normed.linears.1", ["normed.linears.0", "out"]), ("normed.norm", ["out"]), ("out", [])],
)
def test_parametrized_weights_and_gains_are_not_cast_ahead(fqn, cast_ahead):
    """Every access computes another tensor, so no forward would find the operands of its own."""
    block = Block("mxfp8")
    register_parametrization(block.get_submodule(fqn), "weight", nn.Identity())
    x = draw(T, D, seed=0)
    expected = block(x)
    ReadyWeights([block]).refresh()
    linears = {name: module for name, module in block.named_modules() if isinstance(module, QuantizedLinear)}
    assert [name for name, linear in linears.items() if linear.ready is not None] == cast_ahead
    assert (block.group.ready is not None) == (fqn == "out") and torch.equal(block(x), expected)


def test_linears_with_signs_of_their_own_are_cast_one_by_one():
    block = NormBlock(D, N, *["fprop=mxfp8, dgrad=mxfp8, wgrad=nvfp4"] * 2, norm="mxfp8")
    block.norm.group = LinearGroup(block.linears)
    for linear in block.linears:
        linear.fed_by = (block.norm,)
    ReadyWeights([block]).refresh()
    assert block.norm.group.ready is None and all(linear.ready is not None for linear in block.linears)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_weights_that_are_sharded_or_split_are_not_cast_ahead(device):
    """By FSDP2, and by tensor parallelism, where linears are one GEMM."""
    block = Block("mxfp8")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        for linear in (*block.normed.linears, block.out):
            linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))
        for linear in block.normed.linears:
            linear.split = by_output_features("group")
        experts = OfEqualCounts(D, N).experts
        experts.w2 = nn.Parameter(distribute_tensor(experts.w2.detach(), mesh, [Shard(0)]))
        ReadyWeights([block, experts]).refresh()
    finally:
        torch.distributed.destroy_process_group()
    assert block.group.is_one_gemm("reference", has_signs=False)
    assert block.group.ready is None and all(linear.ready is None for linear in (*block.normed.linears, block.out))
    assert experts.ready is None


@pytest.mark.parametrize(
    ("recipe", "mode"),
    [
        *(("mxfp8", mode) for mode in ("native", "emulated", "reference")),
        *(("mxfp8_2d", mode) for mode in ("native", "emulated")),
        *(("nvfp4", mode) for mode in ("native", "reference")),
        ("nvfp4 without tiles", "reference"),
        (MIXED, "reference"),
        ("fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8", "reference"),
        ("unquantized", "emulated"),
    ],
)
def test_both_operands_of_a_weight_are_those_of_single_casts(recipe, mode):
    name, _, without = recipe.partition(" without ")
    recipe = get_recipe(name, weight_tiles=False) if without else get_recipe(name)
    w, gain, gemms = draw(32, 32, seed=0), draw(32, seed=1), ThreeGEMMs(recipe.key, mode, WHOLE)
    both, single = [], []
    for ws in ([w], [w, draw(64, 32, seed=2)]) if recipe.joins(mode) else ([w],):
        both += gemms.quantize_weights(ws, gain).values()
        single += [gemms.quantize_weights(ws, gain, (dim,))[dim] for dim in (1, 0)]
    for operand, expected in zip(both, single, strict=True):
        for a, b in zip(operand, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
                assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_one_image_of_tiles_serves_fprop_and_dgrad(device):
    """Of a linear, of linears that are one GEMM, at least backward, and of experts."""
    if not runs_kernels("emulated", device):
        pytest.skip("no kernels on this device: TRITON_INTERPRET is off")
    block, other = (Block("mxfp8_2d", "emulated", joins_fprop=joins_fprop) for joins_fprop in (True, False))
    experts = OfEqualCounts(D, N, "mxfp8_2d", "emulated").experts
    ReadyWeights([block, other, experts]).refresh()
    for ready in (block.group.ready, block.out.ready, other.group.ready, *experts.ready):
        fprop, dgrad = torch.cat([operand.data for operand in ready.fprop]), ready.dgrad.data
        assert torch.equal(fprop, dgrad.t()) and ready.fprop[0].data.data_ptr() == dgrad.data_ptr()
        assert all(operand.data.is_contiguous() for operand in ready.fprop)
        assert {operand.data.untyped_storage().nbytes() for operand in ready.fprop} == {2 * fprop.numel()}
