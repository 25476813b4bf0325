"""What a norm of sharded sequences sends: codes give the same results as high precision, bit for bit, in fewer bytes.

The data has heavy tails and two sequences: blocks that begin at the wrong token, or join two sequences, would show.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mxtrain.formats.collectives import GATHER_PARTS
from mxtrain.formats.parse import get_recipe
from mxtrain.nn import gathered_norm
from mxtrain.nn.gathered_norm import SumGradient, gathers_codes
from mxtrain.nn.group import LinearGroup
from mxtrain.nn.mixture import of_whole_sequences
from mxtrain.nn.split import SplitSequences
from tests.support.gather_counts import GATHERS, bytes_of, counted, split_block
from tests.support.layer_checks import (
    CHECKPOINTING,
    NormBlock,
    assert_near,
    draw,
    fields_with_gradients,
    in_two_processes,
)

BATCH, SEQUENCE, DIM, OUTPUTS = 2, 128, 128, 64
ROWS, COLUMNS = "rows", "columns"
MXFP8, NVFP4, MXFP4, FP32 = 1 + 1 / 32, 0.5 + 1 / 16, 0.5 + 1 / 32, 4.0
# Recipe -> bytes per element of what fprop and wgrad read.
RECIPES = {
    "mxfp8": (MXFP8, MXFP8),
    "nvfp4": (NVFP4, NVFP4),
    "mxfp4": (MXFP4, MXFP4),
    "fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8_e5m2": (MXFP8, MXFP8),
    "nvfp4_dynamic": (NVFP4, NVFP4),
    "nvfp4_row": (NVFP4 + 4 / DIM, NVFP4),
    "nvfp4_4over6": (NVFP4, NVFP4),
    "fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8": (NVFP4, MXFP8),
    "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16": (MXFP8, FP32),
    "fprop=nvfp4, dgrad=dequantized, wgrad=dequantized": (NVFP4, NVFP4),
    "nvfp4_rl": (NVFP4 + 4 / DIM, NVFP4 + 4 / DIM),
}


def save_gathers(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is GATHER_PARTS else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "none": lambda module, x: module(x),
    **CHECKPOINTING,
    "gathers kept": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, save_gathers)
    ),
}


def heavy_tailed(*shape: int, seed: int) -> torch.Tensor:
    return draw(*shape, seed=seed) ** 25


def results_of(block, call, mesh) -> list[torch.Tensor]:
    """Outputs and gradients of this process: its sequences, its outputs."""
    rank = mesh.get_local_rank()
    x = heavy_tailed(BATCH, SEQUENCE, DIM, seed=0).chunk(2, 1)[rank].contiguous().requires_grad_()
    seeds = range(1, 1 + len(block.linears))
    dys = [heavy_tailed(BATCH, SEQUENCE, OUTPUTS, seed=s).chunk(2, 2)[rank].contiguous() for s in seeds]
    outputs = call(x)
    gradients = torch.autograd.grad(outputs, [x, *block.parameters()], dys)
    return [t.detach().to_local() if isinstance(t, DTensor) else t.detach() for t in (*outputs, *gradients)]


def split_blocks(mesh, recipe: str) -> list[NormBlock]:
    """The same norm and three linears twice, with both kinds of gathers."""
    recipe = get_recipe(recipe, stochastic_rounding=False if get_recipe(recipe).needs_draws else None)
    blocks = [NormBlock(DIM, OUTPUTS, *[recipe] * 3) for _ in range(2)]
    for block, gather in zip(blocks, ("high_precision", "quantized")):
        split_block(block, mesh, gather)
    return blocks


def check_eager(mesh, recipe: str, mode: str) -> None:
    """One gather per norm and pass, of the expected size; the recomputed forward gathers again unless told not to."""
    outcomes = []
    for block in split_blocks(mesh, recipe):
        with counted() as counts:
            results = results_of(block, partial(CHECKPOINTS[mode], block), mesh)
        outcomes.append((results, [count / (BATCH * SEQUENCE * DIM) for count in counts]))
    (expected, sent), (found, sent_codes) = outcomes
    again = mode in ("full", "selective")
    fprop, wgrad = RECIPES[recipe]
    assert sent == [FP32] * (1 if mode == "none" else 2)
    assert sent_codes == [fprop] * (1 + again) + [wgrad]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (recipe, mode)


def check_linears_that_differ(mesh) -> None:
    """In their recipe of wgrad, and in signs of their own. Codes are released after the backward."""
    own = get_recipe("fprop=mxfp8, dgrad=mxfp8, wgrad=nvfp4", stochastic_rounding=False)
    recipes = ["mxfp8", "fprop=mxfp8, dgrad=mxfp8, wgrad=bf16", own, own]
    outcomes, found = [], []
    for gather in ("high_precision", "quantized"):
        block = NormBlock(DIM, OUTPUTS, *recipes, norm="mxfp8")
        split_block(block, mesh, gather)
        block.norm.register_forward_hook(lambda norm, args, normed: found.append(normed))
        outcomes.append(results_of(block, block, mesh))
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert found[0].gathered is None and found[1].gathered.operands == {}
    assert all(fields_with_gradients(normed) == {"h", "weight"} for normed in found)


def check_compiled(mesh, recipe: str, mode: str) -> None:
    """The graphs gather once for all linears: rows in the forward, columns in the backward."""
    gathers = []

    def count(graph, inputs):
        gathers.append([bytes_of(node.meta["val"]) for node in graph.graph.nodes if node.target in GATHERS])
        return graph.forward

    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    plain, block = split_blocks(mesh, recipe)
    torch._dynamo.reset()
    # The state of the random numbers would enter the graph, which PyTorch 2.13 does not compile on a CPU.
    options = {} if mode == "none" else {"preserve_rng_state": False}
    compiled = torch.compile(partial(CHECKPOINTS[mode], block, **options), backend=backend, fullgraph=True)
    found = results_of(block, compiled, mesh)
    expected = results_of(plain, plain, mesh)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (recipe, mode)
    # With checkpointing, too: no operation after the linears needs their results again in the backward.
    assert gathers == [[round(size * BATCH * SEQUENCE * DIM)] for size in RECIPES[recipe]]


def check_compiled_kernels(mesh) -> None:
    """PyTorch 2.11 drops the gradient of a result that an operation, here a kernel's contiguous(), returns as it is."""
    for linears, gather in ((1, "high_precision"), (2, "quantized")):
        block = NormBlock(DIM, OUTPUTS, *["mxfp8"] * linears, mode="emulated")
        split_block(block, mesh, gather)
        block.norm.group = LinearGroup(block.linears) if linears > 1 else None
        found = results_of(block, torch.compile(block, backend="aot_eager", fullgraph=True), mesh)
        assert_near(found, results_of(block, block, mesh), 1e-6)


