"""layer_norm and FusedLayerNorm against PyTorch's. ``test_fused_rms_norm.py`` tests the code of ``row_norms.py``."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import mxtrain.nn.fused_layer_norm as module
from mxtrain import ConfigError, FusedLayerNorm, layer_norm
from mxtrain.ops.hardware import runs_kernels
from tests.support.fused_norm_checks import (
    assert_contiguous_results,
    assert_rounded_once,
    doubles,
    gradients,
    noting_backend,
)
from tests.support.layer_checks import assert_near, draw

D, EPS = 40, 1e-5
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

pytestmark = pytest.mark.usefixtures("device")


def inputs(dtype=torch.float32, weight=True, bias=True, residual=False, vector_dtype=None):
    """x [2, 3, D], weight, bias and residual; None for a tensor that is not wanted."""

    def vector(seed, wanted):
        return draw(D, seed=seed, dtype=vector_dtype or dtype).requires_grad_() if wanted else None

    x, other = (draw(2, 3, D, seed=seed, dtype=dtype).requires_grad_() for seed in (0, 3))
    return x, vector(1, weight), vector(2, bias), other if residual else None


def in_pytorch(x, weight, bias, residual):
    total = x if residual is None else x + residual
    y = F.layer_norm(total, total.shape[-1:], weight, bias, EPS)
    return y if residual is None else (y, total)


def run(x, weight, bias, residual=None):
    return layer_norm(x, weight, bias, EPS, residual)


@pytest.mark.parametrize(
    ("dtype", "weight", "bias", "residual"),
    [
        (torch.float32, True, True, True),
        (torch.float16, True, False, False),
        (torch.float16, False, True, False),
        (torch.float32, False, False, True),
    ],
    ids=str,
)
def test_outputs_and_gradients_match_autograd_in_fp64(dtype, weight, bias, residual):
    tensors = inputs(dtype, weight, bias, residual)
    dys = [draw(2, 3, D, seed=s, dtype=dtype) for s in (4, 5)]
    expected = gradients(in_pytorch, doubles(tensors), [dy.double() for dy in dys])
    assert_rounded_once(gradients(run, tensors, dys), expected, dtype)


def test_gradcheck():
    """The formulas, in fp64, which plain PyTorch computes on every device."""
    tensors = [t.detach()[..., :5].contiguous().requires_grad_() for t in inputs(torch.float64, residual=True)]
    assert torch.autograd.gradcheck(run, tensors)


@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_are_those_of_f_layer_norm(autocast):
    """Also under autocast, which casts to fp32 before F.layer_norm on a GPU, not on a CPU.

    Without autocast, F.layer_norm refuses a bf16 x with fp32 weights on a GPU.
    """
    device = torch.get_default_device().type
    mixed = autocast or device == "cpu"
    tensors = inputs(torch.bfloat16, vector_dtype=torch.float32 if mixed else torch.bfloat16)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        results = [function(*tensors) for function in (run, in_pytorch)]
    grads = [torch.autograd.grad(y.float().square().sum(), tensors[:3]) for y in results]
    assert [t.dtype for t in (results[0], *grads[0])] == [t.dtype for t in (results[1], *grads[1])]
    torch.testing.assert_close(*results, rtol=torch.finfo(results[1].dtype).eps * 2, atol=1e-2)


def test_the_sum_with_a_residual_keeps_its_dtype_under_autocast(monkeypatch):
    """As in compiled models. Autocast on a GPU casts x and not the residual stream."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: True)
    with FakeTensorMode():
        x = torch.ones(2, D, dtype=torch.bfloat16, device="cuda")
        y, total = layer_norm(x, torch.ones(D, device="cuda"), residual=x)
    assert (y.dtype, total.dtype) == (torch.float32, torch.bfloat16)


