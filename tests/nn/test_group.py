"""Linears of one norm as one GEMM each way: they give the results of single linears, and stay single if they differ."""

from collections import Counter

import pytest
import torch
import torch.nn as nn
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from mxtrain.formats.gemm import guarded_mm
from mxtrain.formats.parse import get_recipe
from mxtrain.launch.launch import INTERPRETED
from mxtrain.nn.group import LinearGroup
from mxtrain.nn.split import by_output_features
from tests.support.layer_checks import CHECKPOINTING, NormBlock, assert_near, draw, fill, results_of

D, TOKENS, OUTPUTS = 96, (2, 20), (64, 32, 96)
MIXED = "fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8"
PRODUCTS = (torch.ops.aten.mm.default, guarded_mm)

pytestmark = pytest.mark.usefixtures("device", "rounding_step")


def block_of(recipe="mxfp8", mode="emulated", grouped=True, dtype=torch.float32, recipes=None, **settings) -> NormBlock:
    """One norm that feeds three linears of different sizes."""
    recipes = recipes or [recipe] * 3
    block = NormBlock(D, 32, *recipes, mode=mode, dtype=dtype, **settings)
    for linear, outputs in zip(block.linears, OUTPUTS):
        linear.out_features = outputs
        linear.weight = nn.Parameter(torch.empty(outputs, D, dtype=dtype))
        if linear.bias is not None:
            linear.bias = nn.Parameter(torch.empty(outputs, dtype=dtype))
    if grouped:
        block.norm.group = LinearGroup(block.linears)
    return fill(block)


def inputs(dtype=torch.float32):
    return draw(*TOKENS, D, seed=0, dtype=dtype), [draw(*TOKENS, n, seed=n, dtype=dtype) for n in OUTPUTS]


class Called(nn.Module):
    """A block whose linears are called by a function of the block and the norm's result."""

    def __init__(self, block, call):
        super().__init__()
        self.block, self.call = block, call

    def forward(self, x):
        return self.call(self.block, self.block.norm(x))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in PRODUCTS
        return func(*args, **(kwargs or {}))


def run(block, x=None, dys=None) -> tuple[list[torch.Tensor], int]:
    """Outputs, gradients of x and of all parameters, and the number of products."""
    own_x, own_dys = inputs(next(block.parameters()).dtype)
    with Products() as products:
        results = results_of(block, own_x if x is None else x, *(dys or own_dys))
    return results, products.count


def assert_same(got, want):
    """Outputs and gradients of weights and biases are equal; gradients of x and gain sum in another order."""
    *outputs, dx, dgain = got[:5]
    assert_near([dx, dgain], want[3:5], 1e-6)
    assert all(b.any() for b in want)
    assert_same_products([*outputs, *got[5:]], [*want[:3], *want[5:]])


def assert_same_products(got, want):
    """Same bits on a CPU. On a GPU, cuBLAS chooses its kernel, and with it the order of sums, by the shape."""
    if want[0].is_cuda:
        assert_near(got, want, 1e-6)
    else:
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("recipe", "mode"),
    [
        ("mxfp8", "reference"),
        ("mxfp8", "emulated"),
        ("nvfp4", "reference"),
        ("fprop=nvfp4, dgrad=dequantized, wgrad=dequantized", "reference"),
        pytest.param(MIXED, "emulated", marks=pytest.mark.sweep),
    ],
)
def test_one_gemm_each_way_with_the_results_of_three(recipe, mode):
    """The rounding bits of each linear are its own, so operands are equal to the bit."""
    single, of_single = run(block_of(recipe, mode, grouped=False, bias=True))
    grouped, of_group = run(block_of(recipe, mode, bias=True))
    assert (of_single, of_group) == (9, 3)
    assert_same(grouped, single)


@pytest.mark.parametrize(("rounding", "affine"), [("floor", True), ("rceil", False)])
def test_other_recipes_and_norms_without_a_gain(rounding, affine):
    for recipe in (
        get_recipe("mxfp8", scale_rounding=rounding),
        get_recipe("nvfp4", weight_tiles=False),
        "nvfp4_dynamic",
        "mxfp8_2d",
    ):
        single, _ = run(block_of(recipe, "reference", grouped=False, affine=affine))
        grouped, products = run(block_of(recipe, "reference", affine=affine))
        assert products == 3
        for a, b in zip(grouped, single, strict=True):
            assert_near([a], [b], 1e-6)


def test_fprop_may_stay_single():
    block = block_of(mode="reference")
    block.norm.group.joins_fprop = False
    results, products = run(block)
    assert products == 5
    assert_same(results, run(block_of(mode="reference", grouped=False))[0])


