"""torch.compile of the layers: one graph for every step, seed and layer, and the results of eager mode."""

from collections import Counter

import pytest
import torch
import torch.nn as nn
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from mxtrain import set_rounding_step
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.hardware import runs_kernels
from mxtrain.formats.parse import get_recipe
from mxtrain.nn.group import LinearGroup
from tests.support.layer_checks import NormBlock, assert_near, draw, mx_linear, results_of

D, N, T = 64, 32, 5
MIXED = "fprop=nvfp4_dynamic, dgrad=bf16, wgrad=mxfp8"
FOUR_OVER_SIX = get_recipe("nvfp4", four_over_six="both", weight_tiles=False)

pytestmark = pytest.mark.usefixtures("device")


class Block(nn.Module):
    """A norm, the group of linears that it feeds, and a linear without a norm."""

    def __init__(self, recipe, mode):
        super().__init__()
        self.normed, self.out = NormBlock(D, N, recipe, recipe, mode=mode), mx_linear(N, D, recipe, mode)
        self.normed.norm.group = LinearGroup(self.normed.linears)

    def forward(self, x):
        gate, up = self.normed(x)
        return self.out(gate + up) + x


@pytest.mark.parametrize(
    ("recipe", "mode", "autocast"),
    [
        ("mxfp8", "emulated", True),
        ("nvfp4", "emulated", True),
        pytest.param("mxfp8_2d", "emulated", True, marks=pytest.mark.sweep),
        *(pytest.param(name, "emulated", True, marks=pytest.mark.sweep) for name in ("nvfp4_row", "nvfp4_rl")),
        ("fprop=mxfp8, dgrad=dequantized, wgrad=dequantized", "emulated", True),
        pytest.param(MIXED, "emulated", False, marks=pytest.mark.sweep),
        ("mxfp4", "emulated", False),
        pytest.param("fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8_e5m2", "emulated", False, marks=pytest.mark.sweep),
        pytest.param(FOUR_OVER_SIX, "reference", False, marks=pytest.mark.sweep),
        ("unquantized", "emulated", False),
    ],
)
def test_blocks_compile_once_without_a_graph_break(recipe, mode, autocast, compile_backend):
    """As TorchTitan compiles, block by block with the same code: other steps, keys and signs do not recompile."""
    x, dy = draw(T, D, seed=0), draw(T, D, seed=1)
    blocks = [Block(recipe, mode), Block(recipe, mode)]
    blocks[1].normed.norm.set_seed(5, "another norm")
    blocks[1].out.set_seed(5, "another linear")
    # Inductor sums in another order, and a code next to a rounding boundary may flip.
    tolerance = 2e-2 if compile_backend == "inductor" or autocast else 1e-6
    with (
        torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16, enabled=autocast),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        for step, block in enumerate(blocks):
            set_rounding_step(step, microbatch=step)
            results = results_of(torch.compile(block, backend=compile_backend, fullgraph=True), x, dy)
        assert_near(results, results_of(block, x, dy), tolerance)


def test_another_number_of_rows_needs_no_new_graph():
    """Not with Inductor. One that is no whole number of blocks may have a graph of its own."""
    torch._dynamo.reset()
    counters.clear()
    block = Block("mxfp8", "emulated")
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (96, 160, 165):  # PyTorch makes another graph for a single block, and for as many rows as features
        x, dy = draw(rows, D, seed=rows), draw(rows, D, seed=1)
        assert_near(results_of(compiled, x, dy), results_of(block, x, dy), 1e-6)
        assert counters["stats"]["unique_graphs"] == 1 or rows % 32


def test_compiled_without_a_step_every_forward_draws_new_bits(compile_backend):
    x, dy = draw(T, D, seed=0), draw(T, N, seed=1)
    compiled = torch.compile(mx_linear(D, N, "nvfp4", "emulated"), backend=compile_backend, fullgraph=True)
    first, second = results_of(compiled, x, dy), results_of(compiled, x, dy)
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])


def test_a_graph_may_end_between_a_norm_and_its_linears(compile_backend):
    block = NormBlock(D, N, "mxfp8", "mxfp8")
    x, dys = draw(T, D, seed=0), [draw(T, N, seed=s) for s in (1, 2)]
    expected = results_of(block, x, *dys)
    block.norm.compile(backend=compile_backend, fullgraph=True)
    assert_near(results_of(block, x, *dys), expected, 1e-6)


def test_compiled_consumers_share_casts(device):
    """x is cast along tokens once for the three weight gradients, and every dY once for both of its GEMMs.

    The norm's backward is no kernel: its operations fuse with those around it.
    """
    if not runs_kernels("emulated", device):
        pytest.skip("no kernels on this device: the casts are not single operations there")
    graphs = []

    def count(graph, _):
        assert not any("norm_backward" in str(node.target) for node in graph.graph.nodes)
        casts = [node.args for node in graph.graph.nodes if node.target is torch.ops.mxtrain.cast.default]
        # (with a row factor, with a column factor, along rows, along columns)
        graphs.append(Counter((a[2] is not None, a[3] is not None, *a[8:10]) for a in casts))
        return make_boxed_func(graph)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    block = torch.compile(NormBlock(D, N, *["mxfp8"] * 3, mode="emulated"), backend=backend, fullgraph=True)
    results_of(block, draw(T, D, seed=0), *(draw(T, N, seed=s) for s in (1, 2, 3)))
    weights_along_rows, weights_along_columns = (False, True, True, False), (False, True, False, True)
    x_along_tokens, gradient_both_ways = (True, False, False, True), (False, False, True, True)
    assert graphs == [{weights_along_rows: 3}, {weights_along_columns: 3, x_along_tokens: 1, gradient_both_ways: 3}]


@pytest.mark.parametrize("joined", [False, True])
def test_dynamo_does_not_follow_autograd_functions(joined):
    """A function that Dynamo follows is a module in its graph, which takes up to 150 ms to trace."""
    bodies = []

    def backend(graph, inputs):
        bodies.extend(name for name, _ in graph.named_children())
        return graph.forward

    block = Block("mxfp8", "auto")
    if not joined:
        block.normed.norm.group = None
    torch._dynamo.reset()
    torch.compile(block, backend=backend, fullgraph=True)(draw(T, D, seed=0).requires_grad_())
    assert not bodies


def test_compiled_layers_take_settings_that_differ_in_numbers():
    """Two norms and linears of one code, made by hand: numbers that differ stay constants."""
    x, dys = draw(T, D, seed=0), [draw(T, N, seed=1)]
    torch._dynamo.reset()
    for recipe, eps in (("mxfp8", 1e-5), ("mxfp8", 0.5), ("unquantized", 1e-5)):
        recipe = get_recipe(recipe)
        block = NormBlock(D, N, recipe, mode="emulated")
        block.norm.estimate = RMSEstimate.for_recipe(recipe, eps=eps)
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        assert_near(results_of(compiled, x, *dys), results_of(block, x, *dys), 1e-6)
