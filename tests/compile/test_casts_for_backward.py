"""Which casts the backward computes itself, what the forward keeps for it, and that results stay the same."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mxtrain
from mxtrain.compile.casts_for_backward import compute_casts_in_backward
from mxtrain.compile.swiglu import fuse_swiglu
from tests.support.feed_forward import D, FeedForward, H, graphs_of, kept_for_backward

pytestmark = pytest.mark.usefixtures("kernels")

ours = torch.ops.mxtrain
# Casts of dY and of X for w1, w2 and w3.
OF_GRADIENTS = OF_INPUTS = WEIGHTS = 3


def calls(graph) -> Counter:
    return Counter(node.target for node in graph.nodes)


def images_of_weights(module, forward) -> int:
    """Images of weights that the forward's graph keeps."""
    (output,) = forward.find_nodes(op="output")
    shapes = Counter(tuple(sorted(node.meta["val"].shape)) for node in output.args[0] if node.op != "placeholder")
    return sum(shapes[shape] for shape in {tuple(sorted(p.shape)) for p in module.parameters()})


def unchanged(graph):
    pass


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8_2d", pytest.param("mxfp8", marks=pytest.mark.sweep)])
def test_the_forward_keeps_no_results_of_casts(recipe):
    module = FeedForward(recipe=recipe)
    (before, _), _ = graphs_of(module, unchanged)
    (forward, backward), _ = graphs_of(module, compute_casts_in_backward)
    assert kept_for_backward(before) == 3 and kept_for_backward(forward) == 2, "gate and up"
    # PyTorch 2.14 casts one weight again by itself, and looks for its largest magnitude again.
    assert images_of_weights(module, before) in ((0,) if recipe == "mxfp8" else (WEIGHTS - 1, WEIGHTS))
    assert images_of_weights(module, forward) == 0
    if recipe == "mxfp8_2d":
        assert calls(forward)[ours.cast_tiles.default] == calls(backward)[ours.cast_tiles.default] == WEIGHTS
    if recipe == "nvfp4":
        assert calls(forward)[ours.nvfp4_weight.default] == calls(backward)[ours.nvfp4_weight.default] == WEIGHTS
        # The tensor scales of weights are kept.
        again = WEIGHTS - images_of_weights(module, before)
        assert calls(backward)[ours.nvfp4_tensor_scales.default] == OF_GRADIENTS + OF_INPUTS + again


class Gate(nn.Module):
    """A norm and the two linears that it feeds, which are one GEMM."""

    def __init__(self, **settings):
        super().__init__()
        self.norm, self.w1, self.w3 = nn.RMSNorm(D), *(nn.Linear(D, H, bias=False) for _ in range(2))
        example = (torch.zeros(2, 17, D),)
        mxtrain.convert(self, mode="emulated", high_precision_share=0.0, example_inputs=example, **settings)

    def forward(self, x):
        h = self.norm(x)
        return self.w1(h) * self.w3(h)


@pytest.mark.parametrize("recipe", ["mxfp8", pytest.param("nvfp4", marks=pytest.mark.sweep)])
def test_a_dequantized_backward_keeps_no_images(recipe):
    """Of weights, of inputs or of h, which the forward casts alike; with the kernel of SwiGLU and its cast, too."""

    def kept(module, *passes):
        (forward, _), _ = graphs_of(module, lambda graph: [rewrite(graph) for rewrite in passes])
        (output,) = forward.find_nodes(op="output")
        values = [node.meta["val"] for node in output.args[0] if node.op != "placeholder"]
        return sorted(value.nbytes for value in values if value.numel() > 1)

    spec = f"fprop={recipe}, dgrad=dequantized, wgrad=dequantized"
    for passes in ([compute_casts_in_backward], [fuse_swiglu, compute_casts_in_backward]):
        assert kept(FeedForward(recipe=spec), *passes) == kept(FeedForward(recipe=recipe), *passes)
    gate = Gate(recipe=recipe, backward="dequantized")
    assert kept(gate, compute_casts_in_backward) == kept(Gate(recipe=recipe), compute_casts_in_backward)
    assert len(kept(gate)) > len(kept(gate, compute_casts_in_backward)), "PyTorch keeps images"


@pytest.mark.sweep
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8_2d"])
def test_outputs_and_gradients_stay_the_same(recipe):
    module = FeedForward(recipe=recipe)
    results = []
    for rewrite in (unchanged, compute_casts_in_backward):
        mxtrain.set_rounding_step(1)
        results.append(graphs_of(module, rewrite, execute=True)[1])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def marked(graph) -> Counter:
    return Counter((node.target, node.meta["recompute"]) for node in graph.nodes if "recompute" in node.meta)


def test_casts_of_gradients_and_for_the_forward_alone_are_not_marked():
    marks = []

    def rewrite(graph):
        compute_casts_in_backward(graph)
        marks.append(marked(graph))

    graphs_of(FeedForward(recipe="nvfp4"), rewrite)
    again, kept = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE
    assert marks[0][ours.nvfp4_cast.default, again] == OF_INPUTS
    # PyTorch merges the two casts of a weight afterwards.
    assert marks[0][ours.nvfp4_weight.default, again] == 2 * WEIGHTS
    assert marks[0][ours.nvfp4_tensor_scales.default, kept] == 2 * WEIGHTS
    assert marks[0][ours.nvfp4_tensor_scales.default, again] == 0


@pytest.mark.parametrize(
    ("recipe", "cast"), [("nvfp4", "nvfp4_weight"), ("mxfp8_2d", "cast_tiles"), ("mxfp8_2d", "join_values")]
)
def test_weights_of_a_group_are_cast_again(recipe, cast):
    module = Gate(recipe=recipe)
    for linear in (module.w1, module.w3):
        linear.gathers_codes = cast == "join_values"
    for rewrite, times in ((unchanged, 0), (compute_casts_in_backward, 1)):
        (forward, backward), _ = graphs_of(module, rewrite)
        assert calls(forward)[getattr(ours, cast).default] == 1
        assert calls(backward)[getattr(ours, cast).default] == times


def test_other_functions_than_swiglu_are_not_computed_again():
    """Their inputs need not be in memory in the backward."""
    module = FeedForward(lambda gate, up: F.relu(gate) + up + up.roll(1, -1), recipe="nvfp4")
    (before, _), _ = graphs_of(module, unchanged)
    (forward, backward), _ = graphs_of(module, compute_casts_in_backward)
    assert kept_for_backward(forward) == kept_for_backward(before)
    assert torch.ops.aten.relu.default not in calls(backward)


def keep_products(ctx, func, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if func is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.feed_forward = FeedForward(recipe="nvfp4")

    def forward(self, x):
        contexts = partial(create_selective_checkpoint_contexts, keep_products)
        return x + checkpoint(self.feed_forward, x, use_reentrant=False, context_fn=contexts)


def test_activation_checkpointing_decides_on_its_own():
    marks = []

    def rewrite(graph):
        before = {node: dict(node.meta) for node in graph.nodes}
        compute_casts_in_backward(graph)
        marks.append({node: node.meta for node in graph.nodes} == before)

    graphs_of(Block(), rewrite)
    assert marks == [True]