def check_dynamo_follows_no_function(mesh) -> None:
    """Numbers that differ between norms are no inputs of a graph, and no autograd function is a module in it."""
    bodies, inputs = [], []

    def backend(graph, values):
        bodies.extend(name for name, _ in graph.named_children())
        inputs.append(len(values))
        return graph.forward

    torch._dynamo.reset()
    for is_plain in (False, True):
        for gather in ("high_precision", "quantized"):
            for eps, forwards in ((1e-5, 1), (0.5, 2)):
                block = NormBlock(DIM, OUTPUTS, "mxfp8")
                split_block(block, mesh, gather, forwards)
                block.norm.is_plain = is_plain
                block.norm.estimate = replace(block.norm.estimate, eps=eps)
                torch.compile(block.norm, backend=backend, fullgraph=True)(draw(1, 64, DIM, seed=0).requires_grad_())
    assert not bodies and len(inputs) >= 6 and set(inputs) == {2}, inputs


def check_graph_that_ends_after_the_norm(mesh) -> None:
    """The linears' graphs take the gathered columns of another graph, or of a norm in eager mode."""
    plain, block = split_blocks(mesh, "mxfp8")
    expected = results_of(plain, plain, mesh)
    torch._dynamo.reset()
    for modules in ([block.norm], block.linears):
        for module in modules:
            module.compile(backend="aot_eager", fullgraph=True)
        assert_near(results_of(block, block, mesh), expected, 1e-6)
    block.norm._compiled_call_impl = None
    assert_near(results_of(block, block, mesh), expected, 1e-6)


def check_refused(mesh) -> None:
    (_, block) = split_blocks(mesh, "mxfp8")
    with pytest.raises(
        ValueError, match=r"x has 48 tokens on each of 2 processes, and gather = 'quantized' needs whole"
    ):
        block(draw(1, 48, DIM, seed=0))


