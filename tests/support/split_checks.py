"""Checks of layers whose matrices are split over two processes, as in tensor parallelism, against whole ones.

Operands are compared bit for bit. The data has heavy tails: on Gaussian data nearly all blocks have the same scales,
and blocks that begin at the wrong token would not show.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mxtrain.formats.matrices import Operand
from mxtrain.formats.ops import FormatOps
from mxtrain.formats.parse import get_recipe
from mxtrain.nn.group import LinearGroup
from mxtrain.nn.split import by_input_features
from tests.support.gather_counts import split_block
from tests.support.layer_checks import NormBlock, assert_near, draw, mx_linear

# Half a sequence is 48 tokens, which are no whole blocks: sequences are joined before anything is cast along tokens.
BATCH, SEQUENCE, DIM, OUTPUTS = 2, 96, 128, 64
# Where codes are joined, half a sequence is whole blocks.
LENGTHS = {"high_precision": SEQUENCE, "quantized": 64}
RECIPES = [
    "mxfp8",
    "mxfp8_2d",
    "mxfp4",
    "fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8_e5m2",
    get_recipe("nvfp4", stochastic_rounding=False),
    get_recipe("nvfp4_dynamic", stochastic_rounding=False),
    get_recipe("nvfp4_row", stochastic_rounding=False),
    get_recipe("nvfp4_4over6", stochastic_rounding=False),
    "nvfp4_rl",
    get_recipe("fprop=mxfp8, dgrad=nvfp4, wgrad=nvfp4", stochastic_rounding=False, hadamard=False),
]


def heavy_tailed(*shape: int, seed: int) -> torch.Tensor:
    """Maxima of blocks are so far apart that NVFP4's smallest scales depend on the largest element of the matrix."""
    return draw(*shape, seed=seed) ** 25


def with_heavy_tails(module: nn.Module) -> nn.Module:
    for seed, parameter in enumerate(module.parameters()):
        if parameter.ndim == 2:
            parameter.data.copy_(heavy_tailed(*parameter.shape, seed=20 + seed))
    return module


@contextmanager
def recorded(operands: list[Operand]) -> Iterator[None]:
    """Append both operands of every product."""

    matmul = FormatOps.matmul

    def record(ops, a, b, out_dtype):
        operands.extend((a.data, b.data))
        return matmul(ops, a, b, out_dtype)

    with mock.patch.object(FormatOps, "matmul", record):
        yield


