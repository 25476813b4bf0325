"""The fusion of SwiGLU: which graphs it changes, which casts remain, and that results stay the same."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from mxtrain import MXLinear
from mxtrain.compile.casts_for_backward import compute_casts_in_backward
from mxtrain.compile.swiglu import fuse_swiglu
from mxtrain.formats.parse import get_recipe
from mxtrain.formats.swiglu import swiglu_backward
from tests.support.feed_forward import D, FeedForward, H, T, graphs_of, kept_for_backward, swiglu
from tests.support.graph_checks import draw, graph_after, operations

pytestmark = pytest.mark.usefixtures("kernels")

graphs_of = partial(graphs_of, rewrite=fuse_swiglu)
aten = torch.ops.aten
MXFP8 = get_recipe("mxfp8").fprop
POINTWISE = (aten.exp.default, aten.sigmoid.default, aten.div.Tensor)
PRODUCTS = {
    "silu first": swiglu,
    "silu second": lambda gate, up: up * F.silu(gate),
    "sigmoid": lambda gate, up: gate * up * torch.sigmoid(gate),
    # Rounded only at the end, as by the kernels and by compiled code for GPUs.
    "in fp32": lambda gate, up: (F.silu(gate.float()) * up).to(gate.dtype),
}
OTHERS = {
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "bounded": lambda gate, up: F.silu(gate) * up.clamp(-1e6, 1e6),
    "shifted": lambda gate, up: F.silu(gate) * (up + 1),
    "up through fp8": lambda gate, up: F.silu(gate) * up.to(torch.float8_e4m3fn).to(gate.dtype),
    "a gradient in the forward": lambda gate, up: swiglu_backward(up.roll(1, -1), gate, up)[0],
    "h through fp8": lambda gate, up: (F.silu(gate) * up).to(torch.float8_e5m2).to(gate.dtype),
}


def casts(*graphs) -> Counter:
    """Count the casts of activations and gradients: operation, and whether along rows and along columns."""
    found = Counter()
    for node in (node for graph in graphs for node in graph.nodes):
        name = str(node.target).removeprefix("mxtrain.").removesuffix(".default")
        if name == "cast" and node.args[0][0].op != "placeholder":
            found[(name, *node.args[-5:-3])] += 1
        elif name.startswith("swiglu"):
            found[(name, *(a for a in node.args if isinstance(a, bool)))] += 1
    return found


ROWS, COLUMNS, BOTH = ("cast", True, False), ("cast", False, True), ("cast", True, True)
FORWARD, BACKWARD = ("swiglu_cast", True, False), ("swiglu_backward_cast", True, True, True, False)
FORWARDS = {FORWARD: 1, ("swiglu_cast", False, True): 1}
OF_X_AND_DY = {ROWS: 1, COLUMNS: 1, BOTH: 1}
# h both ways, and dgate and dup.
UNFUSED = {ROWS: 2, COLUMNS: 2, BOTH: 3}


def check_fused(forward, backward):
    assert casts(forward)[FORWARD] == casts(backward)[BACKWARD] == 1
    assert casts(forward, backward) == {**OF_X_AND_DY, FORWARD: 1, BACKWARD: 1}
    assert kept_for_backward(forward) == 2, "gate and up"
    assert not any(node.target in POINTWISE for graph in (forward, backward) for node in graph.nodes)


@pytest.mark.parametrize("mode", ["autocast", pytest.param("joined", marks=pytest.mark.sweep)])
def test_two_kernels_give_the_same_outputs_and_gradients(mode):
    """The formulas differ in the last bits of fp32, which changes few codes."""
    module = FeedForward(PRODUCTS["in fp32"], joined=mode == "joined")
    _, want = graphs_of(module, rewrite=lambda graph: None, execute=True)
    graphs, got = graphs_of(module, execute=True)
    if mode != "joined":
        check_fused(*graphs)
    for one, other in zip(got, want, strict=True):
        assert ((one - other).norm() <= 2e-3 * other.norm()).item()
        assert other.norm() > 0


def test_merged_casts_are_fused_along_rows_and_have_the_same_results():
    module = FeedForward(PRODUCTS["in fp32"], mode="fp8_merged", times=4)
    _, want = graphs_of(module, rewrite=lambda graph: None, execute=True)
    graphs, got = graphs_of(module, execute=True)
    found = casts(*graphs)
    assert found.pop(COLUMNS) in (1, 2)  # of h, and of x, which the backward may get as its input
    assert found == {ROWS: 1, BOTH: 3, FORWARD: 1}
    (forward, _), _ = graphs_of(module, rewrite=lambda graph: (fuse_swiglu(graph), compute_casts_in_backward(graph)))
    assert kept_for_backward(forward, times=4) == 2, "gate and up"
    for one, other in zip(got, want, strict=True):
        assert ((one - other).norm() <= 2e-3 * other.norm()).item()


@pytest.mark.parametrize(
    ("recipe", "fused"), [("fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8_e5m2", True), ("mxfp4", False)]
)
def test_elements_of_gradients_and_transforms(recipe, fused):
    """The cast of h has its own elements. A transform of h or of its gradients is no part of the kernels."""
    module = FeedForward(PRODUCTS["in fp32"], recipe=recipe)
    _, want = graphs_of(module, rewrite=lambda graph: None, execute=True)
    graphs, got = graphs_of(module, execute=True)
    if fused:
        check_fused(*graphs)
    else:
        assert not any(name.startswith("swiglu") for name, *_ in casts(*graphs))
    for one, other in zip(got, want, strict=True):
        assert ((one - other).norm() <= (2e-3 if fused else 0) * other.norm()).item()


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "autocast"), zip(PRODUCTS, (True, False, True, False)))
def test_swiglu_is_found_however_it_is_written(name, autocast):
    check_fused(*graphs_of(FeedForward(PRODUCTS[name]), autocast=autocast)[0])


@pytest.mark.parametrize(
    "name",
    [
        "h through fp8",
        "a gradient in the forward",
        *(pytest.param(n, marks=pytest.mark.sweep) for n in ("bounded", "gelu", "shifted", "up through fp8")),
    ],
)
def test_other_products_stay_unfused(name):
    graphs, _ = graphs_of(FeedForward(OTHERS[name]))
    assert casts(*graphs) == UNFUSED


@pytest.mark.sweep
def test_nothing_is_fused_with_emulate_precision_casts():
    with torch._inductor.config.patch(emulate_precision_casts=True):
        graphs, _ = graphs_of(FeedForward())
    assert casts(*graphs) == UNFUSED


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("settings", "left"),
    [
        # Something else reads h, too, so it is stored in any case.
        (dict(also_h=True), UNFUSED),
        # w2 in bf16 reads h; w1 and w3 still read casts of dgate and dup.
        (dict(down="unquantized"), {ROWS: 1, COLUMNS: 1, ("swiglu_backward_cast", True, True, False, False): 1}),
        # dgrad in bf16 reads dgate and dup.
        (dict(recipe="fprop=mxfp8, dgrad=bf16, wgrad=mxfp8"), {ROWS: 1, COLUMNS: 4, **FORWARDS}),
        # wgrad in bf16 reads h, dgate and dup.
        (dict(recipe="fprop=mxfp8, dgrad=mxfp8, wgrad=bf16"), {ROWS: 5}),
        (dict(joined=True), {**OF_X_AND_DY, FORWARD: 1, ("swiglu_backward_cast", True, True, True, True): 1}),
    ],
)
def test_casts_that_remain_when_something_else_reads_a_value(settings, left):
    graphs, _ = graphs_of(FeedForward(**settings))
    assert casts(*graphs) == left


@pytest.mark.parametrize(("features", "fused"), [(H, 1), (48, 0)])
def test_a_block_with_elements_of_both_gradients_is_not_divided(features, fused):
    """One layer for gate and up. w2 is not quantized, so it takes any number of features."""
    module = FeedForward(down="unquantized", joined=True)
    module.w13[0] = MXLinear(D, 2 * features, bias=False, mode="emulated")
    module.w2 = nn.Linear(features, D, bias=False)
    graphs, _ = graphs_of(module)
    assert casts(*graphs)["swiglu_backward_cast", True, True, False, True] == fused


@pytest.mark.parametrize(
    ("layer", "left"),
    [
        ("w13.1", {ROWS: 2, BOTH: 3, **FORWARDS}),
        ("w2", {**OF_X_AND_DY, **FORWARDS, ("swiglu_backward_cast", True, True, False, False): 1}),
    ],
)
def test_casts_with_other_scales_stay_alone(layer, left):
    """The linear of up, or w2, rounds its scales in another way."""
    module = FeedForward()
    module.get_submodule(layer).recipe = get_recipe("mxfp8", scale_rounding="floor")
    graphs, _ = graphs_of(module)
    assert casts(*graphs) == left


def test_a_cast_with_a_factor_stays_unfused():
    from mxtrain.formats.mx.cast import cast

    def function(gate, up, factor):
        casts = cast(swiglu(gate, up), MXFP8, (1, 0), "image", column_factor=factor)
        return [each.data for each in casts.values()]

    inputs = draw(T, H, seed=0), draw(T, H, seed=1), draw(H, seed=2)
    module = graph_after(fuse_swiglu, function, *inputs)
    assert operations(module)[-1] == "mxtrain.cast.default"


def test_a_product_that_is_rounded_before_its_cast_stays_unfused():
    graphs, _ = graphs_of(FeedForward(lambda gate, up: swiglu(gate, up).bfloat16()), autocast=False)
    assert casts(*graphs) == UNFUSED


class Block(nn.Module):
    """A feed-forward under activation checkpointing, which computes gate and up again in the backward."""

    def __init__(self):
        super().__init__()
        self.feed_forward = FeedForward()

    def forward(self, x):
        return x + checkpoint(self.feed_forward, x, use_reentrant=False)


@pytest.mark.sweep
def test_with_activation_checkpointing_h_is_not_computed_again():
    (unfused, _), _ = graphs_of(Block(), rewrite=lambda graph: None)
    (forward, backward), _ = graphs_of(Block())
    # PyTorch 2.11 keeps gate and up, later releases nothing.
    assert kept_for_backward(forward) == kept_for_backward(unfused) <= 2
    assert casts(forward) == {ROWS: 1, FORWARD: 1} and casts(backward)[BACKWARD] == 1
    assert casts(backward)[FORWARD] == 0
