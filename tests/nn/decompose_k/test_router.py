"""decompose_k_mm and DecomposeKRouter against autograd of PyTorch's own: plain, compiled and recomputed."""

import copy
from functools import partial

import pytest
import torch
import torch.nn as nn

from mxtrain import DecomposeKRouter, decompose_k_mm
from mxtrain.nn.decompose_k import reference
from mxtrain.nn.decompose_k import router as module
from tests.support.layer_checks import draw

TOKENS, HIDDEN, EXPERTS = 22, 96, 8
EPILOGUES = [None, "relu", "sigmoid", "softmax"]

pytestmark = pytest.mark.usefixtures("device")


def inputs(dtype=torch.float32, tokens=TOKENS, bias_dtype=None, transposed=True):
    """a, b (a transposed weight, or contiguous) and bias or None."""
    a = draw(tokens, HIDDEN, seed=0, dtype=dtype).requires_grad_()
    b = draw(EXPERTS, HIDDEN, seed=1, dtype=dtype, scale=HIDDEN**-0.5).t()
    b = (b if transposed else b.contiguous()).detach().requires_grad_()
    bias = None if bias_dtype is None else draw(EXPERTS, seed=2, dtype=bias_dtype).requires_grad_()
    return a, b, bias


def gradients(function, tensors, dc):
    """The output of ``function``, and gradients of those tensors that are not None."""
    c = function(*tensors)
    return [c.detach(), *torch.autograd.grad(c, [t for t in tensors if t is not None], dc)]


