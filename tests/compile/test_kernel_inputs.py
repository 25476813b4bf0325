"""A norm's kernel adds the residual; graphs that do not fit stay unfused."""

import pytest
import torch

from mxtrain.compile.kernel_inputs import fuse_residual_add
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.parse import get_recipe
from tests.support.graph_checks import assert_same, draw, graph_after, operations

pytestmark = pytest.mark.usefixtures("kernels")

B, S, D = 2, 3, 64
T = B * S
FP32, BF16 = torch.float32, torch.bfloat16
MXFP8, NVFP4 = (get_recipe(name).fprop for name in ("mxfp8", "nvfp4"))


def mxfp8(rows, form="image"):
    from mxtrain.formats.mx.norm import mxnorm_cast

    return results(mxnorm_cast(rows, RMSEstimate.for_recipe(MXFP8, 2, "pre_round", 1e-5), MXFP8, form))


def nvfp4(rows, form="image"):
    from mxtrain.formats.nvfp4.norm import nvfp4_norm

    return results(nvfp4_norm(rows, RMSEstimate.for_recipe(NVFP4, 2, "pre_round", 1e-5), 2.0**-8, form))


def nvfp4_row(rows, form="image"):
    from mxtrain.formats.nvfp4.norm import nvfp4_norm

    return results(nvfp4_norm(rows, RMSEstimate.for_recipe(NVFP4, 2, "pre_round", 1e-5), None, form))


OPS = {mxfp8: "mxtrain.mxnorm_cast.default", **dict.fromkeys((nvfp4, nvfp4_row), "mxtrain.nvfp4_norm.default")}


def results(cast):
    return [each.view(torch.uint8) if each.itemsize == 1 else each for each in cast if each is not None]


def rewritten(function, *inputs, symbolic=False) -> torch.fx.GraphModule:
    return graph_after(fuse_residual_add, function, *inputs, symbolic=symbolic)


def norms(module) -> list[torch.fx.Node]:
    return [node for node in module.graph.nodes if "norm" in str(node.target)]


@pytest.mark.parametrize(("dtype", "residual_dtype"), [(FP32, FP32), (FP32, BF16), (BF16, BF16)])
@pytest.mark.parametrize("form", ["image", "codes"])
@pytest.mark.parametrize("norm", [mxfp8, nvfp4, nvfp4_row])
def test_the_kernel_adds_and_keeps_the_sum(norm, form, dtype, residual_dtype):
    """With the views, implicit conversion and order of a Llama block. Another operation reads the sum first."""

    def block(x, residual):
        h = x + residual.view(B, S, D)
        before = h.abs()
        return before, *norm(h.view(-1, D), form), h

    inputs = draw(B, S, D, seed=0).to(dtype), draw(T, D, seed=1).to(residual_dtype)
    module = rewritten(block, *inputs)
    assert operations(module) == [OPS[norm], "aten.abs.default"]
    assert_same(module, block, *inputs)


def test_the_sum_has_the_dtype_of_x():
    """bf16 + fp32 is fp32, in either order."""

    def block(x, residual):
        h = residual.view(B, S, D) + x
        return *mxfp8(h.view(-1, D)), h

    inputs = draw(B, S, D, seed=0), draw(T, D, seed=1).to(BF16)
    module = rewritten(block, *inputs)
    (norm,) = norms(module)
    assert [node.meta["val"].dtype for node in norm.args[:2]] == [FP32, BF16]
    assert_same(module, block, *inputs)


def test_norms_of_one_residual_stream_follow_each_other():
    def blocks(x, first, second):
        h = x + first.view(B, S, D)
        one = mxfp8(h.view(-1, D))
        h = h + second.view(B, S, D)
        return *one, *nvfp4(h.view(-1, D)), h

    inputs = draw(B, S, D, seed=0), draw(T, D, seed=1).to(BF16), draw(T, D, seed=3)
    module = rewritten(blocks, *inputs)
    assert operations(module) == [OPS[mxfp8], OPS[nvfp4]]
    assert_same(module, blocks, *inputs)


