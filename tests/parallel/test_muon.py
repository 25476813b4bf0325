"""Muon against ``torch.optim.Muon``, bit for bit on a CPU: matrices, experts, and every way to split them."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mxtrain.parallel import muon as module
from mxtrain.parallel.muon import Muon
from tests.support.forked import forking_context

# Wide and tall; rows that four processes do not divide, or that are fewer; experts, also fewer than processes.
SHAPES = [(64, 96), (96, 64), (96, 64), (33, 17), (3, 40), (6, 32, 64), (2, 64, 32)]
RATE, DECAY, STEPS = 0.1, 0.2, 2


def example() -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Weights, and their gradients of each step."""
    torch.manual_seed(0)
    weights = [torch.randn(shape) for shape in SHAPES]
    return weights, [[torch.randn(shape) for shape in SHAPES] for _ in range(STEPS)]


def of_pytorch(weight: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """What ``torch.optim.Muon`` makes of a matrix, or of each expert's."""
    matrices = [nn.Parameter(matrix.clone()) for matrix in weight.reshape(-1, *weight.shape[-2:])]
    optimizer = torch.optim.Muon(matrices, RATE, DECAY, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        for matrix, own in zip(matrices, gradient.reshape(-1, *weight.shape[-2:])):
            matrix.grad = own.clone()
        optimizer.step()
    return torch.stack([matrix.data for matrix in matrices]).view(weight.shape)


def expected() -> list[torch.Tensor]:
    weights, gradients = example()
    return [of_pytorch(weight, own) for weight, own in zip(weights, zip(*gradients))]


@pytest.mark.parametrize("batch", [module.BATCH, 64 * 96])
def test_matrices_and_experts_get_the_bits_of_pytorch(monkeypatch, batch):
    monkeypatch.setattr(module, "BATCH", batch)
    weights, gradients = example()
    parameters = [nn.Parameter(weight) for weight in weights]
    unused = nn.Parameter(torch.ones(64, 96))
    optimizer = Muon({"params": [unused, *parameters]}, RATE, DECAY)
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step):
            parameter.grad = gradient
        optimizer.step()
    for parameter, right in zip(parameters, expected()):
        assert torch.equal(parameter, right)
    assert torch.equal(unused, torch.ones(64, 96)) and unused not in optimizer.state


def test_a_matrix_without_a_gradient_signal_stays():
    """Zeros are not divided by zero: a weight of experts that got no token only decays."""
    weight = nn.Parameter(torch.ones(2, 4, 8))
    weight.grad = torch.zeros(2, 4, 8)
    Muon({"params": [weight]}, RATE, DECAY).step()
    assert torch.equal(weight, torch.full((2, 4, 8), 1.0).mul_(1 - RATE * DECAY))


def _on_every_layout(rank: int, file: str) -> None:
    dist.init_process_group("gloo", f"file://{file}", timedelta(seconds=60), world_size=4, rank=rank)
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layouts = [
        (flat, [Shard(0)]),
        (flat, [Shard(1)]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(0), Shard(1)]),
        (square, [Shard(1), Shard(0)]),  # of experts: FSDP beside expert parallelism
    ]
    weights, gradients = example()
    right = expected()
    for mesh, placements in layouts:
        parameters = [nn.Parameter(distribute_tensor(weight, mesh, placements)) for weight in weights]
        optimizer = Muon({"params": parameters}, RATE, DECAY)
        for of_step in gradients:
            for parameter, gradient in zip(parameters, of_step):
                parameter.grad = distribute_tensor(gradient, mesh, placements)
            optimizer.step()
        for parameter, whole in zip(parameters, right):
            assert torch.equal(parameter.full_tensor(), whole), (placements, whole.shape)
    for style in (ColwiseParallel(), RowwiseParallel()):
        _with_both_kinds(square, style, weights[0], [own[0] for own in gradients], right[0])
    dist.destroy_process_group()


def _with_both_kinds(mesh, style, weight, gradients, right) -> None:
    """FSDP2 on top of tensor parallelism splits rows in an order of its own."""
    linear = nn.Sequential(nn.Linear(*reversed(weight.shape), bias=False))
    linear[0].weight.data.copy_(weight)
    parallelize_module(linear, mesh["tensor"], {"0": style})
    fully_shard(linear, mesh=mesh["data"])
    parameter = linear[0].weight
    (part,) = parameter.__create_chunk_list__()
    place = tuple(slice(start, start + size) for start, size in zip(part.offsets, part.sizes))
    optimizer = Muon({"params": [parameter]}, RATE, DECAY)
    for gradient in gradients:
        like = {"shape": parameter.shape, "stride": parameter.stride()}
        own = gradient[place].contiguous()
        parameter.grad = DTensor.from_local(own, parameter.device_mesh, parameter.placements, run_check=False, **like)
        optimizer.step()
    assert torch.equal(parameter.to_local(), right[place]), parameter.placements


def test_every_layout_gets_the_update_of_one_process(tmp_path):
    start = forking_context().Process
    workers = [start(target=_on_every_layout, args=(rank, str(tmp_path / "f"))) for rank in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
