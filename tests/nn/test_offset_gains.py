"""MXNorms with a gain of 1 + weight: the bits of an MXNorm whose weight is that sum in fp32, and its gradient."""

import pytest
import torch
import torch.nn as nn

from mxtrain import MXNorm
from mxtrain.nn.group import LinearGroup
from mxtrain.nn.mixture import MXNormRouter
from mxtrain.nn.ready_weights import ReadyWeights
from tests.support.dispatch_checks import Routed
from tests.support.layer_checks import NormBlock, draw, fill

D, N, T = 64, 32, 48

pytestmark = pytest.mark.usefixtures("device")


class Linears(NormBlock):
    def __init__(self, mode, dtype=torch.float32, grouped=True):
        super().__init__(D, N, "mxfp8", "mxfp8", mode=mode, dtype=dtype)
        for linear in self.linears:
            linear.fed_by = (self.norm,)
        if grouped:
            self.norm.group = LinearGroup(self.linears)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = MXNorm(D, mode="reference")
        self.gate = MXNormRouter.from_linear(fill(nn.Linear(D, N, False)))

    def forward(self, x):
        return [self.gate(self.norm(x))]


class Mixture(Routed):
    def forward(self, x):
        index = torch.arange(T).repeat(2)
        return [super().forward(x, index, torch.tensor([40, 0, 3, 2 * T - 43]))]


def results(module, weight, offset, cached=False, backend=None):
    """Outputs, and gradients of x, of the norm's weight and of all others, of two microbatches."""
    module.norm.weight, module.norm.add_unit_offset = nn.Parameter(weight), offset
    run = module if backend is None else torch.compile(module, backend=backend, fullgraph=True)
    ready, dtype, found = ReadyWeights([module]), [*module.parameters()][-1].dtype, []
    for seed in range(2):
        if cached:
            ready.refresh()
            held = [part.ready for part in module.modules() if getattr(part, "ready", None) is not None]
            assert held or module.norm.group.ready is not None
        x = draw(T, D, seed=seed, dtype=dtype).requires_grad_()
        outputs = run(x)
        dys = [draw(*y.shape, seed=7 + i, dtype=y.dtype) for i, y in enumerate(outputs)]
        parameters = [module.norm.weight, *(p for p in module.parameters() if p is not module.norm.weight)]
        dx, *gradients = torch.autograd.grad(outputs, [x, *parameters], dys)
        gradients[0] = gradients[0].to(weight.dtype)
        found += [y.detach() for y in outputs] + [dx, *gradients]
    return found


CASES = {
    "single": (lambda: Linears("reference", grouped=False), {}),
    "single, cast ahead": (lambda: Linears("reference", grouped=False), dict(cached=True)),
    "kernels, cast ahead": (lambda: Linears("emulated", torch.bfloat16), dict(cached=True)),
    "experts": (Mixture, {}),
    "experts, cast ahead": (Mixture, dict(cached=True)),
    "gate": (Gate, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_fold_the_sum_and_the_weight_gets_its_gradient(case):
    make, settings = CASES[case]
    weight = draw(D, seed=5, scale=0.2, dtype=next(make().parameters()).dtype)
    assert (weight.float() + 1).ne((weight.float() + 1).bfloat16()).any()
    got, want = results(make(), weight, True, **settings), results(make(), weight.float() + 1, False)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b.to(a.dtype))


def test_compiled_layers_compute_the_same(compile_backend):
    weight = draw(D, seed=5, scale=0.2)
    eager = results(Linears("emulated"), weight, True)
    for cached in (False, True):
        compiled = results(Linears("emulated"), weight, True, cached, compile_backend)
        for a, b in zip(compiled, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_rounding_the_gradients_are_those_of_autograd(dtype):
    block = NormBlock(D, N, "unquantized", "unquantized", dtype=dtype, estimator="exact")
    block.norm.add_unit_offset = True
    x = draw(T, D, seed=0, dtype=dtype).requires_grad_()

    def plain(x):
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + block.norm.eps) * (1 + block.norm.weight)
        return [normed @ linear.weight.t() for linear in block.linears]

    dys = [draw(T, N, seed=seed, dtype=dtype) for seed in (1, 2)]
    got, want = (torch.autograd.grad(run(x), [x, *block.parameters()], dys) for run in (block, plain))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
