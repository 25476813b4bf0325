"""The figures of experts and routers against results and choices that are computed by hand."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import rms_norm, silu

import mxtrain
from mxtrain.analysis.metrics_file import NUMERICS
from mxtrain.diagnostics.experts import expert_figures, expert_totals, router_figures, router_totals
from mxtrain.diagnostics.recording import Numerics, check_patterns
from mxtrain.diagnostics.totals import combined, numbers
from tests.support.expert_checks import UNEVEN, quantized_experts
from tests.support.layer_checks import draw

DIM, HIDDEN, TOKENS = 64, 96, sum(UNEVEN)


def measured(experts, x, counts, dy):
    return numbers({("", ""): expert_totals(experts, x, counts, dy)})["", ""]


def relative(got, want) -> float:
    return ((got - want).norm() / want.norm()).item()


def sqnr_db(image, values) -> float:
    return -20 * torch.log10((image - values).norm() / values.norm()).item()


def test_figures_are_those_of_the_experts_own_results_and_casts():
    experts = quantized_experts(DIM, HIDDEN, len(UNEVEN))
    with torch.no_grad():
        experts.w1[3] *= torch.logspace(-4, 4, HIDDEN)[:, None].roll(1)  # its casts are others
    x, dy, counts = draw(TOKENS, DIM, seed=1).requires_grad_(), draw(TOKENS, DIM, seed=2), torch.tensor(UNEVEN)
    y = experts(x, counts)
    quantized = [y, *torch.autograd.grad(y, [x, *experts.weights], dy)]
    parts = x.split(UNEVEN)
    rows = [(silu(p @ a.t()) * (p @ c.t())) @ b.t() for p, a, b, c in zip(parts, *experts.weights)]
    exact = [torch.cat(rows), *torch.autograd.grad(torch.cat(rows), [x, *experts.weights], dy)]
    figures = expert_figures(measured(experts, x.detach(), counts, dy))
    for gemm, got, want in zip(("fprop", "dgrad"), quantized, exact):
        pairs = [pair for pair in zip(got.split(UNEVEN), want.split(UNEVEN)) if len(pair[0])]
        assert figures[f"{gemm}_error"] == pytest.approx(relative(got, want), rel=1e-3)
        assert figures[f"{gemm}_error_worst_expert"] == pytest.approx(max(relative(*p) for p in pairs), rel=1e-3)
    together = [torch.cat([dw.flatten(1) for dw in results[2:]], 1) for results in (quantized, exact)]
    used = [relative(got, want) for got, want, count in zip(*together, UNEVEN) if count]
    assert figures["wgrad_error_worst_expert"] == pytest.approx(max(used), rel=1e-3)
    gemms = experts.gemms(x.device)
    for dim, name in ((1, "fprop_weight"), (0, "dgrad_weight")):
        images = [gemms.quantize_weights([w.flatten(0, 1)], None)[dim].data for w in experts.weights]
        images = [(i if dim else i.t()).reshape(len(UNEVEN), -1) for i in images]
        image, values = torch.cat(images, 1), torch.cat([w.flatten(1) for w in experts.weights], 1)
        assert figures[f"{name}_sqnr_db"] == pytest.approx(sqnr_db(image, values), rel=1e-4)
        worst = min(map(sqnr_db, image, values))
        assert figures[f"{name}_sqnr_db_worst_expert"] == pytest.approx(worst, rel=1e-4)

    def cast(rows):
        return gemms.quantize_activation(rows).data

    def product(rows, w):
        return cast(rows) @ gemms.quantize_weights([w], None)[1].data.t()

    hidden = torch.cat([silu(product(p, a)) * product(p, c) for p, a, c in zip(parts, experts.w1, experts.w3)])
    by_hand = sqnr_db(torch.cat([cast(x), cast(hidden)], 1), torch.cat([x, hidden], 1))
    assert figures["fprop_input_sqnr_db"] == pytest.approx(by_hand, rel=1e-4)
    assert len(figures) == 18


@pytest.mark.parametrize("recipe", ["nvfp4", "fprop=mxfp8, dgrad=nvfp4, wgrad=mxfp8"])
def test_nvfp4_in_any_gemm_is_measured(recipe):
    experts, plain = (quantized_experts(DIM, HIDDEN, len(UNEVEN), r) for r in (recipe, "unquantized"))
    x, dy, counts = draw(TOKENS, DIM, seed=1), draw(TOKENS, DIM, seed=2), torch.tensor(UNEVEN)
    figures = expert_figures(measured(experts, x, counts, dy))
    assert figures["fprop_error"] == pytest.approx(relative(experts(x, counts), plain(x, counts)), rel=1e-3)
    assert 0.05 < figures["dgrad_error"] < 0.5


def test_a_process_without_rows_changes_no_figure():
    experts, x, dy = quantized_experts(DIM, HIDDEN, 2), draw(8, DIM, seed=1), draw(8, DIM, seed=2)
    some, none = (measured(experts, x[:n], torch.tensor([n, 0]), dy[:n]) for n in (8, 0))
    assert expert_figures(combined(some, none)) == pytest.approx(expert_figures(some))


def test_parts_of_the_rows_combine_to_all_of_them():
    """Every expert has whole blocks in each part."""
    experts = quantized_experts(DIM, HIDDEN, 2)
    x, dy = draw(128, DIM, seed=1), draw(128, DIM, seed=2)
    whole = measured(experts, x, torch.tensor([64, 64]), dy)
    first, second = (slice(0, 32), slice(64, 96)), (slice(32, 64), slice(96, 128))
    halves = [
        measured(experts, *(torch.cat([t[part] for part in parts]) for t in (x,)), torch.tensor([32, 32]),
                 torch.cat([dy[part] for part in parts]))
        for parts in (first, second)
    ]  # fmt: skip
    together = combined(*halves)
    for name in ("fprop", "dgrad", "fprop_input", "wgrad_grad"):
        for kind in ("signal", "noise"):
            assert together.norms[f"{name} {kind}"] == pytest.approx(whole.norms[f"{name} {kind}"], rel=1e-4)
        assert together.largest[name] >= whole.largest[name] * (1 - 1e-4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        moe = pytest.importorskip("torchtitan.models.moe.moe", reason="a mixture of experts of TorchTitan 0.2.2")
        args = moe.MoEArgs(num_experts=8, top_k=2, use_grouped_mm=False, score_before_experts=False)
        self.norm, self.moe = nn.RMSNorm(DIM, eps=1e-5), moe.MoE(args, DIM, HIDDEN)

    def forward(self, x):
        return x + self.moe(self.norm(x))


@pytest.fixture
def block(monkeypatch):
    torch.manual_seed(0)
    block = Block()
    from mxtrain.titan.v02.train_specs import histc  # only with TorchTitan 0.2.2

    monkeypatch.setattr(torch, "histc", histc)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.2)
        block.norm.weight.add_(1)
        block.moe.expert_bias.normal_(std=0.1)
    return block


def converted(block, **settings):
    block = copy.deepcopy(block)
    mxtrain.convert(block, example_inputs=(torch.randn(1, 32, DIM),), mode="reference", filter_fqns=[], **settings)
    return block


def figures_of(model, x, fqns=None) -> dict[str, float]:
    numerics = Numerics(1, fqns, 64, [model])
    with numerics.recording():
        model(x).square().mean().backward()
        assert model.moe.experts.w1.grad is None
    return {key.removeprefix(NUMERICS): value for key, value in numerics.figures().items()}


def choices(block, rows):
    gate, moe = block.moe.router.gate, block.moe
    scores = torch.sigmoid(rows @ gate.weight.double().t()) + moe.expert_bias
    return scores.topk(2).indices.sort(1).values


def test_routing_agreement_and_load(block):
    """With p = 2 an estimate scales a row's logits, and so the scores beside the bias change."""
    x = torch.randn(2, 512, DIM) * (3 * torch.randn(DIM)).exp()
    rows = x.view(-1, DIM)
    ours = converted(block)
    exact = choices(block, rms_norm(rows.double(), (DIM,), block.norm.weight.double(), 1e-5))
    estimated = choices(block, rows.double() * ours.norm(x).rho.double()[:, None] * block.norm.weight.double())
    agreement = (exact == estimated).all(1).double().mean().item()
    figures = figures_of(ours, x)
    assert 0.5 < agreement < 0.99 and figures["moe.router/routing_agreement"] == pytest.approx(agreement, abs=2e-3)
    counts = torch.bincount(estimated.flatten(), minlength=8)
    assert figures["moe.router/busiest_expert"] == pytest.approx(counts.max().item() / 2048, abs=2e-3)
    assert figures["moe.router/experts_without_tokens"] == 0
    assert {key.rpartition("/")[0] for key in figures} >= {"norm", "moe.experts", "moe.router"}
    assert 28 < figures["moe.experts/fprop_input_sqnr_db"] < 34, "of w2's input: the norm's values need no cast"
    assert figures_of(converted(block, estimator="exact"), x)["moe.router/routing_agreement"] == 1


