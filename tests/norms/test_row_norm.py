"""rms_norm, layer_norm and their modules against autograd of PyTorch's own: plain, compiled and recomputed."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from mxtrain import ConfigError, FusedLayerNorm, FusedRMSNorm, layer_norm, rms_norm
from mxtrain.formats.hardware import runs_kernels
from mxtrain.norms import row_norm as module
from tests.support.layer_checks import CHECKPOINTING, assert_near, draw

D, EPS, LEADING = 96, 1e-5, (2, 3)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NORMS = pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])

pytestmark = pytest.mark.usefixtures("device")


def inputs(centered, dtype=torch.float32, vector_dtype=None, leading=LEADING, weight=True, bias=True, residual=False):
    """x, weight, bias and residual; None for a tensor that is not wanted, and for the bias of RMSNorm."""

    def vector(seed, wanted):
        return draw(D, seed=seed, dtype=vector_dtype or dtype).requires_grad_() if wanted else None

    x, other = (draw(*leading, D, seed=seed, dtype=dtype).requires_grad_() for seed in (0, 2))
    return x, vector(1, weight), vector(6, bias and centered), other if residual else None


def in_pytorch(x, weight, bias, residual, centered):
    """The same by PyTorch's functions, differentiated by autograd."""
    total = x if residual is None else x + residual
    shape = total.shape[-1:]
    y = F.layer_norm(total, shape, weight, bias, EPS) if centered else F.rms_norm(total, shape, weight, EPS)
    return y if residual is None else (y, total)


def run(x, weight, bias, residual, centered):
    if centered:
        return layer_norm(x, weight, bias, EPS, residual)
    return rms_norm(x, weight, EPS, residual)


def gradients(function, tensors, centered, dys):
    """Outputs of ``function``, and gradients of those tensors that are not None."""
    outputs = function(*tensors, centered)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [tensor for tensor in tensors if tensor is not None]
    return [*outputs, *torch.autograd.grad(outputs, wanted, dys[: len(outputs)])]


@NORMS
@pytest.mark.parametrize(
    ("dtype", "weight", "bias", "residual"),
    [
        (torch.float32, True, True, True),
        (torch.bfloat16, True, True, True),
        (torch.bfloat16, True, False, False),
        (torch.float16, False, True, True),
        (torch.float32, False, False, False),
    ],
    ids=str,
)
def test_outputs_and_gradients_match_autograd_in_fp64(dtype, weight, bias, residual, centered):
    tensors = inputs(centered, dtype, weight=weight, bias=bias, residual=residual)
    dys = [draw(*LEADING, D, seed=s, dtype=dtype) for s in (3, 4)]
    wide = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    if residual:
        # What is normalized is the rounded sum, and Triton's interpreter rounds it toward zero.
        total = run(*tensors, centered)[1].detach().double()
        torch.testing.assert_close(total, wide[0] + wide[3], rtol=torch.finfo(dtype).eps, atol=0)
        wide[0], wide[3] = total.requires_grad_(), torch.zeros_like(total).requires_grad_()
    expected = gradients(in_pytorch, wide, centered, [dy.double() for dy in dys])
    for got, want in zip(gradients(run, tensors, centered, dys), expected, strict=True):
        assert got.dtype == dtype
        # One rounding; an fp32 sum differs by more than its rounding where its terms cancel.
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=2e-6 * want.abs().max().item())


@NORMS
def test_gradcheck(centered):
    """The formulas, in fp64, which plain PyTorch computes on every device."""
    tensors = inputs(centered, torch.float64, leading=(3,), residual=True)
    tensors = [None if t is None else t.detach()[..., :5].contiguous().requires_grad_() for t in tensors]
    x, weight, bias, residual = tensors
    assert torch.autograd.gradcheck(run, (*tensors, centered))
    assert torch.autograd.gradcheck(run, (x, weight, bias, None, centered))


