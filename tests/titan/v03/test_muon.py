"""TorchTitan 0.3's DistMuon against mxtrain's Muon: the same updates, states and settings.

DistMuon refuses a CPU, because it needs the streams of GPUs. Here, streams do nothing.
"""

from contextlib import nullcontext
from datetime import timedelta
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchtitan.distributed.flex_shard.dist_muon import DistMuon

from mxtrain.parallel.muon import Muon
from mxtrain.titan.v03.muon import build
from tests.support.forked import forking_context

SHAPES = {
    "layers.0.attention.wq.weight": (64, 96),
    "layers.0.feed_forward.w1.weight": (96, 64),
    "layers.1.moe.router.gate.weight": (33, 17),
    "layers.1.experts.w1_EFD": (8, 32, 64),
    "layers.2.experts.w2_EDF": (3, 64, 32),
}
RATE, DECAY, STEPS = 0.1, 0.2, 2


def _let_dist_muon_run_on_a_cpu() -> None:
    DistMuon._validate_parameter_storage = lambda self: torch.device("cpu")
    DTensor.is_cuda = True
    torch.get_device_module = lambda device: MagicMock(stream=lambda stream: nullcontext())
    torch.Tensor.record_stream = lambda self, stream: None


def _trained(make, dense: tuple, experts: tuple) -> tuple:
    """The optimizer and the parameters, a dict, after some steps. ``dense`` and ``experts``: mesh and placements."""
    torch.manual_seed(0)

    def split(shape: tuple[int, ...]) -> DTensor:
        return distribute_tensor(torch.randn(shape), *(dense if len(shape) == 2 else experts))

    weights = {name: nn.Parameter(split(shape)) for name, shape in SHAPES.items()}
    optimizer = make({"params": [*weights.values()], "param_names": [*weights]}, RATE, DECAY)
    for _ in range(STEPS):
        for weight in weights.values():
            weight.grad = split(weight.shape)
        optimizer.step()
    return optimizer, weights


def _compare(rank: int, file: str) -> None:
    dist.init_process_group("gloo", f"file://{file}", timedelta(seconds=60), world_size=4, rank=rank)
    _let_dist_muon_run_on_a_cpu()
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    of_experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    known = (square, [Replicate(), Shard(0)]), (of_experts, [Shard(0), Shard(0)])
    theirs, weights = _trained(build, *known)
    ours, expected = _trained(Muon, *known)
    assert type(theirs) is DistMuon
    assert theirs.param_groups[0].keys() == ours.param_groups[0].keys()
    for name, weight in weights.items():
        assert torch.equal(weight.full_tensor(), expected[name].full_tensor()), name
        (key, moment), (own_key, own) = (*theirs.state[weight].items(), *ours.state[expected[name]].items())
        assert key == own_key and torch.equal(moment.full_tensor(), own.full_tensor()), name
    for others in ((square, [Shard(0), Shard(1)]), known[1]), (known[0], (of_experts, [Shard(1), Shard(0)])):
        assert type(_trained(build, *others)[0]) is Muon
    dist.destroy_process_group()


def test_dist_muon_does_what_muon_does_and_muon_stands_in_for_it(tmp_path):
    start = forking_context().Process
    workers = [start(target=_compare, args=(rank, str(tmp_path / "store"))) for rank in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