def test_only_needed_gradients_are_computed(monkeypatch):
    calls, original = [], module.ops.layer_norm_backward
    monkeypatch.setattr(module.ops, "layer_norm_backward", lambda *args: calls.append(args) or original(*args))
    x, weight, bias, residual = inputs(residual=True)
    torch.autograd.grad(run(x, weight.detach(), bias).sum(), [x])
    assert calls[-1][-2:] == (None, torch.float32), "the weight needs no gradient"
    torch.autograd.grad(run(x, weight, bias.detach(), residual)[0].sum(), [x, weight, residual])
    assert calls[-1][-2:] == (torch.float32, None) and calls[-1][5] is None, "no bias gradient, unused sum"
    dx, dresidual = torch.autograd.grad(run(x, weight, bias, residual)[1].sum(), [x, residual])
    assert len(calls) == 2 and (dx == 1).all() and (dresidual == 1).all(), "y is not used"


def test_wrong_arguments():
    x, zeros = torch.zeros(4, D), torch.zeros
    for arguments, message in (
        ((x, None, zeros(D + 1)), r"bias \(41,\) does not match x \(4, 40\): expected its last dimension"),
        ((x, zeros(D), zeros(D).long()), "bias of torch.int64: expected bfloat16, float16, float32 or float64"),
        ((x, None, None, -1.0), r"eps = -1.0: expected a number, not negative"),
        ((x, None, None, EPS, zeros(D)), r"residual \(40,\) does not match x"),
    ):
        with pytest.raises(ValueError, match=message):
            layer_norm(*arguments)
    with pytest.raises(ConfigError, match="when_compiled = 'kernels' is not one of: 'auto', 'kernel', 'formula'"):
        FusedLayerNorm(D, when_compiled="kernels")
    with pytest.raises(ConfigError, match=r"normalized_shape = \(4, 10\) has more than one dimension"):
        FusedLayerNorm.from_layer_norm(nn.LayerNorm((4, 10)))
    with pytest.raises(ValueError, match=r"eps = -1: expected a number, not negative"):
        FusedLayerNorm(D, eps=-1)


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
    with torch.device("meta"):
        y, total = FusedLayerNorm(D)(torch.empty(2, 3, D), torch.empty(2, 3, D))
    assert y.is_meta and y.shape == total.shape == (2, 3, D)


@pytest.mark.parametrize("when_compiled", ["kernel", pytest.param("auto", marks=pytest.mark.sweep)])
def test_compiles_without_a_graph_break(when_compiled, compile_backend):
    """The graphs hold the kernels' ops if asked for, and no others; residual included."""
    norm, ops = FusedLayerNorm(D, EPS, when_compiled=when_compiled), []
    x, weight, bias, residual = inputs(residual=True)
    norm.weight.data.copy_(weight.detach()), norm.bias.data.copy_(bias.detach())

    def block_gradients(function):
        y, total = function(x, residual)
        return [
            y,
            total,
            *torch.autograd.grad((y, total), [x, residual, *norm.parameters()], [x.detach(), total.detach()]),
        ]

    backend = noting_backend(ops) if compile_backend != "inductor" else compile_backend
    compiled = torch.compile(norm, backend=backend, fullgraph=True)
    assert_near(block_gradients(compiled), block_gradients(norm), 1e-5)
    if compile_backend != "inductor" and runs_kernels("emulated", "cpu"):
        kernels = ["mxtrain.layer_norm.default", "mxtrain.layer_norm_backward.default"]
        assert ops == (kernels if when_compiled == "kernel" else [])


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


def test_results_are_contiguous_whatever_the_strides_of_x():
    assert_contiguous_results(FusedLayerNorm(D), nn.LayerNorm(D), D)


def test_the_largest_rows():
    """The documented limit, 1.8e19 / sqrt(D) = 2.8e18; F.layer_norm returns 0 or NaN for the second row."""
    sign = torch.arange(D).remainder(2).mul(2.0).sub(1)
    x = torch.stack([2.5e18 * sign, 1e20 * sign]).requires_grad_()
    weight, bias = (draw(D, seed=seed).requires_grad_() for seed in (1, 2))
    dy = draw(2, D, seed=3)
    y = layer_norm(x, weight, bias, EPS)
    y.backward(dy)
    torch.testing.assert_close(y[0], sign * weight + bias, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, dy[0] * sign, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bias.grad, dy.sum(0))
    assert torch.equal(y[1], bias) and x.grad[0].any() and not x.grad[1].any()
