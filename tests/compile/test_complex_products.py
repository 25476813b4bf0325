"""Products of complex numbers become operations on parts; graphs that do not fit stay as they are."""

import pytest
import torch

from mxtrain.compile.complex_products import split_complex_products
from mxtrain.titan.releases import RELEASE
from tests.support.graph_checks import draw, graph_after, operations

B, S, H, D = 2, 3, 4, 8  # sequences, tokens, heads, features of a head
BF16 = torch.bfloat16


def turns(*shape, seed=9):
    angles = draw(*shape, seed=seed)
    return torch.polar(torch.ones_like(angles), angles)


def as_pairs(x):
    return x.float().view(*x.shape[:-1], -1, 2)


if RELEASE == "v02":
    from torchtitan.models.deepseek_v3.model import model as deepseek_v3
    from torchtitan.models.llama3.model import model as llama3
    from torchtitan.models.llama4.model import model as llama4

    ROTATIONS = {
        "llama3": lambda x, frequencies: llama3.apply_rotary_emb(x, x, frequencies)[0],
        "llama4": lambda x, frequencies: llama4.apply_rotary_emb(x, x, frequencies)[1],
        "deepseek_v3": deepseek_v3.apply_rotary_emb,
    }
else:
    from torchtitan.models.common.rope import ComplexRoPE

    ROTATIONS = {"llama3": lambda x, angles: ComplexRoPE.apply_rotary_emb(x, x, angles[: x.shape[1], None])[0]}

rotate = ROTATIONS["llama3"]
"""Rotate queries or keys [B, S, H, D] by frequencies [S', D / 2], S' >= S"""


def is_complex(node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex() and node.op != "placeholder"


def assert_close(module, function, *inputs):
    """Check results to two roundings of their dtype, relative to the size of a pair, and metadata."""
    (output,) = module.graph.find_nodes(op="output")
    for one, other, node in zip(module(*inputs), function(*inputs), output.args[0], strict=True):
        assert one.dtype == other.dtype == node.meta["val"].dtype and one.shape == other.shape
        size = torch.view_as_complex(as_pairs(other)).abs().repeat_interleave(2, -1)
        assert ((one.float() - other.float()).abs() <= 2 * torch.finfo(one.dtype).eps * size).all()


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("model", ROTATIONS)
def test_a_rotation_of_torchtitan_and_its_gradient(model, dtype):
    def forward_and_backward(x, frequencies, gradient):
        x.requires_grad_()
        y = ROTATIONS[model](x, frequencies)
        return y.detach(), *torch.autograd.grad(y, x, gradient)

    inputs = draw(B, S, H, D, seed=0).to(dtype), turns(2 * S, D // 2), draw(B, S, H, D, seed=1).to(dtype)
    assert any(map(is_complex, graph_after(lambda graph: None, forward_and_backward, *inputs).graph.nodes))
    module = graph_after(split_complex_products, forward_and_backward, *inputs)
    # The frequencies are complex, and views of them.
    views = ("view", "slice", "unsqueeze")
    assert all(any(view in str(n.target) for view in views) for n in module.graph.nodes if is_complex(n))
    assert "aten.clone.default" not in operations(module)  # of conjugates
    assert_close(module, forward_and_backward, *inputs)


@pytest.mark.parametrize("conjugate", [torch.conj, lambda z: z.conj().conj()], ids=["once", "twice"])
def test_the_pairs_may_be_the_second_factor(conjugate):
    def multiply(x, frequencies):
        return [torch.view_as_real(conjugate(frequencies) * torch.view_as_complex(as_pairs(x))).flatten(2)]

    inputs = draw(B, S, D, seed=0), turns(S, D // 2)
    module = graph_after(split_complex_products, multiply, *inputs)
    assert "prims.rev.default" in operations(module)
    assert_close(module, multiply, *inputs)


def test_symbolic_sizes():
    module = graph_after(
        split_complex_products,
        lambda *inputs: [rotate(*inputs)],
        draw(B, S, H, D, seed=0).to(BF16),
        turns(S, D // 2),
        symbolic=True,
    )
    assert "prims.rev.default" in operations(module)
    inputs = draw(B + 1, S, H, D, seed=1).to(BF16), turns(S, D // 2)
    assert_close(module, lambda *inputs: [rotate(*inputs)], *inputs)


def test_every_user_gets_the_parts():
    def multiply(x, frequencies):
        product = torch.view_as_complex(as_pairs(x)) * frequencies
        return [torch.view_as_real(product).flatten(2), (2 * torch.view_as_real(product)).flatten(2)]

    inputs = draw(B, S, D, seed=0), turns(S, D // 2)
    assert_close(graph_after(split_complex_products, multiply, *inputs), multiply, *inputs)


def test_operations_on_parts_have_the_metadata_of_their_product():
    """It says what activation checkpointing computes again."""

    def mark_and_split(graph):
        for node in graph.nodes:
            node.meta["recompute"] = "a policy"
        split_complex_products(graph)

    module = graph_after(mark_and_split, lambda *inputs: [rotate(*inputs)], draw(B, S, H, D, seed=0), turns(S, D // 2))
    assert all(node.meta["recompute"] == "a policy" for node in module.graph.nodes)


def complex_of(x):
    return torch.view_as_complex(as_pairs(x))


LEFT_ALONE = {
    "a product that is also read whole": lambda x, z: (lambda p: [torch.view_as_real(p), p.abs()])(complex_of(x) * z),
    "a product that is read whole": lambda x, z: [(complex_of(x) * z).abs()],
    "no factor that is made of parts": lambda x, z: [torch.view_as_real(z * z), x],
    "pairs that are repeated": lambda x, z: [torch.view_as_real(complex_of(x[:, :1]) * z[None])],
    "a real factor": lambda x, z: [torch.view_as_real(complex_of(x) * x[..., ::2]), z],
    "a view of a conjugate": lambda x, z: [torch.view_as_real(complex_of(x) * z.conj()[None]).flatten(2)],
    "fp64": lambda x, z: [torch.view_as_real(torch.view_as_complex(as_pairs(x).double()) * z)],
    "real numbers": lambda x, z: [x * x, z],
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_graphs_that_stay_as_they_are(name):
    inputs = draw(B, S, D, seed=0), turns(S, D // 2)
    before, after = (
        graph_after(one_pass, LEFT_ALONE[name], *inputs) for one_pass in (lambda graph: None, split_complex_products)
    )
    assert str(after.graph) == str(before.graph)


def test_a_graph_without_metadata_stays_as_it_is():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (x, x)))
    before = str(graph)
    split_complex_products(graph)
    assert str(graph) == before
