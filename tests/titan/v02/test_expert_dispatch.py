"""Codes in the dispatch of expert parallelism: the bits of one process, and half of the bytes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torchtitan.models.llama4.infra.parallelize as llama4
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.moe import kernels, utils

from mxtrain import ConfigError
from mxtrain.parallel.expert_dispatch import choose_exchange
from mxtrain.titan import use_cpu
from mxtrain.titan.v02.parallelize import plans_with_own_styles
from tests.support.dispatch_checks import CASES, CODES, COUNTS, DIM, EXPERTS, TOKENS, Routed, counted
from tests.support.expert_checks import heavy_tailed
from tests.support.layer_checks import in_two_processes


def inputs(dtype, rank: int):
    """Tokens, the token of every row, rows of every expert, and the gradient of the results."""
    rows = sum(COUNTS[rank])
    index = torch.randint(TOKENS, (rows,), generator=torch.Generator().manual_seed(rank))
    x, dy = (heavy_tailed(n, DIM, seed=seed + rank, dtype=dtype) for n, seed in ((TOKENS, 10), (rows, 20)))
    return x, index, torch.tensor(COUNTS[rank]), dy


def results_of(model, x, index, counts, dy) -> list[torch.Tensor]:
    """Result, and gradients of x, of the gain and of the weights."""
    x = x.detach().requires_grad_()
    y = model(x, index, counts)
    gradients = torch.autograd.grad(y, [x, *model.parameters()], dy)
    return [y.detach(), *(g.to_local() if isinstance(g, DTensor) else g for g in gradients)]


def by_expert(parts: list[torch.Tensor]) -> torch.Tensor:
    """Rows of every process -> all rows in the order of the experts, where each has the processes' rows in order."""
    split = [part.split(counts) for part, counts in zip(parts, COUNTS, strict=True)]
    return torch.cat([own[e] for e in range(EXPERTS) for own in split])


def exchanged(model: Routed, mesh, dispatch="quantized") -> Routed:
    with plans_with_own_styles():
        llama4.parallelize_module(model.experts, mesh, ExpertParallel())
    choose_exchange(model, dispatch)
    return model


def same_on_all(mesh, rows: torch.Tensor) -> list[torch.Tensor]:
    """The rows of both processes, which have different numbers of rows."""
    found = [rows if rank == mesh.get_local_rank() else rows.new_empty(sum(COUNTS[rank]), DIM) for rank in (0, 1)]
    for rank, result in enumerate(found):
        dist.broadcast(result, rank)
    return found


ON_A_CPU = partial(kernels.generate_permute_indices, use_cpu=True)


def _check_two_processes(mesh):
    use_cpu()
    utils.generate_permute_indices = ON_A_CPU
    rank = mesh.get_local_rank()
    own = slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
    for mode, dtype in CASES:
        x, index, counts, dy = zip(*(inputs(dtype, r) for r in (0, 1)), strict=True)
        of_both = torch.cat(x), by_expert([index[0], index[1] + TOKENS]), sum(counts), by_expert(dy)
        y, dx, _, *dws = results_of(Routed(mode, dtype=dtype), *of_both)
        want = [y, dx.split(TOKENS)[rank], *(dw[own] for dw in dws)]
        sent, received, values = sum(COUNTS[rank]), sum(sum(c[own]) for c in COUNTS), DIM * dtype.itemsize
        for dispatch, size in (("auto", CODES), ("high_precision", values))[: 1 if mode == "emulated" else 2]:
            model = exchanged(Routed(mode, dtype=dtype), mesh, dispatch)
            with counted() as found:
                y, dx, _, *dws = results_of(model, *inputs(dtype, rank))
            assert found == [(sent, size), (received, values), (sent, values), (received, values)]
            got = [by_expert(same_on_all(mesh, y)), dx, *dws]
            assert all(map(torch.equal, got, want)), (mode, dtype, dispatch)


def test_two_processes_have_the_bits_of_one():
    in_two_processes(_check_two_processes, "cpu")


@pytest.fixture(scope="module")
def mesh():
    """One process that exchanges rows with itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(utils, "generate_permute_indices", ON_A_CPU)


@pytest.mark.sweep
def test_compiled_experts_decode(mesh):
    x, *others = inputs(torch.bfloat16, 0)
    want = results_of(Routed(dtype=torch.bfloat16), x, *others)
    model = exchanged(Routed(dtype=torch.bfloat16), mesh)
    model.experts.compile_products("aot_eager")
    assert all(map(torch.equal, results_of(model, x, *others), want))


def test_without_codes_values_are_sent(mesh):
    x, *others = inputs(torch.float32, 0)
    want = results_of(Routed(recipe="unquantized"), x, *others)
    model = exchanged(Routed(recipe="unquantized"), mesh, "auto")
    with counted() as found:
        assert all(map(torch.equal, results_of(model, x, *others), want))
    assert {size for _, size in found} == {DIM * 4}


REFUSED = {
    "no norm": ("mxfp8", False, "no MXNorm"),
    "fprop": ("fprop=bf16, dgrad=mxfp8, wgrad=mxfp8", True, "MXFP8 or MXFP4 in fprop"),
}


@pytest.mark.parametrize("recipe, is_fed, fact", REFUSED.values(), ids=REFUSED)
def test_codes_that_no_cast_makes_are_refused(recipe, is_fed, fact):
    model = Routed(recipe=recipe)
    model.experts.fed_by = model.experts.fed_by if is_fed else ()
    choose_exchange(model, "auto")
    with pytest.raises(ConfigError) as raised:
        choose_exchange(model, "quantized")
    message = str(raised.value)
    facts = ["mxnorm.dispatch = 'quantized'", "moe.experts", fact, "'auto'"]
    assert "\n" not in message and all(fact in message for fact in facts)
