"""What happens to an MXNorm's result on its way to the linears: gradients stay right, or an error says what to do."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import mxtrain
from mxtrain import ConfigError
from mxtrain.nn.group import LinearGroup
from mxtrain.nn.normed_input import NormedInput, writes_to
from mxtrain.nn.three_gemms import version
from tests.support.layer_checks import NormBlock, draw

D, TOKENS = 64, 20
BF16 = torch.bfloat16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return self.wq(x) * self.wk(x)


class Layer(nn.Module):
    """As models of transformers have it: the norm's result is an argument of the module that holds the linears."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(D), Attention()

    def forward(self, x):
        return x + self.attention(self.norm(x))


def converted() -> Layer:
    torch.manual_seed(0)
    layer = Layer()
    mxtrain.convert(layer, recipe="mxfp8", mode="emulated", example_inputs=(torch.zeros(TOKENS, D),))
    return layer


def gradients(layer) -> list[torch.Tensor]:
    layer(draw(TOKENS, D, seed=0).requires_grad_()).square().sum().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in layer.parameters()]


@pytest.fixture
def mesh():
    """Of one process, on the CPU."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_fsdp_must_not_cast_between_norm_and_linears(mesh):
    """It would round rho and, in mode "reference", the normalized rows to bf16."""

    def sharded(**settings):
        layer = converted()
        fully_shard(layer.attention, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, **settings))
        return fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))

    with pytest.raises(ConfigError, match="was cast to torch.bfloat16 before its linears: set cast_forward_inputs=Fal"):
        gradients(sharded())
    whole = fully_shard(converted(), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    for got, want in zip(gradients(sharded(cast_forward_inputs=False)), gradients(whole), strict=True):
        assert torch.equal(got, want)


def test_fsdp_must_not_free_the_gain_before_the_linears(mesh):
    """PyTorch reads freed memory: the process used to crash."""
    want = gradients(converted())
    layer = converted()
    fully_shard(layer.norm, mesh=mesh)
    with pytest.raises(ConfigError, match="the gain of an MXNorm was freed before its linears"):
        gradients(fully_shard(layer, mesh=mesh))
    layer = converted()
    fully_shard([layer.norm, layer.attention], mesh=mesh)
    for got, expected in zip(gradients(fully_shard(layer, mesh=mesh)), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "module, message",
    [
        ("attention", "loses their gradients: set use_reentrant=False"),  # it passes gradients to tensors only
        ("norm", "makes its result a plain tuple: set use_reentrant=False"),
    ],
)
def test_a_reentrant_checkpoint_must_not_lose_gradients(module, message):
    want = gradients(converted())
    for reentrant in (True, False):
        layer = converted()
        part = getattr(layer, module)
        forward = part.forward
        part.forward = lambda x: checkpoint(forward, x, use_reentrant=reentrant)  # noqa: B023
        if reentrant:
            with pytest.raises(ConfigError, match=message):
                gradients(layer)
        else:
            assert all(torch.equal(got, expected) for got, expected in zip(gradients(layer), want, strict=True))


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
def test_a_write_to_the_norms_input_must_not_change_the_weights_gradients(grouped, needs_gradient):
    """The linears cast x for wgrad, and PyTorch counts writes to it only after they have saved it."""
    block, x = NormBlock(D, D, "mxfp8", "mxfp8"), draw(TOKENS, D, seed=0)
    if grouped:
        block.norm.group = LinearGroup(block.linears)

    def written() -> NormedInput:
        normed = block.norm(x.clone().requires_grad_(needs_gradient))
        normed.x.mul_(2)
        return normed

    for linear in block.linears:
        with pytest.raises(RuntimeError, match="modified by an inplace operation: the input .* at version 1 "):
            linear(written())
    with torch.no_grad():
        assert torch.equal(block.linears[0](written()), block(x)[0])
    block.norm.weight.requires_grad_(False), block.linears[0].weight.requires_grad_(False)
    assert torch.equal(block.linears[0](written()), block(x)[0])


def test_an_input_that_was_written_to_before_the_norm():
    block, x = NormBlock(D, D, "mxfp8"), draw(TOKENS, D, seed=0)
    expected = block(2 * x)[0]
    assert torch.equal(block(x.mul_(2))[0], expected)


def test_writes_go_with_the_tensor_that_they_were_counted_for():
    x = torch.zeros(4)
    x.add_(1)
    assert writes_to(x) == (id(x), 1)
    assert writes_to(x.clone()) != writes_to(x)


def test_a_compiled_graph_has_no_count():
    seen = []

    @torch.compile(fullgraph=True, backend="eager")
    def double(x):
        seen.append((version(x), writes_to(x)))
        return x * 2

    x = torch.zeros(4).add_(1)
    double(x)
    assert seen == [(None, None)]