@pytest.mark.parametrize("leading", [(), (2, 1, 3), (2, 0)])
def test_leading_dimensions(leading):
    tensors, dy = inputs(True, leading=leading), draw(*leading, D, seed=3)
    expected = gradients(in_pytorch, tensors, True, [dy])
    for got, want in zip(gradients(run, tensors, True, [dy]), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@NORMS
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("x_dtype", "vector_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_dtypes_are_those_of_pytorch(x_dtype, vector_dtype, autocast, centered):
    """Also under autocast, which casts to fp32 before the norm on a GPU, not on a CPU."""
    device = torch.get_default_device().type
    if centered and (vector_dtype == torch.bfloat16 or (device == "cuda" and not autocast)):
        vector_dtype = x_dtype  # F.layer_norm refuses this mix
    tensors = inputs(centered, x_dtype, vector_dtype, leading=(1,))
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        results = [function(*tensors, centered) for function in (run, in_pytorch)]
    wanted = [t for t in tensors if t is not None]
    grads = [torch.autograd.grad(y.float().square().sum(), wanted) for y in results]
    assert [t.dtype for t in (results[0], *grads[0])] == [t.dtype for t in (results[1], *grads[1])]
    torch.testing.assert_close(*results, rtol=torch.finfo(results[1].dtype).eps * 2, atol=1e-2 if centered else 1e-6)


def test_the_sum_with_a_residual_keeps_its_dtype_under_autocast(monkeypatch):
    """As in compiled models. Autocast on a GPU casts x and not the residual stream."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: True)
    with FakeTensorMode():
        x = torch.ones(2, D, dtype=torch.bfloat16, device="cuda")
        y, total = layer_norm(x, torch.ones(D, device="cuda"), residual=x)
    assert (y.dtype, total.dtype) == (torch.float32, torch.bfloat16)


def test_only_needed_gradients_are_computed(monkeypatch):
    x, weight, bias, residual = inputs(True, residual=True)
    home, calls = module.kernels if module._has_kernels(x) else module.reference, []
    original = home.row_norm_backward
    monkeypatch.setattr(home, "row_norm_backward", lambda *args: calls.append(args) or original(*args))
    torch.autograd.grad(run(x, weight.detach(), bias, None, True).sum(), [x])
    assert calls[-1][-2:] == (None, torch.float32), "the weight needs no gradient"
    torch.autograd.grad(run(x, weight, bias.detach(), residual, True)[0].sum(), [x, weight, residual])
    assert calls[-1][-2:] == (torch.float32, None), "nor does the bias"
    assert calls[-1][5] is None, "the sum is not used: its zeros are not added"
    dx, dweight, dresidual = torch.autograd.grad(
        run(x, weight, bias, residual, True)[1].sum(),
        [x, weight, residual],
        allow_unused=True,
        materialize_grads=True,
    )
    assert len(calls) == 2, "y is not used: nothing to do but to pass the gradient of the sum on"
    assert (dx == 1).all() and (dresidual == 1).all() and not dweight.any()


@NORMS
def test_the_backward_saves_x_and_a_number_or_two_per_row(centered):
    x, weight, bias, _ = inputs(centered, torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(x, weight, bias, None, centered)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    assert sorted(sizes.values()) == sorted([2 * D, *[4 * 6] * (2 if centered else 1), 2 * D * 6])
    assert x.untyped_storage().data_ptr() in sizes


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(weight=torch.zeros(D + 1)), r"weight \(97,\) must have the last dimension of x \(4, 96\)"),
        (dict(bias=torch.zeros(D + 1)), r"bias \(97,\) must have the last dimension of x \(4, 96\)"),
        (dict(x=torch.zeros(())), r"x has shape \(\); its last dimension must be at least 1"),
        (dict(residual=torch.zeros(D)), r"residual \(96,\) must have the shape of x \(4, 96\)"),
        (dict(weight=torch.zeros(D, device="meta")), "weight is on meta; move it to .*, where x is"),
        (dict(x=torch.zeros(4, D).long()), "x is torch.int64; it must be bfloat16, float16, float32 or float64"),
        (dict(weight=torch.zeros(D).cfloat()), "weight is torch.complex64; it must be bfloat16, float16,"),
        (dict(weight=torch.zeros(D).double()), "weight is float64 and x is torch.float32"),
        *((dict(eps=eps), "eps = .* is not a number of at least 0") for eps in (None, "1e-5", -1.0, float("nan"))),
    ],
    ids=str,
)
def test_wrong_arguments(changed, message):
    device = torch.get_default_device()
    changed = {
        name: value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value
        for name, value in changed.items()
    }
    with pytest.raises(ValueError, match=message):
        layer_norm(**{"x": torch.zeros(4, D), **changed})
    if "bias" not in changed:
        with pytest.raises(ValueError, match=message):
            rms_norm(**{"x": torch.zeros(4, D), **changed})


class Block(nn.Module):
    """A norm between other operations."""

    def __init__(self, centered, **kwargs):
        super().__init__()
        self.norm, self.linear = (FusedLayerNorm if centered else FusedRMSNorm)(D, EPS, **kwargs), nn.Linear(D, D)
        for seed, parameter in enumerate(self.parameters(), 1):
            parameter.data.copy_(draw(*parameter.shape, seed=seed))

    def forward(self, x, residual=None):
        if residual is None:
            return self.linear(self.norm(x.sin()))
        y, total = self.norm(x.sin(), residual)
        return self.linear(y) + total


def block_gradients(block, x, dy, residual=None):
    y = block(x, residual)
    wanted = [x, *block.parameters(), *([] if residual is None else [residual])]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


def noting_backend(ops: list[str]):
    """A backend of ``torch.compile`` that adds the names of mxtrain's operations in its graphs to ``ops``."""

    def note(graph, _):
        ops.extend(str(node.target) for node in graph.graph.nodes if "mxtrain" in str(node.target))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=note)


@pytest.mark.parametrize(
    ("when_compiled", "with_residual", "autocast", "centered"),
    [
        ("kernel", True, False, False),
        ("kernel", False, True, False),
        ("kernel", True, False, True),
        ("auto", True, True, False),
        ("formula", False, False, False),
        pytest.param("auto", True, False, True, marks=pytest.mark.sweep),
    ],
)
def test_compiles_without_a_graph_break(when_compiled, with_residual, autocast, centered, compile_backend):
    """The graphs hold the kernels' ops if asked for, and no others."""
    block = Block(centered, when_compiled=when_compiled)
    x, *_, residual = inputs(centered, residual=with_residual)
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
        wanted = module.AUTO_WHEN_COMPILED if when_compiled == "auto" else when_compiled
        kernels = ["mxtrain.row_norm.default", "mxtrain.row_norm_backward.default"]
        assert ops == (kernels if wanted == "kernel" else [])


@pytest.mark.parametrize("of_x", DTYPES, ids=str)
@pytest.mark.parametrize("of_weight", DTYPES[:3], ids=str)
def test_compiled_mixes_of_dtypes_have_the_eager_results_on_a_cpu(of_x, of_weight):
    """F.layer_norm refuses most of them there. The graph holds it where it takes them."""
    torch.set_default_device(None)
    x = draw(3, D, seed=0, dtype=of_x)
    for of_bias in {None, of_weight, torch.float32}:
        norm = FusedLayerNorm(D, EPS, bias=of_bias is not None)
        norm.weight.data = draw(D, seed=1, dtype=of_weight)
        if of_bias is not None:
            norm.bias.data = draw(D, seed=2, dtype=of_bias)
        found = []

        def note(graph, _, found=found):
            found.extend(node.target for node in graph.graph.nodes)
            return graph

        torch._dynamo.reset()
        y = torch.compile(norm, backend=note, fullgraph=True)(x)
        assert y.dtype == of_x
        assert_near([y], [norm(x)], 2 * torch.finfo(of_x).eps)
        try:
            F.layer_norm(x, (D,), norm.weight, norm.bias)
        except RuntimeError:
            assert F.layer_norm not in found
        else:
            assert F.layer_norm in found


@pytest.mark.parametrize("recompute", CHECKPOINTING.values(), ids=CHECKPOINTING)
def test_activation_checkpointing_changes_nothing(recompute):
    block, x, dy = Block(False), inputs(False)[0], draw(*LEADING, D, seed=3)
    plain = block_gradients(block, x, dy)
    block.zero_grad()
    y = recompute(block, x)
    y.backward(dy)
    for got, want in zip([y, x.grad, *(p.grad for p in block.parameters())], plain, strict=True):
        assert torch.equal(got, want)


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


def test_the_module_replaces_nn_layer_norm():
    norm = nn.LayerNorm(D, eps=1e-3, dtype=torch.float64).eval()
    fused = FusedLayerNorm.from_layer_norm(norm, when_compiled="kernel")
    assert fused.weight is norm.weight and fused.bias is norm.bias and fused.eps == 1e-3 and not fused.training
    assert fused.state_dict().keys() == norm.state_dict().keys() and isinstance(fused, nn.LayerNorm)
    settings = f"({D},), eps=0.001, elementwise_affine=True, bias=True, when_compiled=kernel"
    # Releases of PyTorch differ in whether they show the bias.
    assert repr(fused) in (f"FusedLayerNorm({settings})", f"FusedLayerNorm({settings.replace(', bias=True', '')})")
    x = draw(3, D, seed=0, dtype=torch.float64)
    torch.testing.assert_close(fused(x), norm(x))
    for options in (dict(bias=False), dict(elementwise_affine=False)):
        plain = nn.LayerNorm(D, **options)
        fused = FusedLayerNorm.from_layer_norm(plain)
        assert fused.weight is plain.weight and fused.bias is None


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
        (lambda: FusedRMSNorm.from_rms_norm(nn.RMSNorm((4, 32))), r"normalized_shape = \(4, 32\) has more than one"),
        (lambda: FusedLayerNorm(D, when_compiled="kernels"), "when_compiled = 'kernels' is not one of: 'auto',"),
        (lambda: FusedLayerNorm.from_layer_norm(nn.LayerNorm((4, 10))), r"normalized_shape = \(4, 10\) has more than"),
    ],
)
def test_wrong_settings(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(("fused", "plain"), [(FusedRMSNorm, nn.RMSNorm), (FusedLayerNorm, nn.LayerNorm)])
def test_results_are_contiguous_whatever_the_strides_of_x(fused, plain):
    """For transposed rows, as a patch embedding gives them: models view the results. No kernel takes fp64."""
    for dtype in (torch.float32, torch.float64):
        x, residual = (torch.randn(2, D, 6, dtype=dtype).transpose(1, 2) for _ in range(2))
        norms = fused(D, dtype=dtype), plain(D, dtype=dtype)
        y, total = norms[0](x, residual)
        assert norms[0](x).stride() == norms[1](x).stride() == y.stride() == total.stride() == (6 * D, D, 1)


@NORMS
def test_the_largest_rows(centered):
    """The documented limit, 1.8e19 / sqrt(D) = 1.8e18. For the second row PyTorch returns 0, in LayerNorm 0 or NaN."""
    sign = torch.arange(D).remainder(2).mul(2.0).sub(1)
    x = torch.stack([1.5e18 * sign, 1e20 * sign]).requires_grad_()
    _, weight, bias, _ = inputs(centered)
    dy = draw(2, D, seed=3)
    y = run(x, weight, bias, None, centered)
    y.backward(dy)
    shift = bias if centered else torch.zeros(D)
    torch.testing.assert_close(y[0], sign * weight + shift, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, dy[0] * sign, rtol=1e-5, atol=1e-6)
    assert torch.equal(y[1], shift) and x.grad[0].any() and not x.grad[1].any()
    if centered:
        torch.testing.assert_close(bias.grad, dy.sum(0))