def check_rows(mesh) -> None:
    """[T, D], as TorchTitan's main has it, is one sequence."""
    split = SplitSequences(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())
    own = heavy_tailed(1, SEQUENCE, DIM, seed=0).chunk(2, 1)[split.rank]
    for case in ("high_precision", "quantized", "plain", "made again"):
        block = NormBlock(DIM, OUTPUTS, "mxfp8")
        if case == "made again":
            block.norm.register_forward_hook(lambda norm, args, normed: of_whole_sequences(normed, split))
        else:
            split_block(block, mesh, "auto" if case == "plain" else case)
            block.norm.is_plain = block.linears[0].is_plain = case == "plain"
        outcomes = []
        for x in (own.clone(), own[0].clone()):
            (y,) = block(x.requires_grad_())
            assert y.shape[:-1] == (*x.shape[:-2], SEQUENCE)
            outcomes.append((y.flatten(), *torch.autograd.grad(y.cos().sum(), x)))
        (y, dx), (of_rows, dx_of_rows) = outcomes
        assert torch.equal(of_rows, y) and torch.equal(dx_of_rows, dx[0]), case


def check_gathers(mesh) -> None:
    """Run by ``test_two_ranks``, whose processes this shares: starting them takes longer than the checks."""
    for recipe in RECIPES:
        check_eager(mesh, recipe, "none")
    for mode in CHECKPOINTS:
        check_eager(mesh, "mxfp8", mode)
    check_linears_that_differ(mesh)
    check_rows(mesh)
    check_dynamo_follows_no_function(mesh)
    check_refused(mesh)


def check_graphs(mesh) -> None:
    check_compiled(mesh, "mxfp8", "selective")
    check_compiled(mesh, [*RECIPES][-1], "none")
    check_compiled_kernels(mesh)
    check_graph_that_ends_after_the_norm(mesh)


@pytest.mark.sweep
@pytest.mark.usefixtures("device")
def test_codes_give_the_bits_of_high_precision_in_compiled_graphs(device):
    in_two_processes(check_graphs, device)


@pytest.mark.parametrize(
    "recipe, dtype, forwards, tokens, codes",
    [
        ("mxfp8", torch.bfloat16, 1, 64, False),  # 2.06 bytes, not 2
        ("mxfp8", torch.bfloat16, 2, 64, True),  # 3.09, not 4
        ("mxfp8", torch.float32, 1, 64, True),
        ("nvfp4", torch.bfloat16, 1, 64, True),  # 1.125, not 2
        ("nvfp4", torch.bfloat16, 2, 48, False),  # half a block of 32 tokens
        ("unquantized", torch.bfloat16, 2, 64, False),
        ("unquantized", torch.float32, 1, 64, False),  # 4, not less than 4
        ("fprop=mxfp8, dgrad=mxfp8, wgrad=bf16", torch.bfloat16, 2, 64, False),  # 4.06, not 4
    ],
)
def test_auto_sends_what_takes_fewer_bytes(recipe, dtype, forwards, tokens, codes):
    x = torch.empty(2, tokens, DIM, dtype=dtype, device="meta")
    recipe = get_recipe(recipe)
    for gather, expected in (("auto", codes), ("high_precision", False)):
        split = SplitSequences("group", 2, 0, gather, forwards)
        assert gathers_codes(x, recipe, "emulated", split) == expected


def test_values_of_the_reference_take_more_bytes():
    x, split = torch.empty(2, 64, DIM, device="meta"), SplitSequences("group", 2, 0, forwards=2)
    sent = [gathers_codes(x, get_recipe("unquantized"), mode, split) for mode in ("emulated", "reference")]
    assert sent == [True, False], "6 and 12 bytes per element, not 8"


@pytest.mark.parametrize("rank, gradient", [(0, 3.0), (1, 0.0)])
def test_one_process_gets_the_sum_of_a_gradients_parts(monkeypatch, rank, gradient):
    monkeypatch.setattr(gathered_norm, "sum_parts", lambda part, group: 3 * part)
    y = torch.ones(4, requires_grad=True)
    SumGradient.apply(y, SplitSequences("three", 3, rank).key).sum().backward()
    assert y.grad.tolist() == [gradient] * 4
