"""rms_norm and FusedRMSNorm against autograd of PyTorch's own RMSNorm: plain, compiled and recomputed."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import mxtrain.nn.fused_rms_norm as module
from mxtrain import ConfigError, FusedRMSNorm, rms_norm
from mxtrain.nn.row_norms import AUTO_WHEN_COMPILED
from mxtrain.ops.hardware import runs_kernels
from tests.support.fused_norm_checks import (
    assert_contiguous_results,
    assert_rounded_once,
    doubles,
    gradients,
    noting_backend,
)
from tests.support.layer_checks import CHECKPOINTING, assert_near, draw

D, EPS, LEADING = 96, 1e-5, (2, 3)

pytestmark = pytest.mark.usefixtures("device")


def inputs(dtype=torch.float32, weight_dtype=None, leading=LEADING, affine=True, residual=False):
    """x, weight and residual, or None for those not wanted."""
    x = draw(*leading, D, seed=0, dtype=dtype).requires_grad_()
    weight = draw(D, seed=1, dtype=weight_dtype or dtype).requires_grad_() if affine else None
    return x, weight, draw(*leading, D, seed=2, dtype=dtype).requires_grad_() if residual else None


def in_pytorch(x, weight, residual):
    """The same in fp64, differentiated by autograd."""
    total = x if residual is None else x + residual
    y = F.rms_norm(total, total.shape[-1:], weight, EPS)
    return y if residual is None else (y, total)


def run(x, weight, residual=None):
    return rms_norm(x, weight, EPS, residual)


@pytest.mark.parametrize(
    ("dtype", "affine", "residual"),
    [
        (torch.float32, True, True),
        (torch.bfloat16, True, True),
        (torch.bfloat16, True, False),
        (torch.float16, False, True),
        (torch.float32, False, False),
    ],
)
def test_outputs_and_gradients_match_autograd_in_fp64(dtype, affine, residual):
    tensors = inputs(dtype, affine=affine, residual=residual)
    dys = [draw(*LEADING, D, seed=s, dtype=dtype) for s in (3, 4)]
    wide = doubles(tensors)
    if residual:
        # What is normalized is the rounded sum, and Triton's interpreter rounds it towards zero.
        total = run(*tensors)[1].detach().double()
        torch.testing.assert_close(total, wide[0] + wide[2], rtol=torch.finfo(dtype).eps, atol=0)
        wide[0], wide[2] = total.requires_grad_(), torch.zeros_like(total).requires_grad_()
    expected = gradients(in_pytorch, wide, [dy.double() for dy in dys])
    assert_rounded_once(gradients(run, tensors, dys), expected, dtype)


def test_gradcheck():
    """The formulas, in fp64, which plain PyTorch computes on every device."""
    x, weight, residual = inputs(torch.float64, leading=(3,), residual=True)
    x, weight, residual = (t.detach()[..., :5].contiguous().requires_grad_() for t in (x, weight, residual))
    assert torch.autograd.gradcheck(run, (x, weight))
    assert torch.autograd.gradcheck(run, (x, weight, residual))


@pytest.mark.parametrize("leading", [(), (2, 1, 3), (2, 0)])
def test_leading_dimensions(leading):
    tensors, dy = inputs(leading=leading), draw(*leading, D, seed=3)
    for got, want in zip(gradients(run, tensors, [dy]), gradients(in_pytorch, tensors, [dy]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_strided_input_and_gradient():
    x, weight = draw(D, 2, 3, seed=0).permute(1, 2, 0).requires_grad_(), draw(D, seed=1).requires_grad_()
    dy = draw(D, 2, 3, seed=3).permute(1, 2, 0)
    expected = gradients(in_pytorch, [x, weight, None], [dy])
    for got, want in zip(gradients(run, [x, weight], [dy]), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_dtypes_are_those_of_f_rms_norm(x_dtype, weight_dtype, autocast):
    """Also under autocast, which casts to fp32 before F.rms_norm on a GPU, not on a CPU."""
    tensors = inputs(x_dtype, weight_dtype, leading=(1,))
    with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=autocast):
        results = [function(*tensors) for function in (run, in_pytorch)]
    grads = [torch.autograd.grad(y.float().square().sum(), tensors[:2]) for y in results]
    assert [t.dtype for t in (results[0], *grads[0])] == [t.dtype for t in (results[1], *grads[1])]
    torch.testing.assert_close(results[0], results[1], rtol=torch.finfo(results[1].dtype).eps * 2, atol=1e-6)


def count_calls(monkeypatch, name):
    calls = []
    original = getattr(module.ops, name)
    monkeypatch.setattr(module.ops, name, lambda *args: calls.append(args) or original(*args))
    return calls


def test_only_needed_gradients_are_computed(monkeypatch):
    x, weight, residual = inputs(residual=True)
    calls = count_calls(monkeypatch, "rms_norm_backward")
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


def test_the_backward_saves_x_and_one_number_per_row():
    x, weight, _ = inputs(torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(x, weight)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    assert sorted(sizes.values()) == sorted([2 * D, 4 * 6, 2 * D * 6])
    assert x.untyped_storage().data_ptr() in sizes


@pytest.mark.parametrize(
    ("x", "weight", "residual", "message"),
    [
        ((4, D), (D + 1,), None, r"weight \(97,\) does not match x \(4, 96\)"),
        ((4, D), (1, D), None, r"weight \(1, 96\) does not match x"),
        ((), None, None, r"x \(\): expected a last dimension of at least 1"),
        ((4, 0), None, None, r"x \(4, 0\): expected a last dimension of at least 1"),
        ((4, D), (D,), (D,), r"residual \(96,\) does not match x \(4, 96\)"),
    ],
)
def test_mismatched_shapes(x, weight, residual, message):
    x, weight, residual = (None if shape is None else torch.zeros(shape) for shape in (x, weight, residual))
    with pytest.raises(ValueError, match=message):
        run(x, weight, residual)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", ["x", "weight", "residual"])
def test_unsupported_dtypes(name, dtype):
    given = {"x": torch.zeros(4, D), "weight": torch.zeros(D), "residual": torch.zeros(4, D)}
    given[name] = given[name].to(dtype)
    if name == "x":
        given = {"x": given["x"], "weight": None}
    with pytest.raises(ValueError, match=f"{name} of {dtype}: expected bfloat16, float16, float32 or float64"):
        run(**given)


@pytest.mark.parametrize("eps", [None, "1e-5", -1.0, float("nan"), float("inf")])
def test_bad_eps(eps):
    with pytest.raises(ValueError, match="eps = .*: expected a number, not negative"):
        rms_norm(torch.zeros(4, D), eps=eps)


def test_tensors_on_different_devices():
    x = torch.zeros(4, D)
    with pytest.raises(ValueError, match=f"weight is on meta: expected {x.device}, where x is"):
        run(x, torch.zeros(D, device="meta"))


def test_wrong_row_length():
    with pytest.raises(ValueError, match=r"x \(2, 32\): expected a last dimension of 64"):
        FusedRMSNorm(64, elementwise_affine=False)(torch.zeros(2, 32))


def norm_of(**kwargs):
    norm = FusedRMSNorm(D, EPS, **kwargs)
    norm.weight.data.copy_(draw(D, seed=1))
    return norm


class Block(nn.Module):
    """A norm between other operations."""

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


@pytest.mark.parametrize(
    ("when_compiled", "with_residual", "autocast"),
    [("kernel", True, False), ("kernel", False, True), ("auto", True, True), ("formula", False, False)],
)
def test_compiles_without_a_graph_break(when_compiled, with_residual, autocast, compile_backend):
    """The graphs hold the kernels' ops if asked for, and no others."""
    block = Block(when_compiled=when_compiled)
    x, _, residual = inputs(residual=with_residual)
    ops = []
    on_cpu = compile_backend != "inductor"
    with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=autocast):
        dy = draw(*LEADING, D, seed=3, dtype=block(x, residual).dtype)
        eager = block_gradients(block, x, dy, residual)
        backend = noting_backend(ops) if on_cpu else compile_backend
        compiled = torch.compile(block, backend=backend, fullgraph=True)
        results = block_gradients(compiled, x, dy, residual)
    assert_near(results, eager, 1e-2 if autocast or not on_cpu else 1e-5)
    if on_cpu and runs_kernels("emulated", "cpu"):
        wanted = AUTO_WHEN_COMPILED if when_compiled == "auto" else when_compiled
        kernels = ["mxtrain.rms_norm.default", "mxtrain.rms_norm_backward.default"]
        assert ops == (kernels if wanted == "kernel" else [])


