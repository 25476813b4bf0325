"""Codes in the dispatch of TorchTitan 0.3: the bits of one process, and half of the bytes."""

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.spmd_types import set_spmd_meshes

from mxtrain.parallel.expert_dispatch import choose_exchange
from mxtrain.titan.v03.expert_dispatch import CodesDispatcher
from tests.support.dispatch_checks import CASES, CODES, COUNTS, DIM, EXPERTS, Routed, counted
from tests.support.expert_checks import heavy_tailed
from tests.support.layer_checks import in_two_processes


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
