"""Second derivatives are refused with one error, also where PyTorch's own decorator gives zeros.

Where there is no gradient, none is computed.
"""

import pytest
import torch
import torch.nn as nn

from mxtrain import DecomposeKRouter, FusedLayerNorm, FusedRMSNorm
from mxtrain.launch.functions import MESSAGE
from mxtrain.nn.group import LinearGroup
from tests.support.expert_checks import OfEqualCounts
from tests.support.layer_checks import CHECKPOINTING, NormBlock, draw, fill, mx_linear

D, N, T = 64, 32, 5

pytestmark = pytest.mark.usefixtures("device")


def block(recipe: str, grouped: bool = False) -> nn.Module:
    module = NormBlock(D, N, recipe, recipe)
    module.norm.group = LinearGroup(module.linears) if grouped else None
    return module


LAYERS = {
    "MXLinear, mxfp8": lambda: mx_linear(D, N, "mxfp8"),
    "MXLinear, nvfp4": lambda: mx_linear(D, N, "nvfp4"),
    "MXLinear, unquantized": lambda: mx_linear(D, N, "unquantized"),
    "MXNorm and linears, mxfp8": lambda: block("mxfp8"),
    "MXNorm and linears, nvfp4": lambda: block("nvfp4"),
    "a group, mxfp8": lambda: block("mxfp8", grouped=True),
    "a group, nvfp4": lambda: block("nvfp4", grouped=True),
    "experts, mxfp8": lambda: OfEqualCounts(D, N),
    "FusedRMSNorm": lambda: fill(FusedRMSNorm(D)),
    "FusedLayerNorm": lambda: fill(FusedLayerNorm(D)),
    "DecomposeKRouter": lambda: fill(DecomposeKRouter(D, 8)),
}
OF_EACH_CLASS = [name for name in LAYERS if "nvfp4" not in name and "unquantized" not in name]

# A gradient that needs no gradient itself comes from a sum; that of a sum of squares needs one.
LOSSES = torch.sum, lambda y: y.square().sum()


def loss_of(outputs, loss) -> torch.Tensor:
    return sum(loss(y) for y in (outputs if isinstance(outputs, list) else [outputs]))


@pytest.mark.parametrize("layer", LAYERS)
def test_second_derivatives_are_refused(layer):
    module, x = LAYERS[layer](), draw(T, D, seed=0).requires_grad_()
    for loss in LOSSES:
        first = loss_of(module(x), loss)
        for gradient in torch.autograd.grad(first, [x, *module.parameters()], create_graph=True):
            with pytest.raises(RuntimeError) as error:
                (first + gradient.square().sum()).backward(retain_graph=True)
            assert str(error.value) == MESSAGE


class Passes(torch.autograd.Function):
    """Two tensors as they are. The gradient of an output that the loss does not need is None, as behind DDP."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        return x.clone(), y.clone()

    @staticmethod
    def backward(ctx, dx, dy):
        return dx, dy


def test_parameters_that_the_loss_does_not_need_get_no_gradient():
    """As in PyTorch's layers. A gradient of zeros would let weight decay shrink them."""
    for layer in OF_EACH_CLASS:
        module, before, x = LAYERS[layer](), nn.Linear(D, D), draw(T, D, seed=0)
        needed, _ = Passes.apply(x.requires_grad_(), loss_of(module(before.to(x.device)(x)), torch.sum))
        needed.sum().backward()
        assert x.grad is not None and all(p.grad is None for p in (*module.parameters(), *before.parameters())), layer


@pytest.mark.parametrize("wrap", CHECKPOINTING.values(), ids=CHECKPOINTING)
def test_second_derivatives_are_refused_in_a_checkpoint(wrap):
    x = draw(T, D, seed=0).requires_grad_()
    (dx,) = torch.autograd.grad(wrap(mx_linear(D, N, "mxfp8"), x).sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        dx.sum().backward()


def test_first_derivatives_with_create_graph_are_the_same_and_may_be_written_to():
    module, x = mx_linear(D, N, "mxfp8"), draw(T, D, seed=0)
    module(x).sum().backward()
    expected, module.weight.grad = module.weight.grad, None
    module(x).sum().backward(create_graph=True)
    assert torch.equal(module.weight.grad, expected)
    nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    torch.optim.SGD(module.parameters(), 0.1).step()
    module.weight.grad = None  # PyTorch warns of a cycle otherwise


@pytest.mark.parametrize("layer", ["MXLinear, mxfp8", "DecomposeKRouter"])
def test_compiled_graphs_refuse_second_derivatives_themselves(layer):
    torch._dynamo.reset()
    compiled = torch.compile(LAYERS[layer](), backend="aot_eager", fullgraph=True)
    x = draw(T, D, seed=0).requires_grad_()
    (dx,) = torch.autograd.grad(compiled(x).sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        dx.sum().backward()
