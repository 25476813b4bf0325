"""Layers in two processes, sharded as in training, against one process."""

from functools import partial

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from mxtrain import ConfigError, DecomposeKRouter, FusedLayerNorm, FusedRMSNorm, layer_norm, rms_norm
from mxtrain.nn.split import LocalLinear
from tests.nn.test_gathered_norm import check_gathers
from tests.support.layer_checks import NormBlock, draw, in_two_processes, mx_linear
from tests.support.split_checks import check_split_layers

D, EXPERTS, EPS = 32, 8, 1e-5


def norm_of(**kwargs):
    norm = FusedRMSNorm(D, EPS, **kwargs)
    norm.weight.data.copy_(draw(D, seed=1))
    return norm


def gate_of(bias=False):
    gate = nn.Linear(D, EXPERTS, bias=bias)
    for seed, parameter in enumerate(gate.parameters()):
        parameter.data.copy_(draw(*parameter.shape, seed=1 + seed))
    return DecomposeKRouter.from_linear(gate)


def local_gate():
    gate = gate_of(bias=True)
    gate.__class__ = LocalLinear
    return gate


class Block(nn.Module):
    """Norms and a gate between other operations."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.gate = FusedLayerNorm(D, EPS), norm_of(), gate_of()
        self.first.weight.data.copy_(draw(D, seed=5))
        self.first.bias.data.copy_(draw(D, seed=6))

    def forward(self, x):
        return torch.sigmoid(self.gate(self.norm(self.first(x.sin()))))


class NormAlone(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = norm_of(when_compiled="kernel")

    def forward(self, x):
        return self.norm(x)


def gradients(module, x, dy):
    y = module(x)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]


def assert_whole(shards, expected):
    """Compare tensors of two ranks with those of one process."""
    for got, want in zip(shards, expected, strict=True):
        got = got.full_tensor() if isinstance(got, DTensor) else got
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class Offset(NormBlock):
    """An MXNorm with a gain of 1 + weight, and its linear."""

    def __init__(self):
        super().__init__(D, EXPERTS * 4, "mxfp8")
        self.norm.add_unit_offset = True

    def forward(self, x):
        return super().forward(x)[0]


def check_fsdp(mesh, make, parts, tokens, outputs):
    """Each rank has half of the batch and half of every parameter."""
    x, dy = draw(2, tokens, D, seed=0).requires_grad_(), draw(2, tokens, outputs, seed=3)
    y, _, *expected = gradients(make(), x, dy)
    block = make()
    for part in (*map(block.get_submodule, parts), block):
        fully_shard(part, mesh=mesh)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    rank = mesh.get_local_rank()
    mine = block(x.detach().chunk(2)[rank])
    mine.backward(dy.chunk(2)[rank])
    assert_whole([mine, *(p.grad for p in block.parameters())], [y.chunk(2)[rank], *expected])


def check_norm_of_shards(mesh, placement, tokens, with_residual):
    """A norm of a DTensor against the same norm of the whole tensor."""
    shape = (2, tokens, D)
    tensors = [draw(*shape, seed=0), draw(D, seed=1), *([draw(*shape, seed=2)] if with_residual else [])]
    dys = [draw(*shape, seed=3), *([draw(*shape, seed=4)] if with_residual else [])]
    placements = [placement, Replicate(), placement]

    def run(tensors, dys):
        tensors = [t.detach().requires_grad_() for t in tensors]
        outputs = rms_norm(*tensors[:2], EPS, *tensors[2:])
        outputs = outputs if with_residual else (outputs,)
        return [*outputs, *torch.autograd.grad(outputs, tensors, dys)]

    sharded = [distribute_tensor(t, mesh, [p]) for t, p in zip(tensors, placements)]
    results = run(sharded, [distribute_tensor(dy, mesh, [placement]) for dy in dys])
    y, dweight = results[0], results[3 if with_residual else 2]
    if placement.is_shard() and placement.dim != 2:
        assert y.placements == (placement,), "rows stay on their rank"
        assert dweight.placements[0].is_partial(), "every rank has a part, summed when it is needed"
    assert_whole(results, run(tensors, dys))


def check_layer_norm_of_shards(mesh):
    """Rows stay on their rank. Its gradients of weight and bias are parts of sums, which are summed when needed."""
    tensors = [draw(2, 3, D, seed=0), draw(D, seed=1), draw(D, seed=2)]

    def run(tensors, dy):
        tensors = [t.detach().requires_grad_() for t in tensors]
        y = layer_norm(*tensors, EPS)
        return [y, *torch.autograd.grad(y, tensors, dy)]

    placements, dy = (Shard(1), Replicate(), Replicate()), draw(2, 3, D, seed=3)
    sharded = [distribute_tensor(t, mesh, [p]) for t, p in zip(tensors, placements)]
    results = run(sharded, distribute_tensor(dy, mesh, [Shard(1)]))
    assert results[0].placements == (Shard(1),) and all(each.placements[0].is_partial() for each in results[2:])
    assert_whole(results, run(tensors, dy))


def check_sequence_parallel(mesh, compiled):
    """The norm in TorchTitan's plan: its input is a shard of the sequence, its weight is on every rank."""
    x, dy = draw(2, 4, D, seed=0).requires_grad_(), draw(2, 4, D, seed=3)
    y, dx, dweight = gradients(NormAlone(), x, dy)
    block = NormAlone()
    parallelize_module(block, mesh, {"norm": SequenceParallel(use_local_output=True)})
    if compiled:
        torch._dynamo.reset()
        block = torch.compile(block, backend="aot_eager", fullgraph=True)
    rank = mesh.get_local_rank()
    part = x.detach().chunk(2, 1)[rank].clone().requires_grad_()
    results = gradients(block, part, dy.chunk(2, 1)[rank])
    assert_whole(results, [y.chunk(2, 1)[rank], dx.chunk(2, 1)[rank], dweight])