def run(module: nn.Module, x: torch.Tensor, dys: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return outputs and full gradients of x and the parameters, and the operands of all products in their order."""
    operands = []
    with recorded(operands):
        x = x.clone().requires_grad_()
        outputs = module(x)
        outputs = outputs if isinstance(outputs, list) else [outputs]
        gradients = torch.autograd.grad(outputs, [x, *module.parameters()], dys)
    gradients = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return [*(y.detach() for y in outputs), *gradients], operands


def split_weight(linear: nn.Linear, mesh, placement) -> None:
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [placement]))


def part(tensor: torch.Tensor, mesh, dim: int, rank: int | None = None) -> torch.Tensor:
    return tensor.chunk(mesh.size(), dim)[mesh.get_local_rank() if rank is None else rank]


def assert_equal(found, expected) -> None:
    for number, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(got, want), f"operand {number}: {(got != want).sum()} of {got.numel()} elements differ"


def check_norm_and_columns(mesh, recipe, gather: str, add_unit_offset: bool = False) -> None:
    """A norm of shards of sequences feeds two linears with parts of their output features, which may be one GEMM."""
    x, *dys = (heavy_tailed(BATCH, LENGTHS[gather], size, seed=s) for s, size in enumerate((DIM, OUTPUTS, OUTPUTS)))
    # Flat rows on one process: only the other one has the largest element, also after the norm.
    part(x, mesh, 1, rank=1).sign_()
    block = with_heavy_tails(NormBlock(DIM, OUTPUTS, recipe, recipe, bias=True))
    block.norm.add_unit_offset = add_unit_offset
    for linear in block.linears:
        part(linear.weight.data, mesh, 0, rank=1).sign_()
    expected, operands = run(block, x, dys)
    whole_rho = block.norm(x).rho

    split_block(block, mesh, gather)
    own = part(x, mesh, 1)
    of_outputs = [part(dy, mesh, 2) for dy in dys]
    results, found = run(block, own, of_outputs)
    rho = whole_rho if gather == "high_precision" else part(whole_rho.view(BATCH, -1), mesh, 1).reshape(-1)
    assert torch.equal(block.norm(own).rho, rho)
    fprop, backward = operands[:4], operands[4:]
    wanted = [fprop[0], part(fprop[1], mesh, 0), fprop[2], part(fprop[3], mesh, 0)]
    for dy, w, dy_t, x_t in (backward[:4], backward[4:]):
        wanted += [part(dy, mesh, 1), part(w, mesh, 1), part(dy_t, mesh, 0), x_t]
    assert_equal(found, wanted)
    y1, y2, dx, *parameters = expected
    expected = [part(y1, mesh, 2), part(y2, mesh, 2), part(dx, mesh, 1), *parameters]
    assert_near(results, expected, 1e-6)

    block.norm.group = LinearGroup(block.linears)
    results, of_group = run(block, own, of_outputs)
    (x_rows, w1, _, w2), (*of_second, _), (*of_first, x_t) = found[:4], found[4:8], found[8:]
    pairs = zip(of_first, of_second, (1, 1, 0))
    if get_recipe(recipe).joins("reference"):
        found = [x_rows, torch.cat((w1, w2)), *(torch.cat((a, b), dim) for a, b, dim in pairs), x_t]
    assert_equal(of_group, found)
    assert_near(results, expected, 1e-6)


def check_plain_norm_and_columns(mesh) -> None:
    """In high precision, as a schedule may make them for some steps."""
    x, dy = draw(BATCH, SEQUENCE, DIM, seed=0), draw(BATCH, SEQUENCE, OUTPUTS, seed=1)
    block = NormBlock(DIM, OUTPUTS, "mxfp8")
    block.norm.add_unit_offset = True
    for layer in (block.norm, *block.linears):
        layer.is_plain = True
    (y, dx, *parameters), _ = run(block, x, [dy])
    split_block(block, mesh, "quantized")
    found, _ = run(block, part(x, mesh, 1), [part(dy, mesh, 2)])
    assert_near(found, [part(y, mesh, 2), part(dx, mesh, 1), *parameters], 1e-6)


def check_rows(mesh, recipe) -> None:
    """A linear with a part of its input features. Its result is a part of a sum."""
    x, dy = heavy_tailed(BATCH, SEQUENCE, DIM, seed=0), heavy_tailed(BATCH, SEQUENCE, OUTPUTS, seed=1)
    linear = with_heavy_tails(mx_linear(DIM, OUTPUTS, recipe))
    (y, dx, dw), (x_rows, w, dy_rows, w_t, dy_t, x_t) = run(linear, x, [dy])
    split_weight(linear, mesh, Shard(1))
    linear.split = by_input_features(mesh.get_group().group_name)
    (sum_part, *gradients), found = run(linear, part(x, mesh, 2), [dy])
    wanted = [part(x_rows, mesh, 1), part(w, mesh, 1), dy_rows, part(w_t, mesh, 0), dy_t, part(x_t, mesh, 0)]
    assert_equal(found, wanted)
    torch.distributed.all_reduce(sum_part)
    assert_near([sum_part, *gradients], [y, part(dx, mesh, 2), dw], 1e-6)


def check_split_layers(mesh) -> None:
    """All of them: operands of two processes are parts of whole ones."""
    for recipe in RECIPES:
        for gather in LENGTHS:
            check_norm_and_columns(mesh, recipe, gather)
        check_rows(mesh, recipe)
    check_norm_and_columns(mesh, "mxfp8", "quantized", add_unit_offset=True)
    check_plain_norm_and_columns(mesh)
