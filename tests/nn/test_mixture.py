"""The gate behind an MXNorm: no token chooses other experts than in fp64."""

import pytest
import torch
import torch.nn as nn

from mxtrain.nn.mixture import MXNormRouter
from mxtrain.nn.mxnorm import MXNorm
from tests.support.layer_checks import assert_near, draw, fill

T, D, E, TOP = 256, 512, 64, 6

pytestmark = pytest.mark.usefixtures("device")


def norm_and_gate(dtype=torch.bfloat16, bias=False, mode="reference"):
    norm = fill(MXNorm(D, mode=mode, estimator="exact", dtype=dtype))
    norm.weight.data.add_(1)
    return norm, MXNormRouter.from_linear(fill(nn.Linear(D, E, bias, dtype=dtype)))


def in_fp64(norm, gate, x):
    """RMSNorm and gate on the same numbers, with rho as the norm has estimated it."""
    rho = norm(x).rho.double()[:, None]
    weight = gate.weight.double() * norm.weight.double()
    return (x.double() @ weight.t()) * rho + (0 if gate.bias is None else gate.bias.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_logits_choose_the_experts_of_fp64(dtype, bias):
    norm, gate = norm_and_gate(dtype, bias)
    x = draw(T, D, seed=0, dtype=dtype)
    logits, want = gate(norm(x)), in_fp64(norm, gate, x)
    assert logits.dtype == torch.float32
    assert_near([logits], [want], 1e-6)
    assert torch.equal(logits.topk(TOP).indices.sort().values, want.topk(TOP).indices.sort().values)


def test_gradients_are_those_of_the_folded_product():
    norm, gate = norm_and_gate(torch.float32, bias=True)
    x, dlogits = draw(T, D, seed=0).requires_grad_(), draw(T, E, seed=1)
    got = torch.autograd.grad(gate(norm(x)), [x, norm.weight, *gate.parameters()], dlogits)
    plain = nn.RMSNorm(D, eps=norm.eps, dtype=torch.float64)
    plain.weight = nn.Parameter(norm.weight.detach().double())
    gate64 = nn.Linear(D, E, dtype=torch.float64)
    gate64.load_state_dict({name: value.double() for name, value in gate.state_dict().items()})
    x64 = x.detach().double().requires_grad_()
    parameters = [x64, plain.weight, *gate64.parameters()]
    want = torch.autograd.grad(gate64(plain(x64)), parameters, dlogits.double())
    assert_near(got, want, 1e-5)


def test_a_tensor_is_taken_as_by_a_decompose_k_router():
    _, gate = norm_and_gate()
    x = draw(4, D, seed=0, dtype=torch.bfloat16)
    assert_near([gate(x)], [x.double() @ gate.weight.double().t()], 1e-5)


def test_compiles_without_a_graph_break(compile_backend):
    norm, gate = norm_and_gate(mode="emulated")
    compiled = torch.compile(lambda x: gate(norm(x)), backend=compile_backend, fullgraph=True)
    x = draw(8, D, seed=0, dtype=torch.bfloat16)
    results = []
    for run in (compiled, lambda x: gate(norm(x))):
        leaf = x.detach().requires_grad_()
        y = run(leaf)
        results.append([y, *torch.autograd.grad(y, [leaf, norm.weight, gate.weight], draw(8, E, seed=1))])
    assert_near(*results, 1e-2)  # compiled, the norm's backward rounds to bf16 at other places