def check_replicated_gate(mesh):
    """Whole on every rank, as in TorchTitan's tensor parallelism."""
    x, dy = draw(6, D, seed=0).requires_grad_(), draw(6, EXPERTS, seed=3)
    expected = gradients(gate_of(bias=True), x, dy)
    gate = distribute_module(gate_of(bias=True), mesh)
    whole = partial(distribute_tensor, device_mesh=mesh, placements=[Replicate()])
    results = gradients(gate, whole(x.detach()).requires_grad_(), whole(dy))
    assert all(isinstance(t, DTensor) and t.placements == (Replicate(),) for t in results)
    assert_whole(results, expected)


def check_parts_of_gradients(mesh, make):
    """Whole parameters and plain tensors, where every rank has a part of the result's gradient."""
    x, dy = draw(6, D, seed=0).requires_grad_(), draw(6, EXPERTS, seed=3)
    y, dx, *of_parameters = gradients(make(), x, dy)
    share = 0.25 + 0.5 * mesh.get_local_rank()
    result, part, *parts = gradients(distribute_module(make(), mesh), x, share * dy)
    assert_whole([result, part, *parts], [y, share * dx, *of_parameters])


def check_local_features(mesh):
    """Shards of the output features, then of the input features. Nothing is summed over ranks."""
    up, down, x = draw(EXPERTS, D, seed=1), draw(D, EXPERTS, seed=2), draw(6, D, seed=0).requires_grad_()
    layers = nn.Sequential(nn.Linear(D, EXPERTS, bias=False), nn.Linear(EXPERTS, D, bias=False))
    for layer, weight in zip(layers, (up, down)):
        layer.weight.data.copy_(weight)
    y, dx, *expected = gradients(layers, x, draw(6, D, seed=3))
    for layer, placement in zip(layers, (Shard(0), Shard(1))):
        layer.__class__ = LocalLinear
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [placement]))
    part, dx_part, *found = gradients(layers, x, draw(6, D, seed=3))
    for sum_of_parts in (part, dx_part):
        torch.distributed.all_reduce(sum_of_parts.detach())
    assert_whole([part, dx_part, *found], [y, dx, *expected])


def check_mixed_is_refused(mesh):
    x = draw(6, D, seed=0)
    with pytest.raises(TypeError, match="Tensor, DTensor; make all or none a DTensor"):
        rms_norm(x, distribute_tensor(draw(D, seed=1), mesh, [Replicate()]), EPS)
    gate, expected = distribute_module(gate_of(), mesh), "all must be plain, or the parameters replicated and x plain"
    with pytest.raises(ValueError, match=rf"Shard\(dim=0\).*{expected}"):
        gate(distribute_tensor(x, mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=rf"Replicate\(\),\), a plain tensor; {expected}"):
        gate_of()(distribute_tensor(x, mesh, [Replicate()]))


def check_pytorchs_tensor_parallelism(mesh):
    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(ConfigError, match="a quantized layer got a DTensor, and PyTorch's tensor parallelism"):
            parallelize_module(mx_linear(2 * D, 2 * D, "mxfp8"), mesh, style)(draw(6, 2 * D, seed=0))
    linear, x = mx_linear(2 * D, 2 * D, "unquantized"), draw(6, 2 * D, seed=0)
    expected = linear(x)
    torch.testing.assert_close(
        parallelize_module(linear, mesh, ColwiseParallel(output_layouts=Replicate()))(x), expected
    )


def two_ranks(mesh):
    check_fsdp(mesh, Block, ("first", "norm"), 4, EXPERTS)
    check_fsdp(mesh, Offset, (), 32, EXPERTS * 4)
    for placement, with_residual in ((Shard(0), True), (Shard(1), False), (Shard(2), True), (Replicate(), False)):
        check_norm_of_shards(mesh, placement, 2, with_residual)
    check_norm_of_shards(mesh, Shard(1), 3, True)  # two rows per batch on one rank, one on the other
    check_norm_of_shards(mesh, Shard(1), 1, False)  # one row, and none
    check_layer_norm_of_shards(mesh)
    for compiled in (False, True):
        check_sequence_parallel(mesh, compiled)
    check_replicated_gate(mesh)
    for make in (partial(gate_of, bias=True), local_gate):
        check_parts_of_gradients(mesh, make)
    check_local_features(mesh)
    check_mixed_is_refused(mesh)
    check_pytorchs_tensor_parallelism(mesh)
    check_split_layers(mesh)
    check_gathers(mesh)


@pytest.mark.usefixtures("device")
def test_two_ranks_match_one(device):
    in_two_processes(two_ranks, device)