def hooked(block):
    block.linears[1].register_forward_pre_hook(lambda module, args: None)


def replaced(block):
    """As libraries replace a forward that fetches the weight first."""
    forward = block.linears[1].forward
    block.linears[1].forward = lambda normed: forward(normed)


def sharded(block):
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    block.linears[2].weight = nn.Parameter(distribute_tensor(block.linears[2].weight.detach(), mesh, [Replicate()]))


def frozen(block):
    block.linears[0].weight.requires_grad_(False)


def other_dtype(block):
    block.linears[0].to(torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (hooked, {}),
        (replaced, {}),
        (frozen, {}),
        (other_dtype, {}),
        (None, {"recipes": ["mxfp8", "mxfp8", "fprop=mxfp8, dgrad=mxfp8, wgrad=bf16"]}),
        (None, {"recipe": "fprop=mxfp8, dgrad=mxfp8, wgrad=bf16"}),
        (None, {"recipe": "fprop=mxfp8, dgrad=mxfp8, wgrad=nvfp4", "norm": "mxfp8"}),
    ],
    ids=["hook", "forward", "frozen weight", "dtype", "recipe", "high precision", "own signs"],
)
def test_linears_that_differ_stay_single(change, settings):
    found = []
    for grouped in (False, True):
        block = block_of(grouped=grouped, **{"mode": "reference", **settings})
        if change:
            change(block)
        x, dys = inputs()
        with Products() as products:
            outputs = block(x.requires_grad_())
            torch.autograd.backward(outputs, [dy.to(y.dtype) for y, dy in zip(outputs, dys)])
        found.append(([*outputs, x.grad, *(p.grad for p in block.parameters() if p.requires_grad)], products.count))
    (single, of_single), (grouped, of_group) = found
    assert of_group == of_single >= 8
    assert all(torch.equal(a, b) for a, b in zip(grouped, single, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda linear: linear.to("meta"),
        lambda linear: setattr(linear, "split", by_output_features("group")),
    ],
    ids=["device", "split"],
)
def test_linears_whose_weights_lie_in_other_places_stay_single(change):
    block = block_of()
    assert block.norm.group.is_one_gemm("emulated", has_signs=False)
    change(block.linears[2])
    assert not block.norm.group.is_one_gemm("emulated", has_signs=False)


class CountedDouble(nn.Module):
    """A parametrization that counts how often the weight is computed."""

    calls = 0

    def forward(self, weight):
        if not torch.compiler.is_compiling():
            self.calls += 1
        return 2 * weight


def parametrize(block):
    """Give the first and the last linear a parametrization, and leave the second one."""
    for linear in (block.linears[0], block.linears[2]):
        register_parametrization(linear, "weight", CountedDouble())
    return block


def test_parametrized_linears_multiply_alone_and_compute_their_weights_rarely():
    (single, of_single), (grouped, of_group) = (
        run(parametrize(block_of(mode="reference", grouped=grouped))) for grouped in (False, True)
    )
    assert of_group == of_single == 9
    assert all(torch.equal(a, b) for a, b in zip(grouped, single, strict=True))
    block = parametrize(block_of(mode="reference"))
    doubles = [module for module in block.modules() if isinstance(module, CountedDouble)]
    before = [double.calls for double in doubles]  # PyTorch tries a parametrization when it is registered
    block(inputs()[0])
    assert len(before) == 2 and all(double.calls <= calls + 2 for double, calls in zip(doubles, before))


def test_parametrized_linears_compile(compile_backend):
    block, (x, dys) = parametrize(block_of()), inputs()
    expected = results_of(block, x, *dys)
    assert_near(results_of(torch.compile(block, backend=compile_backend, fullgraph=True), x, *dys), expected, 1e-6)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_sharded_weight_keeps_its_linear_for_itself(device):
    """FSDP2 gathers the weight of a linear that is a unit of its own when that linear is called, not before."""
    block = block_of()
    try:
        sharded(block)
        call = block.norm(inputs()[0]).call
        first = block.linears[0]
        assert call.output(first, block.norm(inputs()[0]), first.gemms(torch.device("cpu")), None) is None
    finally:
        torch.distributed.destroy_process_group()


def test_native_nvfp4_stays_single():
    """An operand has a single tensor scale, and each weight needs its own."""
    for recipe, mode, expected in (
        ("nvfp4", "native", False),
        ("nvfp4", "emulated", True),
        ("mxfp8", "native", True),
        (MIXED, "native", False),
        ("unquantized", "reference", False),
    ):
        assert get_recipe(recipe).joins(mode) == expected


