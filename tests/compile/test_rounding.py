"""Casts of gradients round them to bf16; graphs that do not fit stay as they are."""

import pytest
import torch

from mxtrain.compile.kernel_inputs import fuse_rounding
from mxtrain.formats.parse import get_recipe
from tests.support.graph_checks import assert_same, draw, graph_after, operations

pytestmark = pytest.mark.usefixtures("kernels")

B, S, D = 2, 3, 64
T = B * S
BF16 = torch.bfloat16
RECIPE = get_recipe("mxfp8").dgrad
CAST = "mxtrain.cast.default"
TO_BF16 = "prims.convert_element_type.default"


def casts(gradient, form="image"):
    """Both casts of a gradient [T, D]."""
    from mxtrain.formats.mx.cast import cast

    results = [each for result in cast(gradient, RECIPE, (1, 0), form).values() for each in result if each is not None]
    return [each.view(torch.uint8) if each.itemsize == 1 else each for each in results]


@pytest.mark.parametrize("form", ["image", "codes"])
@pytest.mark.parametrize("round_", [lambda g: g.to(BF16).view(-1, D), lambda g: g.view(-1, D).to(BF16)])
def test_a_cast_reads_the_gradient_of_the_residual_stream(form, round_):
    def backward(gradient):
        return *casts(round_(gradient), form=form), gradient.abs()  # others may read it in fp32

    gradient = draw(B, S, D, seed=0)
    module = graph_after(fuse_rounding, backward, gradient)
    assert operations(module) == [CAST, "aten.abs.default"]
    assert_same(module, backward, gradient)


def test_symbolic_rows():
    def backward(gradient):
        torch._check(gradient.shape[2] == D)  # in a model, the weight says this
        return casts(gradient.to(BF16).view(-1, D))

    module = graph_after(fuse_rounding, backward, draw(B, S, D, seed=1), symbolic=True)
    assert [name for name in operations(module) if not name.startswith("aten.sym")][-1:] == [CAST]
    assert TO_BF16 not in operations(module)
    assert_same(module, backward, draw(B, 10, D, seed=2))


def test_a_factor_is_not_read_before_its_rounding():
    from mxtrain.formats.mx.cast import cast

    def backward(gradient, gain):
        casts = cast(gradient.to(BF16), RECIPE, (1, 0), "image", column_factor=gain.to(BF16))
        return [each.data for each in casts.values()]

    inputs = draw(T, D, seed=1), draw(D, seed=2)
    module = graph_after(fuse_rounding, backward, *inputs)
    assert operations(module) == [TO_BF16, CAST]
    assert_same(module, backward, *inputs)


LEFT_ALONE = {
    "another reader of the rounded values": lambda g: (lambda x: [*casts(x.view(-1, D)), x.abs()])(g.to(BF16)),
    "another cast": lambda g: (lambda x: [*casts(x), *casts(x, form="codes")])(g.to(BF16).view(-1, D)),
    "a gradient that the compiler computes": lambda g: casts((g * 2).to(BF16).view(-1, D)),
    "a sum over a dimension": lambda g: casts(g.view(B, S, D, 1).expand(B, S, D, 2).sum(3).to(BF16).view(-1, D)),
    "a transposed gradient": lambda g: casts(g.view(D, T).t().to(BF16)),
    "a gradient that is transposed after rounding": lambda g: casts(g.view(D, T).to(BF16).t()),
    "another rounding": lambda g: casts(g.half().float().view(-1, D)),
    "no rounding": lambda g: casts(g.view(-1, D)),
}


INPUTS = {
    "fp64": lambda: draw(T, D, seed=0).double(),
    "a part of a wider matrix": lambda: draw(T, 2 * D, seed=0)[:, :D],
}


@pytest.mark.parametrize("name", [*LEFT_ALONE, *INPUTS])
def test_graphs_that_stay_as_they_are(name):
    function = LEFT_ALONE.get(name, lambda gradient: casts(gradient.to(BF16)))
    gradient = INPUTS.get(name, lambda: draw(B, S, D, seed=0))()
    before, after = (graph_after(p, function, gradient) for p in (lambda graph: None, fuse_rounding))
    assert str(after.graph) == str(before.graph)
    assert_same(after, function, gradient)
