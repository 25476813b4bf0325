"""Quantized experts: every expert has the bits that three linears would have on its tokens alone."""

import copy
import itertools
import pickle
import re
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from torch._dynamo.utils import counters
from torch.nn.functional import silu
from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
from torchao.quantization.quantize_.common import KernelPreference

from mxtrain import ConfigError, MXLinear, set_rounding_step
from mxtrain.formats import gemm
from mxtrain.formats.mx import ops as mxfp8
from mxtrain.formats.parse import get_recipe
from mxtrain.nn import experts as module
from mxtrain.nn.experts import QuantizedExperts, check_experts
from mxtrain.nn.three_gemms import ThreeGEMMs
from tests.support.expert_checks import (
    UNEVEN,
    Experts,
    assert_same_sums,
    decoded_grouped_mm,
    heavy_tailed,
    quantized_experts,
)
from tests.support.layer_checks import FQN, SEED, assert_near, draw, fill

E, D, H = len(UNEVEN), 64, 96
BLOCK = 32
BEYOND = 9
MIXED = [
    f"fprop={a}, dgrad={b}, wgrad={c}"
    for a, b, c in itertools.product(("mxfp8", "bf16"), repeat=3)
    if len({a, b, c}) == 2
]
# The third one casts weights in blocks, and neither transforms nor rounds stochastically.
WITH_NVFP4 = [
    "fprop=nvfp4, dgrad=mxfp8, wgrad=nvfp4",
    "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16",
    get_recipe("nvfp4_dynamic", weight_tiles=False, hadamard=False, stochastic_rounding=False),
    *(get_recipe(name, four_over_six="both", weight_tiles=False) for name in ("nvfp4", "nvfp4_row")),
    "fprop=nvfp4_row, dgrad=mxfp8, wgrad=bf16",
]
MXFP4, E5M2 = "mxfp4", "fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8_e5m2"

pytestmark = pytest.mark.usefixtures("device")


def results_of(experts, x, counts, dy) -> list[torch.Tensor]:
    """Result, and gradients of x and of the weights, with the random bits of a step's first forward."""
    set_rounding_step(5, microbatch=2, rank=1)
    x = x.detach().requires_grad_()
    y = experts(x, torch.tensor(counts))
    return [y.detach(), *torch.autograd.grad(y, [x, *experts.parameters()], dy)]


def results_of_linears(experts: QuantizedExperts, x, counts, dy) -> list[torch.Tensor]:
    """The same from two ``MXLinear`` per expert, or three with NVFP4.

    Their rows are padded, because a GEMM of fp32 may sum in an order
    that depends on the number of rows.
    """
    set_rounding_step(5, microbatch=2, rank=1)
    found = [[], [], [], [], []]
    parts = zip(*(t[: sum(counts)].split(counts) for t in (x, dy)), strict=True)
    for e, (own_x, own_dy) in enumerate(parts):
        padding = (0, 0, 0, -len(own_x) % BLOCK or BLOCK * (len(own_x) == 0))
        rows = nn.functional.pad(own_x, padding).requires_grad_()
        w1, w2, w3 = (of_weight(experts, w[e], i * len(w) + e) for i, w in enumerate(experts.weights))
        if experts.recipe.tensor_scaled:
            gate, up = w1(rows), w3(rows)
            leaves = [linear.weight for linear in (w1, w2, w3)]
        else:
            of_input = of_weight(experts, torch.cat((w1.weight, w3.weight)))
            gate, up = of_input(rows).chunk(2, 1)
            leaves = [of_input.weight, w2.weight]
        y = w2(silu(gate) * up)
        dx, *dws = torch.autograd.grad(y, [rows, *leaves], nn.functional.pad(own_dy, padding))
        if len(dws) == 2:
            dws = [*dws[0].chunk(2)[:1], dws[1], *dws[0].chunk(2)[1:]]
        for of_all, own in zip(found, (y.detach()[: len(own_x)], dx[: len(own_x)], *dws), strict=True):
            of_all.append(own)
    return [*map(torch.cat, found[:2]), *map(torch.stack, found[2:])]


