"""What happens to an MXNorm's result on its way to the linears: gradients stay right, or an error says what to do."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import mxtrain
from mxtrain import ConfigError
from tests.support.layer_checks import draw

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

    with pytest.raises(ConfigError, match="was cast to torch.bfloat16 before its linears; set cast_forward_inputs=Fal"):
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
