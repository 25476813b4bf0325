"""Conversion of TorchTitan 0.3's models."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.spmd_types import set_spmd_meshes
from torchtitan.protocols.module import Module

from mxtrain import MXNorm, MXNormLinear
from mxtrain.nn.experts import QuantizedExperts
from mxtrain.parallel.expert_dispatch import choose_exchange
from mxtrain.titan.converters import convert_on_meta
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.releases import engine
from mxtrain.titan.v03.parallelize import CodesDispatcher
from tests.support.cpu_layouts import use_layouts_on_a_cpu
from tests.support.dispatch_checks import CASES, CODES, COUNTS, DIM, EXPERTS, Routed, counted
from tests.support.expert_checks import heavy_tailed
from tests.support.layer_checks import in_two_processes


def converted(*flags: str) -> tuple[nn.Module, dict]:
    job = parse_job_config([*flags])
    model = engine().build_on_meta(job)
    return model, convert_on_meta(job, model)


# As under 0.2.2.
HEADLINES = {
    "llama3 debugmodel": "12 norms and 42 linears swapped, 2 kept; 90.7 %",
    "qwen3 debugmodel": "16 norms and 56 linears swapped, 18 kept; 98.4 %",
    "qwen3 debugmodel_moe_16": "8 norms, 16 linears, 4 stacks of experts and 4 gates swapped, 10 kept; 89.7 %",
    "deepseek_v3 debugmodel": "18 norms, 42 linears, 5 stacks of experts and 5 gates swapped, 2 kept; 98.1 %",
}


@pytest.mark.parametrize("flavor", HEADLINES)
def test_what_is_swapped(flavor):
    name, flavor_name = flavor.split()
    model, plans = converted(f"--model.name={name}", f"--model.flavor={flavor_name}", "--model.converters=mxnorm")
    assert f": {HEADLINES[flavor]}" in plans["mxnorm"].headline
    model.verify_module_protocol()


def test_swapped_modules_keep_what_torchtitan_has_set_on_them():
    model, _ = converted("--model.flavor=debugmodel", "--model.converters=mxnorm,fused_norm")
    layer = model.layers["0"]
    norm, linear = layer.attention_norm, layer.attention.qkv_linear.wq
    assert isinstance(norm, MXNorm) and isinstance(linear, MXNormLinear)
    assert isinstance(norm, Module) and linear._param_init["weight"] is not None
    assert type(layer.attention_norm) is type(model.layers["1"].ffn_norm), "one class for torch.compile"
    assert norm.fqn == "layers.0.attention_norm"


def test_experts_have_the_seeds_of_022():
    model, _ = converted("--model.name=qwen3", "--model.flavor=debugmodel_moe_16", "--model.converters=mxnorm")
    experts = model.layers["0"].moe.routed_experts.inner_experts
    assert isinstance(experts, QuantizedExperts) and experts.fed_by == (model.layers["0"].ffn_norm,)
    assert [w.shape for w in experts.weights] == [torch.Size(s) for s in ((16, 256, 256),) * 3]


class Dispatched(Routed):
    def __init__(self, mesh, mode, dtype, dispatch="high_precision"):
        super().__init__(mode, dtype=dtype)
        self.dispatcher = CodesDispatcher(CodesDispatcher.Config(num_experts=EXPERTS, top_k=1))
        self.dispatcher.wire_meshes(ep_mesh=mesh)
        if mesh is not None:
            for name, weight in list(self.experts.named_parameters()):
                setattr(self.experts, name, nn.Parameter(weight.detach().chunk(2)[mesh.get_local_rank()]))
        choose_exchange(self, dispatch)

    def results(self, x, experts, dy) -> list[torch.Tensor]:
        """Result, and gradients of x, of the gain and of the weights, for one expert of every token."""
        x = x.detach().requires_grad_()
        h = self.norm(x).view(-1, DIM)
        counts = experts.bincount(minlength=EXPERTS)
        rows, counts, sent = self.dispatcher.dispatch(h, torch.ones(len(x), 1), experts.view(-1, 1), counts)
        y = self.dispatcher.combine(self.experts(rows, counts), sent, h)
        return [y.detach(), *torch.autograd.grad(y, [x, *self.parameters()], dy)]


def inputs(dtype, rank: int) -> tuple[torch.Tensor, ...]:
    experts = torch.arange(EXPERTS).repeat_interleave(torch.tensor(COUNTS[rank]))
    experts = experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(rank))]
    x, dy = (heavy_tailed(len(experts), DIM, seed=seed + rank, dtype=dtype) for seed in (10, 20))
    return x, experts, dy


def _check_two_processes(mesh):
    use_layouts_on_a_cpu()
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), mesh.get_local_rank()
    set_spmd_meshes(dense_mesh=mesh, sparse_mesh=mesh)
    own = sum(COUNTS[0]) * rank, sum(COUNTS[rank])
    sent, received = own[1], sum(sum(counts[2 * rank : 2 * rank + 2]) for counts in COUNTS)
    for mode, dtype in CASES:
        values = DIM * dtype.itemsize
        x, experts, dy = map(torch.cat, zip(inputs(dtype, 0), inputs(dtype, 1), strict=True))
        y, dx, _, *dws = Dispatched(None, mode, dtype).results(x, experts, dy)
        want = [y.narrow(0, *own), dx.narrow(0, *own), *(dw.chunk(2)[rank] for dw in dws)]
        model = Dispatched(mesh, mode, dtype, "auto")
        with counted() as found:
            y, dx, _, *dws = model.results(*inputs(dtype, rank))
        assert found == [(sent, CODES), (received, values), (sent, values), (received, values)]
        assert all(map(torch.equal, [y, dx, *dws], want)), (mode, dtype)


def test_two_processes_have_the_bits_of_one():
    in_two_processes(_check_two_processes, "cpu")