def of_weight(experts: QuantizedExperts, w: torch.Tensor, number: int = 0) -> MXLinear:
    linear = MXLinear(w.shape[1], w.shape[0], bias=False, recipe=experts.recipe, mode=experts.mode)
    linear.weight = nn.Parameter(w.detach().clone())
    linear.set_seed(SEED, FQN)
    if linear._seeds is not None:
        linear._seeds[1] += number  # the signs of the layer, a key of its own
    return linear


COUNTS = {
    "uneven": UNEVEN,
    "all on one": (0, 0, 150, 0, 0),
    "none": (0,) * 5,
    "few": (20, 0, 33),
    "64 experts": tuple(e * e % 5 for e in range(64)),
}
CASES = [
    ("mxfp8", "reference", torch.float32, "uneven"),
    ("mxfp8", "reference", torch.bfloat16, "all on one"),
    ("mxfp8", "emulated", torch.bfloat16, "few"),
    *((recipe, "reference", torch.bfloat16, "few") for recipe in MIXED),
    ("mxfp8_2d", "reference", torch.float32, "few"),
    pytest.param("mxfp8_2d", "emulated", torch.bfloat16, "few", marks=pytest.mark.sweep),
    ("bf16", "emulated", torch.bfloat16, "uneven"),
    ("nvfp4", "reference", torch.float32, "few"),
    *(("nvfp4", "reference", torch.bfloat16, counts) for counts in ("uneven", "none", "64 experts")),
    *((recipe, "reference", torch.bfloat16, "uneven") for recipe in WITH_NVFP4),
    ("fprop=nvfp4, dgrad=dequantized, wgrad=dequantized", "reference", torch.bfloat16, "uneven"),
    ("fprop=mxfp8, dgrad=dequantized, wgrad=dequantized", "emulated", torch.bfloat16, "few"),
    ("fprop=mxfp8, dgrad=dequantized, wgrad=dequantized", "emulated", torch.float32, "few"),
    *((recipe, "reference", torch.bfloat16, "few") for recipe in (MXFP4, E5M2)),
    *(pytest.param(recipe, "emulated", torch.bfloat16, "few", marks=pytest.mark.sweep) for recipe in (MXFP4, E5M2)),
    # The interpreter takes half a minute; tests/formats/nvfp4/test_ops.py casts groups with it.
    *((r, "emulated", torch.bfloat16, "few") for r in ("nvfp4", "nvfp4_row") if torch.cuda.is_available()),
]


@pytest.mark.parametrize(("recipe", "mode", "dtype", "counts"), CASES, ids=str)
def test_every_expert_has_the_bits_of_its_own_linears(recipe, mode, dtype, counts):
    """On tokens and weights of very different magnitudes; rows beyond the counts are NaN and give zeros."""
    counts, total = COUNTS[counts], sum(COUNTS[counts])
    experts = quantized_experts(D, H, len(counts), recipe, mode, dtype)
    experts.set_seed(SEED, FQN)
    with torch.no_grad():
        for i, w in enumerate(experts.parameters()):
            w.copy_(heavy_tailed(*w.shape, seed=i))
    x, dy = (heavy_tailed(total + BEYOND, D, seed=s, dtype=dtype) for s in (3, 4))
    x[total:] = dy[total:] = float("nan")
    y, dx, *dws = results_of(experts, x, counts, dy)
    assert y.dtype == dx.dtype == dtype and not y[total:].any() and not dx[total:].any()
    for got, want in zip((y[:total], dx[:total], *dws), results_of_linears(experts, x, counts, dy), strict=True):
        assert_same_sums(got, want)


def test_the_bits_are_those_of_torchao():
    """Of its emulation, on groups of whole blocks of heavy-tailed rows."""
    counts = (32, 0, 64)
    x, dy = (heavy_tailed(sum(counts), D, seed=s, dtype=torch.bfloat16) for s in (0, 1))
    experts = quantized_experts(D, H, len(counts), mode="emulated", dtype=torch.bfloat16)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)

    def torchaos(x, _):
        def product(x, w):
            return _to_mxfp8_then_scaled_grouped_mm(
                x, w.transpose(1, 2), offs=ends, kernel_preference=KernelPreference.EMULATED
            )

        gate, up = product(x, torch.cat((experts.w1, experts.w3), 1)).chunk(2, 1)
        return product(silu(gate) * up, experts.w2)

    torchaos.parameters = experts.parameters
    for got, want in zip(results_of(experts, x, counts, dy), results_of(torchaos, x, counts, dy), strict=True):
        assert_same_sums(got, want)