def test_autocast_makes_the_casts_of_bf16_rows(block):
    ours, x = converted(block), torch.randn(1, 64, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        figures = figures_of(ours, x)
    assert figures["moe.experts/fprop_error"] == pytest.approx(figures_of(ours, x)["moe.experts/fprop_error"], rel=0.1)


def test_idle_experts_and_a_plain_gate(block):
    plain = router_totals(block.moe.router, torch.zeros(3, DIM), None, torch.tensor([[0, 1], [0, 2], [0, 1]]))
    assert router_figures(numbers({(): plain})[()]) == {"busiest_expert": 0.5, "experts_without_tokens": 5 / 8}


def test_patterns_select_experts_and_routers(block):
    ours, x = converted(block), torch.randn(1, 64, DIM)
    check_patterns(["router", "experts"], ours)
    assert {key.partition("/")[0] for key in figures_of(ours, x, ["experts"])} == {"moe.experts"}
    assert {key.partition("/")[0] for key in figures_of(ours, x, ["router"])} == {"moe.router"}


def test_sharded_weights_change_no_figure(block):
    x = torch.randn(2, 64, DIM)
    ours = converted(block)
    expected = figures_of(ours, x)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for part in (ours.moe.experts, ours):
            fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
        assert figures_of(ours, x) == expected
    finally:
        dist.destroy_process_group()
