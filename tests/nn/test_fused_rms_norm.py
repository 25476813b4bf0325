"""rms_norm and FusedRMSNorm against autograd of PyTorch's own RMSNorm: plain, compiled, recomputed and sharded."""

from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from layer_checks import draw, in_two_processes
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mxtrain.nn.fused_rms_norm as module
from mxtrain import ConfigError, FusedRMSNorm, rms_norm
from mxtrain.ops.hardware import runs_kernels

D, EPS = 96, 1e-5

pytestmark = pytest.mark.usefixtures("device")


def inputs(dtype=torch.float32, weight_dtype=None, leading=(2, 20), affine=True, residual=False):
    """x, weight and residual; the last two None unless wanted."""
    x = draw(*leading, D, seed=0, dtype=dtype).requires_grad_()
    weight = draw(D, seed=1, dtype=weight_dtype or dtype).requires_grad_() if affine else None
    return x, weight, draw(*leading, D, seed=2, dtype=dtype).requires_grad_() if residual else None


def gradients(function, tensors, dys):
    """Outputs of ``function``, and gradients of those tensors that are not None."""
    outputs = function(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [tensor for tensor in tensors if tensor is not None]
    return [*outputs, *torch.autograd.grad(outputs, wanted, dys[: len(outputs)])]


def in_pytorch(x, weight, residual):
    """The same in fp64, differentiated by autograd."""
    total = x if residual is None else x + residual
    y = F.rms_norm(total, total.shape[-1:], weight, EPS)
    return y if residual is None else (y, total)


def doubles(tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def run(x, weight, residual=None):
    return rms_norm(x, weight, EPS, residual)


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("affine", [False, True], ids=["bare", "weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_and_gradients_match_autograd_in_fp64(dtype, affine, residual):
    tensors = inputs(dtype, affine=affine, residual=residual)
    dys = [draw(2, 20, D, seed=s, dtype=dtype) for s in (3, 4)]
    wide = doubles(tensors)
    if residual:
        # What is normalized is the rounded sum, and Triton's interpreter rounds it towards zero.
        total = run(*tensors)[1].detach().double()
        torch.testing.assert_close(total, wide[0] + wide[2], rtol=torch.finfo(dtype).eps, atol=0)
        wide[0], wide[2] = total.requires_grad_(), torch.zeros_like(total).requires_grad_()
    expected = gradients(in_pytorch, wide, [dy.double() for dy in dys])
    # One rounding of each result; an fp32 sum differs by more than its rounding where its terms cancel.
    for got, want in zip(gradients(run, tensors, dys), expected, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=2e-6 * want.abs().max().item())


def test_gradcheck():
    """The formulas, in fp64, which plain PyTorch computes on every device."""
    x, weight, residual = inputs(torch.float64, leading=(3,), residual=True)
    x, weight, residual = (t.detach()[..., :5].contiguous().requires_grad_() for t in (x, weight, residual))
    assert torch.autograd.gradcheck(run, (x, weight))
    assert torch.autograd.gradcheck(run, (x, weight, residual))


@pytest.mark.parametrize("leading", [(), (7,), (2, 3, 5), (0,), (2, 0)])
def test_leading_dimensions(leading):
    tensors, dy = inputs(leading=leading), draw(*leading, D, seed=3)
    for got, want in zip(gradients(run, tensors, [dy]), gradients(in_pytorch, tensors, [dy]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_strided_input_and_gradient():
    x, weight = draw(D, 2, 9, seed=0).permute(1, 2, 0).requires_grad_(), draw(D, seed=1).requires_grad_()
    dy = draw(D, 2, 9, seed=3).permute(1, 2, 0)
    expected = gradients(in_pytorch, [x, weight, None], [dy])
    for got, want in zip(gradients(run, [x, weight], [dy]), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_are_those_of_f_rms_norm(x_dtype, weight_dtype, autocast):
    """Also under autocast, which casts to fp32 before F.rms_norm on a GPU, not on a CPU."""
    tensors = inputs(x_dtype, weight_dtype)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=autocast):
        results = [function(*tensors) for function in (run, in_pytorch)]
    grads = [torch.autograd.grad(y.float().square().sum(), tensors[:2]) for y in results]
    assert [t.dtype for t in (results[0], *grads[0])] == [t.dtype for t in (results[1], *grads[1])]
    torch.testing.assert_close(results[0], results[1], rtol=torch.finfo(results[1].dtype).eps * 2, atol=1e-6)


def count_calls(monkeypatch, name):
    calls = []
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: calls.append(args) or original(*args))
    return calls


def test_only_needed_gradients_are_computed(monkeypatch):
    x, weight, residual = inputs(residual=True)
    calls = count_calls(monkeypatch, "_backward")
    grads = torch.autograd.grad(run(x, weight.detach()).sum(), [x])
    assert grads[0].norm() > 0 and calls[-1][-1] is False, "the weight needs none"
    _, total = run(x, weight, residual)
    dx, dweight, dresidual = torch.autograd.grad(
        total.sum(), [x, weight, residual], allow_unused=True, materialize_grads=True
    )
    assert len(calls) == 1, "y is not used: nothing to do but to pass the gradient of the sum on"
    assert (dx == 1).all() and (dresidual == 1).all() and not dweight.any()
    y, _ = run(x, weight, residual)
    torch.autograd.grad(y.sum(), [x, weight, residual])
    assert calls[-1][4] is None, "the sum is not used: its zeros are not added"


def test_saved_for_backward_is_x_and_one_number_a_row():
    x, weight, _ = inputs(torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(x, weight)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    assert sorted(sizes.values()) == sorted([2 * D, 4 * 40, 2 * D * 40])
    assert x.untyped_storage().data_ptr() in sizes


def test_second_derivatives_are_refused():
    x, weight, _ = inputs()
    (dx,) = torch.autograd.grad(run(x, weight).square().sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("x", "weight", "residual", "message"),
    [
        ((4, D), (D + 1,), None, r"weight \(97,\) does not go with x \(4, 96\)"),
        ((4, D), (1, D), None, r"weight \(1, 96\) does not go with x"),
        ((), None, None, r"x \(\): expected a last dimension of at least 1"),
        ((4, 0), None, None, r"x \(4, 0\): expected a last dimension of at least 1"),
        ((4, D), (D,), (D,), r"residual \(96,\) does not go with x \(4, 96\)"),
    ],
)
def test_shapes_that_do_not_go_together(x, weight, residual, message):
    x, weight, residual = (None if shape is None else torch.zeros(shape) for shape in (x, weight, residual))
    with pytest.raises(ValueError, match=message):
        run(x, weight, residual)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", ["x", "weight", "residual"])
def test_dtypes_that_are_refused(name, dtype):
    given = {"x": torch.zeros(4, D), "weight": torch.zeros(D), "residual": torch.zeros(4, D)}
    given[name] = given[name].to(dtype)
    if name == "x":
        given = {"x": given["x"], "weight": None}
    with pytest.raises(ValueError, match=f"{name} of {dtype}: expected bfloat16, float16, float32 or float64"):
        run(**given)


@pytest.mark.parametrize("eps", [None, "1e-5", -1.0, float("nan"), float("inf")])
def test_an_eps_that_is_no_number(eps):
    with pytest.raises(ValueError, match="eps = .*: expected a number, not negative"):
        rms_norm(torch.zeros(4, D), eps=eps)


def test_tensors_on_different_devices():
    x = torch.zeros(4, D)
    with pytest.raises(ValueError, match=f"weight is on meta: expected {x.device}, where x is"):
        run(x, torch.zeros(D, device="meta"))


def test_rows_of_another_length_than_the_modules():
    with pytest.raises(ValueError, match=r"x \(2, 32\): expected a last dimension of 64"):
        FusedRMSNorm(64, elementwise_affine=False)(torch.zeros(2, 32))


def norm_of(**kwargs):
    norm = FusedRMSNorm(D, EPS, **kwargs)
    norm.weight.data.copy_(draw(D, seed=1))
    return norm


class Block(nn.Module):
    """A norm between what a transformer puts before and behind it."""

    def __init__(self, **kwargs):
        super().__init__()
        self.norm, self.linear = norm_of(**kwargs), nn.Linear(D, D, bias=False)
        self.linear.weight.data.copy_(draw(D, D, seed=5))

    def forward(self, x, residual=None):
        if residual is None:
            return self.linear(self.norm(x.sin()))
        y, total = self.norm(x.sin(), residual)
        return self.linear(y) + total


def block_gradients(block, x, dy, residual=None):
    y = block(x, residual)
    wanted = [x, *block.parameters(), *([] if residual is None else [residual])]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("when_compiled", ["kernel", "formula"])
def test_compiles_without_a_graph_break(when_compiled, with_residual, autocast, compile_backend):
    block = Block(when_compiled=when_compiled)
    x, _, residual = inputs(residual=with_residual)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=autocast):
        dy = draw(2, 20, D, seed=3, dtype=block(x, residual).dtype)
        eager = block_gradients(block, x, dy, residual)
        compiled = torch.compile(block, backend=compile_backend, fullgraph=True)
        results = block_gradients(compiled, x, dy, residual)
    tolerance = 1e-2 if autocast or compile_backend == "inductor" else 1e-5
    for got, want in zip(results, eager, strict=True):
        assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("when_compiled", module.WHEN_COMPILED)
def test_what_runs_when_compiled(when_compiled, device):
    """The kernels' ops are in the graphs if asked for, and otherwise are not."""
    if not runs_kernels("emulated", device):
        pytest.skip("no kernels on this device: the formula is all there is")
    ops = []

    def note(graph, _):
        ops.extend(str(node.target) for node in graph.graph.nodes if "mxtrain" in str(node.target))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    block = torch.compile(Block(when_compiled=when_compiled), backend=aot_autograd(fw_compiler=note), fullgraph=True)
    block_gradients(block, inputs()[0], draw(2, 20, D, seed=3))
    wanted = module.AUTO_WHEN_COMPILED if when_compiled == "auto" else when_compiled
    kernels = ["mxtrain.rms_norm.default", "mxtrain.rms_norm_backward.default"]
    assert ops == (kernels if wanted == "kernel" else [])


def save_matmuls(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    "recompute",
    [
        partial(checkpoint, use_reentrant=True),
        partial(checkpoint, use_reentrant=False),
        partial(
            checkpoint,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, save_matmuls),
        ),
    ],
    ids=["full, reentrant", "full", "selective"],
)
def test_activation_checkpointing_changes_nothing(recompute):
    block, x, dy = Block(), inputs()[0], draw(2, 20, D, seed=3)
    plain = block_gradients(block, x, dy)
    block.zero_grad()
    y = recompute(block, x)
    y.backward(dy)
    for got, want in zip([y, x.grad, *(p.grad for p in block.parameters())], plain, strict=True):
        assert torch.equal(got, want)


def test_the_same_bits_every_time():
    tensors, dy = inputs(torch.bfloat16, leading=(3, 50)), draw(3, 50, D, seed=3, dtype=torch.bfloat16)
    first = gradients(run, tensors, [dy])
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(run, tensors, [dy]), strict=True))


def test_the_module_takes_the_place_of_pytorchs():
    norm = nn.RMSNorm(D, eps=1e-3, dtype=torch.bfloat16).eval()
    fused = FusedRMSNorm.from_rms_norm(norm, when_compiled="kernel")
    assert fused.weight is norm.weight and fused.eps == 1e-3 and not fused.training
    assert fused.state_dict().keys() == norm.state_dict().keys() and isinstance(fused, nn.RMSNorm)
    assert repr(fused) == f"FusedRMSNorm(({D},), eps=0.001, elementwise_affine=True, when_compiled=kernel)"
    fused.weight.data.zero_()
    fused.reset_parameters()
    assert (norm.weight == 1).all()
    assert FusedRMSNorm.from_rms_norm(nn.RMSNorm(D, elementwise_affine=False)).weight is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_eps_it_is_pytorchs_default(dtype):
    """Rows so small that eps rules them."""
    norm = nn.RMSNorm(D, dtype=dtype)
    x = 1e-4 * draw(3, D, seed=0, dtype=dtype)
    got, want = FusedRMSNorm.from_rms_norm(norm)(x), norm(x)
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FusedRMSNorm(D, when_compiled="kernels"), "when_compiled = 'kernels' is not one of: 'auto', 'kernel'"),
        (lambda: FusedRMSNorm.from_rms_norm(nn.RMSNorm((4, 32))), r"normalized_shape = \(4, 32\) has more than one"),
    ],
)
def test_wrong_settings(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_on_the_meta_device():
    with torch.device("meta"):
        y, total = FusedRMSNorm(D)(torch.empty(2, 3, D), torch.empty(2, 3, D))
    assert y.is_meta and y.shape == total.shape == (2, 3, D)


# Two processes


def assert_whole(shards, expected):
    """Tensors of two ranks against those of one process."""
    for got, want in zip(shards, expected, strict=True):
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def check_shards(mesh, placement, tokens, with_residual):
    """A norm of a DTensor against the same norm of the whole tensor."""
    x, weight, residual = inputs(leading=(2, tokens), residual=with_residual)
    dys = [draw(2, tokens, D, seed=s) for s in (3, 4)]
    expected = gradients(run, (x, weight, residual), dys)
    placements = [placement, Replicate(), placement]
    tensors = [
        None if t is None else distribute_tensor(t.detach(), mesh, [p]).requires_grad_()
        for t, p in zip((x, weight, residual), placements)
    ]
    results = gradients(run, tensors, [distribute_tensor(dy, mesh, [placement]) for dy in dys])
    y, dweight = results[0], results[3 if with_residual else 2]
    if placement.is_shard() and placement.dim != 2:
        assert y.placements == (placement,), "rows stay where they are"
        assert dweight.placements[0].is_partial(), "every rank has a part, summed when it is needed"
    assert_whole(results, expected)


def check_sequence_parallel(mesh, compiled):
    """The norm of TorchTitan's plan: its input is a shard of the sequence, its weight is on every rank."""
    x, dy = inputs(leading=(2, 8))[0], draw(2, 8, D, seed=3)
    expected = block_gradients(NormAlone(), x, dy)
    block = NormAlone()
    parallelize_module(block, mesh, {"norm": SequenceParallel(use_local_output=True)})
    if compiled:
        torch._dynamo.reset()
        block = torch.compile(block, backend="aot_eager", fullgraph=True)
    rank = mesh.get_local_rank()
    part = x.detach().chunk(2, 1)[rank].clone().requires_grad_()
    y, dx, dweight = block_gradients(block, part, dy.chunk(2, 1)[rank])
    assert_whole([y, dx, dweight], [expected[0].chunk(2, 1)[rank], expected[1].chunk(2, 1)[rank], expected[2]])


class NormAlone(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = norm_of(when_compiled="kernel")

    def forward(self, x, residual=None):
        return self.norm(x)


def check_fsdp(mesh):
    """Each rank has half of the batch and half of every parameter."""
    x, dy = inputs(leading=(2, 8))[0], draw(2, 8, D, seed=3)
    y, _, *expected = block_gradients(Block(), x, dy)
    block = Block()
    fully_shard(block.norm, mesh=mesh)
    fully_shard(block, mesh=mesh)
    for part in (block, block.norm):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    rank = mesh.get_local_rank()
    mine = block(x.detach().chunk(2)[rank])
    mine.backward(dy.chunk(2)[rank])
    assert_whole([mine, *(p.grad for p in block.parameters())], [y.chunk(2)[rank], *expected])


def check_mixed_is_refused(mesh):
    x, weight, _ = inputs()
    with pytest.raises(TypeError, match="Tensor, DTensor: all or none as DTensor"):
        run(x, distribute_tensor(weight.detach(), mesh, [Replicate()]))


def two_ranks(mesh):
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        for with_residual in (False, True):
            check_shards(mesh, placement, 6, with_residual)
    check_shards(mesh, Shard(1), 5, True)  # three rows of a batch here, two there
    check_shards(mesh, Shard(1), 1, False)  # and here one, there none
    for compiled in (False, True):
        check_sequence_parallel(mesh, compiled)
    check_fsdp(mesh)
    check_mixed_is_refused(mesh)


def test_two_ranks_match_one(device):
    in_two_processes(two_ranks, device)