def doubles(tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize(
    ("epilogue", "bias_dtype", "transposed"),
    [(None, None, True), ("relu", torch.float32, False), ("sigmoid", None, False), ("softmax", torch.float32, True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outputs_and_gradients_match_autograd_in_fp64(dtype, epilogue, bias_dtype, transposed):
    tensors = inputs(dtype, bias_dtype=bias_dtype, transposed=transposed)
    dc = draw(TOKENS, EXPERTS, seed=3)
    run = partial(decompose_k_mm, epilogue=epilogue, out_dtype=torch.float32)
    results = gradients(run, tensors, dc)
    expected = gradients(partial(reference.decompose_k_mm, epilogue=epilogue), doubles(tensors), dc.double())
    assert [t.dtype for t in results] == [torch.float32, dtype, dtype] + [torch.float32] * (bias_dtype is not None)
    # Of the gradients: dC is rounded to the dtype of the operands, and so is each result.
    tolerances = [1e-6, torch.finfo(dtype).eps, torch.finfo(dtype).eps, 1e-6]
    for got, want, tolerance in zip(results, expected, tolerances):
        assert (got - want).norm() <= max(tolerance, 1e-6) * want.norm()


def test_relu_stops_infinite_gradients_as_in_pytorch():
    a, b = torch.eye(2).requires_grad_(), torch.tensor([[1.0], [-1.0]])
    decompose_k_mm(a, b, epilogue="relu").backward(torch.tensor([[2.0], [torch.inf]]))
    assert a.grad.tolist() == [[2.0, -2.0], [0.0, 0.0]]


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_gradcheck(epilogue):
    """The formulas, in fp64, which plain PyTorch computes on every device."""
    a, b, bias = doubles(inputs(bias_dtype=torch.float32, tokens=3))
    a, b = (t.detach().requires_grad_() for t in (a[:, :7], b[:7]))
    assert torch.autograd.gradcheck(partial(decompose_k_mm, epilogue=epilogue), (a, b, bias))


def test_gradients_are_no_worse_than_those_of_a_bf16_gate():
    """A bf16 gate casts its logits to fp32, and the gradient back to bf16."""
    a, b, _ = inputs(torch.bfloat16, tokens=257)
    dc = draw(257, EXPERTS, seed=3)
    expected = gradients(lambda a, b: a @ b, doubles((a, b)), dc.double())
    ours = gradients(partial(decompose_k_mm, out_dtype=torch.float32), (a, b), dc)
    eager = gradients(lambda a, b: (a @ b).float(), (a, b), dc)
    error = lambda results: [((got - want).norm() / want.norm()).item() for got, want in zip(results, expected)]  # noqa: E731
    logits, *errors = error(ours)
    logits_of_eager, *errors_of_eager = error(eager)
    assert logits < 1e-6 < 1e-3 < logits_of_eager
    for mine, theirs in zip(errors, errors_of_eager, strict=True):
        assert mine <= 1.01 * theirs


def test_only_needed_gradients_are_computed(monkeypatch):
    calls = []
    op = module.ops.decompose_k_mm
    monkeypatch.setattr(module.ops, "decompose_k_mm", lambda *args: calls.append(args) or op(*args))
    a, b, bias = inputs(bias_dtype=torch.float32)
    with torch.no_grad():
        assert not decompose_k_mm(a, b, bias).requires_grad
    assert len(calls) == 1
    for wanted, products in (("a", 1), ("b", 1), ("bias", 0)):
        tensors = {name: t.detach() for name, t in (("a", a), ("b", b), ("bias", bias))}
        tensors[wanted].requires_grad_()
        c = decompose_k_mm(**tensors)
        calls.clear()
        (gradient,) = torch.autograd.grad(c.sum(), tensors[wanted])
        assert gradient.any() and len(calls) == products


@pytest.mark.parametrize("a_dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_operands_as_for_mm(a_dtype):
    a, b, _ = inputs()
    a = a.detach().to(a_dtype).requires_grad_()
    with torch.autocast(a.device.type, torch.bfloat16):
        assert decompose_k_mm(a, b).dtype == torch.mm(a, b).dtype == torch.bfloat16
        c = decompose_k_mm(a, b, out_dtype=torch.float32)
    want = decompose_k_mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
    assert c.dtype == torch.float32 and torch.equal(c, want)
    assert [t.dtype for t in torch.autograd.grad(c.sum(), [a, b])] == [a_dtype, torch.float32]


def gate_of(bias=False, dtype=torch.float32):
    gate = nn.Linear(HIDDEN, EXPERTS, bias=bias)
    with torch.no_grad():
        gate.weight.copy_(draw(EXPERTS, HIDDEN, seed=1, scale=HIDDEN**-0.5))
        if bias:
            gate.bias.copy_(draw(EXPERTS, seed=2))
    return gate.to(dtype)


def gate_gradients(gate, x, dc):
    logits = gate(x)
    return [logits, *torch.autograd.grad(logits, [x, *gate.parameters()], dc)]


@pytest.mark.parametrize("bias", [False, True])
def test_the_module_replaces_a_linear(bias):
    linear = gate_of(bias).eval()
    gate = DecomposeKRouter.from_linear(linear)
    assert gate.weight is linear.weight and gate.bias is linear.bias and not gate.training
    assert gate.state_dict().keys() == linear.state_dict().keys() and isinstance(gate, nn.Linear)
    assert repr(gate) == f"DecomposeKRouter(in_features={HIDDEN}, out_features={EXPERTS}, bias={bias})"
    x = draw(TOKENS, HIDDEN, seed=0).requires_grad_()
    dc = draw(TOKENS, EXPERTS, seed=3)
    for got, want in zip(gate_gradients(gate, x, dc), gate_gradients(linear, x, dc), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("leading", [(), (2, 3, 5), (2, 0)])
def test_leading_dimensions(leading):
    linear = gate_of()
    gate = DecomposeKRouter.from_linear(linear)
    x, dc = draw(*leading, HIDDEN, seed=0).requires_grad_(), draw(*leading, EXPERTS, seed=3)
    for got, want in zip(gate_gradients(gate, x, dc), gate_gradients(linear, x, dc), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_are_always_fp32(autocast):
    gate = DecomposeKRouter.from_linear(gate_of(bias=True, dtype=torch.float32 if autocast else torch.bfloat16))
    x = draw(TOKENS, HIDDEN, seed=0, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        logits = gate(x)
    assert logits.dtype == torch.float32
    a, b = x.bfloat16().double(), gate.weight.bfloat16().double().t()
    torch.testing.assert_close(logits.double(), a @ b + gate.bias.double(), rtol=1e-5, atol=1e-5)
    logits.sum().backward()
    assert all(p.grad.dtype == p.dtype for p in gate.parameters())


class Router(nn.Module):
    """A gate between the other operations of a router."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.gate = DecomposeKRouter.from_linear(gate_of(dtype=dtype))

    def forward(self, x):
        scores = torch.sigmoid(self.gate(x.sin()).to(torch.float32))
        return torch.topk(scores, k=2, dim=-1, sorted=True).values


@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_without_a_graph_break(autocast, compile_backend):
    router, x, dc = Router(), draw(TOKENS, HIDDEN, seed=0).requires_grad_(), draw(TOKENS, 2, seed=3)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        eager = gate_gradients(router, x, dc)
        results = gate_gradients(torch.compile(router, backend=compile_backend, fullgraph=True), x, dc)
    for got, want in zip(results, eager, strict=True):
        assert want.norm() > 0
        assert (got - want).norm() <= (1e-2 if autocast else 1e-5) * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_token_counts_do_not_recompile(dtype, compile_backend):
    """Counts from different ranges of the plan share one forward graph and one backward graph."""
    router = Router(dtype)
    compiled = torch.compile(copy.deepcopy(router), backend=compile_backend, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (TOKENS, 130, 257):
            x, dc = draw(tokens, HIDDEN, seed=0, dtype=dtype).requires_grad_(), draw(tokens, 2, seed=3)
            for got, want in zip(gate_gradients(compiled, x, dc), gate_gradients(router, x, dc), strict=True):
                assert (got - want).norm() <= (1e-2 if dtype == torch.bfloat16 else 1e-4) * want.norm()