def test_unquantized_experts_in_fp64_are_those_of_plain_pytorch():
    experts = quantized_experts(D, H, E, "unquantized", dtype=torch.float64)
    x, dy = (draw(sum(UNEVEN), D, seed=s, dtype=torch.float64) for s in (0, 1))

    def plain(x, _):
        parts = zip(x.split(UNEVEN), experts.w1, experts.w2, experts.w3, strict=True)
        return torch.cat([(silu(rows @ w1.t()) * (rows @ w3.t())) @ w2.t() for rows, w1, w2, w3 in parts])

    plain.parameters = experts.parameters
    assert_near(results_of(experts, x, UNEVEN, dy), results_of(plain, x, UNEVEN, dy), 1e-12)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_what_is_not_finite_in_one_expert_stays_there(recipe):
    experts = quantized_experts(D, H, E, recipe)
    x, dy = (heavy_tailed(sum(UNEVEN), D, seed=s) for s in (0, 1))
    want = results_of(experts, x, UNEVEN, dy)
    x[40] = float("nan")  # the only token of expert 1
    got = results_of(experts, x, UNEVEN, dy)
    tokens, others = torch.arange(len(x)) != 40, torch.arange(E) != 1
    for a, b, own in zip(got, want, (tokens, tokens, others, others, others), strict=True):
        assert torch.equal(a[own], b[own]) and a[~own].isnan().any()


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_native_experts_have_the_results_of_others(device, monkeypatch):
    """With PyTorch's grouped products decoded on a CPU, which also look at the memory of operands and scales."""
    experts = quantized_experts(128, 256, 3, mode="reference", dtype=torch.bfloat16)
    counts = (130, 0, 3)
    x, dy = (heavy_tailed(sum(counts) + BEYOND, 128, seed=s, dtype=torch.bfloat16) for s in (0, 1))
    want = results_of(experts, x, counts, dy)
    monkeypatch.setattr(mxfp8, "runs_kernels", lambda *_: False)  # interpreted, they take long
    monkeypatch.setattr(gemm, "scaled_grouped_mm", decoded_grouped_mm)
    monkeypatch.setattr(QuantizedExperts, "gemms", in_native_mode)
    results = results_of(experts, x, counts, dy)
    experts.ready = experts.quantize_ahead(experts.gemms(x.device))
    for got in (results, results_of(experts, x, counts, dy)):
        # Other numbers of padded rows: fp32 sums of the same products may differ in their order.
        assert all(r.isfinite().all() for r in got)
        assert_near(got, want, 2**-7)


def in_native_mode(experts: QuantizedExperts, device) -> ThreeGEMMs:
    return replace(ThreeGEMMs(experts.recipe.key, experts.mode, experts.split), mode="native")


def test_native_experts_need_whole_tiles(monkeypatch):
    """Refused when they are made, where this machine computes native products, and in a forward."""
    experts = quantized_experts(128, 192, 2)
    monkeypatch.setattr(QuantizedExperts, "gemms", in_native_mode)
    with pytest.raises(ConfigError, match="192.*multiple of 128"):
        experts(torch.zeros(3, 128), torch.tensor([1, 2]))
    monkeypatch.setattr(module, "resolve_mode", lambda mode: "native")
    with pytest.raises(ConfigError, match="192.*multiple of 128"):
        check_experts(Experts(192, 128, 2), get_recipe("mxfp8"))
    check_experts(Experts(192, 96, 2), get_recipe("bf16"))  # has no scales
    with pytest.raises(ConfigError, match="NVFP4"):
        check_experts(Experts(128, 128, 2), get_recipe("fprop=mxfp8, dgrad=nvfp4, wgrad=mxfp8"))


@pytest.mark.parametrize(
    ("recipe", "hidden", "message"),
    [
        ("nvfp4", 72, "72.*multiple of the block size 16"),
        ("mxfp8", 80, "80.*multiple of the block size 32"),
        ("mxfp9", 64, "mxfp9"),
    ],
)
def test_experts_that_no_recipe_computes_are_refused(recipe, hidden, message):
    with pytest.raises(ConfigError, match=message):
        quantized_experts(64, hidden, 2, recipe)