@pytest.mark.parametrize("recompute", CHECKPOINTING.values(), ids=CHECKPOINTING)
def test_activation_checkpointing_changes_nothing(recompute):
    block, x, dy = Block(), inputs()[0], draw(*LEADING, D, seed=3)
    plain = block_gradients(block, x, dy)
    block.zero_grad()
    y = recompute(block, x)
    y.backward(dy)
    for got, want in zip([y, x.grad, *(p.grad for p in block.parameters())], plain, strict=True):
        assert torch.equal(got, want)


def test_the_same_bits_every_time():
    tensors, dy = inputs(torch.bfloat16, leading=(3, 2)), draw(3, 2, D, seed=3, dtype=torch.bfloat16)
    first = gradients(run, tensors, [dy])
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(run, tensors, [dy]), strict=True))


def test_the_module_replaces_nn_rmsnorm():
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
    """Rows so small that eps dominates."""
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


def test_results_are_contiguous_whatever_the_strides_of_x():
    assert_contiguous_results(FusedRMSNorm(D), nn.RMSNorm(D), D)


def test_the_largest_rows():
    """The documented limit, 1.8e19 / sqrt(D) = 2.8e18; F.rms_norm returns 0 for the second row, too."""
    sign = torch.arange(40).remainder(2).mul(2.0).sub(1)
    x = torch.stack([2.5e18 * sign, 1e20 * sign]).requires_grad_()
    weight, dy = draw(40, seed=1).requires_grad_(), draw(2, 40, seed=3)
    y = rms_norm(x, weight)
    y.backward(dy)
    torch.testing.assert_close(y, F.rms_norm(x, (40,), weight), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, dy[0] * sign, rtol=1e-5, atol=1e-6)
    assert y[0].all() and not y[1].any() and x.grad[0].any() and not x.grad[1].any()