def test_symbolic_rows():
    def block(x, residual):
        torch._check(x.shape[1] == D)  # in a model, the norm's weight says this
        h = x + residual
        return *mxfp8(h), h

    module = rewritten(block, draw(T, D, seed=1), draw(T, D, seed=2), symbolic=True)
    assert operations(module)[-1:] == [OPS[mxfp8]] and norms(module)[0].args[1] is not None
    assert_same(module, block, draw(20, D, seed=4), draw(20, D, seed=5))


def test_two_symbolic_sizes_stay_unfused():
    def block(x, residual):
        torch._check(x.shape[2] == D)
        h = x + residual
        return *mxfp8(h.view(-1, D)), h

    module = rewritten(block, draw(B, S, D, seed=1), draw(B, S, D, seed=2), symbolic=True)
    assert norms(module)[0].args[1] is None
    assert_same(module, block, draw(4, 5, D, seed=4), draw(4, 5, D, seed=5))


def test_a_norm_that_adds_already_adds_nothing_else():
    def block(x, other, residual, weight):
        x = x.view(T, D) + other
        h = x + residual
        return *mxfp8(h), h, torch.mm(x, weight)

    inputs = draw(B, S, D, seed=0), draw(T, D, seed=1), draw(T, D, seed=2), draw(D, D, seed=3)
    module = graph_after(lambda graph: (fuse_residual_add(graph), fuse_residual_add(graph)), block, *inputs)
    assert operations(module)[:2] == ["aten.add.Tensor", OPS[mxfp8]]
    assert_same(module, block, *inputs)


LEFT_ALONE = {
    "broadcast": lambda x, r: mxfp8((x + r[:1]).view(-1, D)),
    "a factor": lambda x, r: mxfp8(torch.add(x, r.view(B, S, D), alpha=2).view(-1, D)),
    "a number": lambda x, r: mxfp8((x + 1.0).view(-1, D)),
    "a difference": lambda x, r: mxfp8((x - r.view(B, S, D)).view(-1, D)),
    "no summand in the dtype of the sum": lambda x, r: mxfp8(x.to(BF16).float().view(T, D) + r.to(BF16).float()),
    "a transposed residual": lambda x, r: mxfp8(x.view(T, D) + r.view(D, T).t()),
    "fp16": lambda x, r: mxfp8((x.half() + r.half().view(B, S, D)).float().view(-1, D)),
    "a residual that the compiler computes": lambda x, r: mxfp8((x + r.view(B, S, D).tanh()).view(-1, D)),
    "an x that the compiler computes": lambda x, r: mxfp8((x * 2 + r.view(B, S, D)).view(-1, D)),
    "a residual that the compiler rounds": lambda x, r: mxfp8(x.view(T, D) + r.to(BF16)),
    "a residual that the compiler copies": lambda x, r: mxfp8(x.view(T, D) + r.clone()),
    "a residual in fp16": lambda x, r: mxfp8(x.view(T, D) + (r.half() @ r.half().t()) @ r.half()),
    "a rounded sum": lambda x, r: mxfp8((x + r.view(B, S, D)).to(BF16).view(-1, D)),
    "a part of the sum": lambda x, r: mxfp8((x + r.view(B, S, D)).view(-1, D)[:4]),
    "other rows of the sum": lambda x, r: mxfp8((x + r.view(B, S, D)).view(-1, D // 2)),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_graphs_that_stay_unfused(name):
    function, inputs = LEFT_ALONE[name], (draw(B, S, D, seed=0), draw(T, D, seed=1))
    module = rewritten(function, *inputs)
    (norm,) = norms(module)
    assert norm.args[1] is None
    assert_same(module, function, *inputs)


def test_a_computed_residual_that_is_stored_anyway_is_added_in_the_kernel():
    def block(x, residual, weight):
        residual = residual.tanh()
        h = x.view(T, D) + residual
        return *mxfp8(h), h, torch.mm(residual, weight)

    inputs = draw(B, S, D, seed=0), draw(T, D, seed=1), draw(D, D, seed=2)
    module = rewritten(block, *inputs)
    assert norms(module)[0].args[1] is not None
    assert_same(module, block, *inputs)