@pytest.mark.parametrize(
    ("x", "counts", "message"),
    [
        (torch.zeros(4, D + 1), [4, 0], "its last dimension must be 64"),
        (torch.zeros(2, 2, D), [4, 0], "(2, 2, 64)"),
        (torch.zeros(4, D), [4], "(1,)"),
        (torch.zeros(4, D, dtype=torch.float16), [4, 0], "float16"),
        (torch.zeros(4, D, dtype=torch.float64), [4, 0], "float64"),
        (torch.zeros(4, D, device="meta"), [4, 0], "meta"),
    ],
)
def test_wrong_inputs_are_refused(x, counts, message):
    experts = quantized_experts(D, 32, 2)
    with pytest.raises(ValueError, match=re.escape(message)):
        experts(x if x.is_meta else x.to(experts.w1.device), torch.tensor(counts))


@pytest.mark.parametrize("frozen", [["w1"], ["w2"], ["w1", "w2", "w3"], ["x"], ["x", "w1", "w3"]], ids=str)
def test_what_is_frozen_gets_no_gradient_and_the_others_keep_theirs(frozen):
    x, dy = draw(sum(UNEVEN), D, seed=0), draw(sum(UNEVEN), D, seed=1)
    experts = quantized_experts(D, H, E)
    want = dict(zip(("x", *dict(experts.named_parameters())), results_of(experts, x, UNEVEN, dy)[1:], strict=True))
    leaves = {"x": x, **dict(experts.named_parameters())}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name not in frozen)
    experts(x, torch.tensor(UNEVEN)).backward(dy)
    for name, leaf in leaves.items():
        assert leaf.grad is None if name in frozen else torch.equal(leaf.grad, want[name])


def test_autocast_computes_in_its_dtype_and_keeps_that_of_x():
    x, dy = heavy_tailed(sum(UNEVEN), D, seed=0), draw(sum(UNEVEN), D, seed=1)
    experts = quantized_experts(D, H, E)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        got = results_of(experts, x, UNEVEN, dy)
    want = results_of(experts, x.bfloat16(), UNEVEN, dy.bfloat16())
    assert [r.dtype for r in got] == [torch.float32] * 5
    assert all(torch.equal(a, b.float()) for a, b in zip(got, want, strict=True))


def test_experts_are_those_that_were_given():
    """The same parameters in the same order, of a class that is both, with a copy and a pickle of their own."""
    old = fill(Experts(D, H, E)).eval()
    new = QuantizedExperts.from_experts(old, recipe="mxfp8", mode="reference")
    assert isinstance(new, Experts) and not new.training and "mxfp8" in repr(new)
    assert [(n, id(p)) for n, p in new.named_parameters()] == [(n, id(p)) for n, p in old.named_parameters()]
    x, counts = draw(sum(UNEVEN), D, seed=0), torch.tensor(UNEVEN)
    y = new(x, counts)
    new.ready = new.quantize_ahead(new.gemms(x.device))
    for other in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        assert type(other) is type(new) and other.ready is None and other.w1 is not new.w1
        assert torch.equal(other(x, counts), y)
        other.load_state_dict({name: 2 * value for name, value in old.state_dict().items()})
        assert not torch.equal(other(x, counts), y) and torch.equal(new(x, counts), y)


def test_experts_compile_once_for_all_counts(compile_backend):
    """Without a graph break. The rules about shapes are PyTorch's: other numbers of tokens may need another graph."""
    experts = quantized_experts(32, 32, 3, "mxfp8", "emulated", torch.bfloat16)
    compiled = torch.compile(experts, backend=compile_backend, fullgraph=True, dynamic=True)
    compiled.parameters = experts.parameters
    counters.clear()
    for counts in ((40, 0, 3), (0, 50, 50)):
        x, dy = (heavy_tailed(max(70, sum(counts)), 32, seed=s, dtype=torch.bfloat16) for s in (0, 1))
        # SwiGLU and its cast are one kernel in the graph, and a code next to a rounding boundary may flip.
        assert_near(results_of(compiled, x, counts, dy), results_of(experts, x, counts, dy), 2e-2)
    assert counters["stats"]["unique_graphs"] == 1