def test_outputs_that_the_loss_does_not_need():
    found = []
    for grouped in (False, True):
        block = block_of(mode="reference", grouped=grouped)
        x, dys = inputs()
        outputs = block(x.requires_grad_())
        torch.autograd.backward(outputs[1], dys[1])
        assert block.linears[0].weight.grad is None and block.linears[2].weight.grad is None
        found.append([outputs[1], x.grad, block.norm.weight.grad, block.linears[1].weight.grad])
    assert_near(found[1], found[0], 1e-6)


def test_an_input_that_a_hook_replaced_has_its_own_outputs():
    block, (x, _) = block_of(mode="reference"), inputs()
    normed = block.norm(x)
    first = block.linears[0](normed)
    other = block.norm(2 * x + 1)
    mixed = other._replace(call=normed.call)
    single = block_of(mode="reference", grouped=False)
    expected = [single(x)[0], single(2 * x + 1)[1]]
    assert_same_products([first, block.linears[1](mixed)], expected)
    assert not torch.allclose(block.linears[1](normed), expected[1])


@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_checkpointing_of_the_linears_without_their_norm(kind):
    """The linears run again with the NormedInput of the first forward."""
    block, (x, dys) = block_of(mode="reference"), inputs()
    expected, _ = run(block)
    x = x.requires_grad_()
    normed = block.norm(x)
    outputs = CHECKPOINTING[kind](lambda n: [linear(n) for linear in block.linears], normed)
    gradients = torch.autograd.grad(outputs, [x, *block.parameters()], dys)
    assert all(torch.equal(a, b) for a, b in zip([*outputs, *gradients], expected, strict=True))


def test_a_linear_after_one_in_another_mode():
    """Under no_grad or autocast."""
    x, dys = inputs()

    def last_without_gradients(block, normed):
        with torch.no_grad():
            block.linears[2](normed)
        return [linear(normed) for linear in block.linears]

    def first_under_autocast(block, normed):
        first, *others = block.linears
        with torch.autocast(normed.h.device.type, dtype=torch.bfloat16):
            y = first(normed).float()
        return [y, *(linear(normed) for linear in others)]

    for call in (last_without_gradients, first_under_autocast):
        expected, found = (
            results_of(Called(block_of(mode="reference", grouped=g), call), x, *dys) for g in (False, True)
        )
        assert_near(found, expected, 1e-6)


def test_outputs_may_be_written_to():
    def call(block, normed):
        return [linear(normed).mul_(2) for linear in block.linears]

    x, dys = inputs()
    expected, found = (results_of(Called(block_of(mode="reference", grouped=g), call), x, *dys) for g in (False, True))
    assert_near(found, expected, 1e-6)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


def test_outputs_whose_gradients_are_none():
    block, (x, dys) = block_of(mode="reference"), inputs()
    x.requires_grad_()
    torch.autograd.backward([x.sum(), *map(NoGradient.apply, block(x))], [None, *dys])
    assert torch.equal(x.grad, torch.ones_like(x)) and block.norm.weight.grad is None


def test_no_grad_and_outputs_that_are_made_again_because_they_are_not_kept():
    block, (x, _) = block_of(mode="reference"), inputs()
    expected = block_of(mode="reference", grouped=False)(x)
    with torch.no_grad():
        normed = block.norm(x)
        outputs = [linear(normed) for linear in block.linears]
        assert not normed.call._outputs
        again = [linear(normed) for linear in block.linears]
    assert_same_products([*outputs, *again], [*expected, *expected])


class Doubled(nn.Module):
    """A block and an operation on its outputs, as there is one in every layer."""

    def __init__(self):
        super().__init__()
        self.block = block_of(dtype=torch.bfloat16)

    def forward(self, x):
        return [2 * y for y in self.block(x)]


def test_compiled_graphs_hold_three_products_and_no_copies(device):
    """Two blocks with the same code compile once, without a graph break."""
    graphs = []

    def count(graph, _):
        graphs.append(Counter(str(node.target).removesuffix(".default") for node in graph.graph.nodes))
        return make_boxed_func(graph)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            block = Doubled()
            x, dys = inputs(torch.bfloat16)
            compiled = results_of(torch.compile(block, backend=backend, fullgraph=True), x, *dys)
    assert_near(compiled, results_of(block, x, *dys), 1e-2)
    assert [graph["aten.mm"] + graph["mxtrain.guarded_mm"] for graph in graphs] == [1, 2]
    if device == "cuda" or INTERPRETED:  # the casts are kernels
        assert not any(name in ("aten.cat", "aten.clone") for graph in graphs for name in graph)
