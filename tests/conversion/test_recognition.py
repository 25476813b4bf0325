"""What counts as an RMSNorm, as a gate, as a block."""

import pytest
import torch
import torch.nn as nn

from mxtrain import DecomposeKRouter, FusedLayerNorm, FusedRMSNorm, MXNorm
from mxtrain.conversion.recognition import (
    LinearFacts,
    find_gates,
    find_layer_norms,
    find_linears,
    find_norms,
    layer_norm_facts,
    rms_norm_facts,
)


class OwnRMSNorm(nn.Module):
    def __init__(self, dim=64, eps=1e-6, other=0.5):
        super().__init__()
        self.weight, self.eps, self.other = nn.Parameter(torch.full((dim,), 3.0)), eps, other

    def normalize(self, x, eps):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def forward(self, x):
        return self.weight * self.normalize(x, self.eps)


class Shifted(OwnRMSNorm):
    def forward(self, x):
        return (1 + self.weight) * self.normalize(x, self.eps)


class CenteredRMSNorm(OwnRMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class ShiftedRMSNorm(Shifted):
    pass


class WithoutEpsRMSNorm(OwnRMSNorm):
    def forward(self, x):
        return self.weight * self.normalize(x, 0.0)


class NeedsMoreRMSNorm(OwnRMSNorm):
    def forward(self, x, y):
        return super().forward(x) + y


class GatedRMSNorm(OwnRMSNorm):
    """As in Mamba 2 and Bamba: a fused norm would take the gate for a residual."""

    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * gate)


class DroppingRMSNorm(OwnRMSNorm):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class WithoutWeightRMSNorm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class RMSNormWithBias(OwnRMSNorm):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))


class CountingRMSNorm(OwnRMSNorm):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))


@pytest.mark.parametrize("eps", [1e-8, 1e-6, 1e-5, 1e-3])
def test_a_models_own_rms_norm_is_found_with_its_eps(eps):
    own = OwnRMSNorm(eps=eps).eval()
    facts = rms_norm_facts(own)
    assert facts == ((64,), eps, True) and (own.weight == 3).all()
    norm = facts.as_rms_norm(own)
    assert type(norm) is nn.RMSNorm and norm.eps == eps and norm.weight is own.weight and not norm.training
    with torch.device("meta"):
        assert rms_norm_facts(OwnRMSNorm(eps=eps)) == facts
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert rms_norm_facts(own) == facts
    finally:
        torch.set_default_dtype(torch.float32)


class Norm(OwnRMSNorm):
    """Called neither an RMSNorm nor a LayerNorm."""


class DerivedRMSNorm(nn.RMSNorm):
    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


class Doubling(nn.RMSNorm):
    def __call__(self, x):
        return 2 * super().__call__(x)


class Clip(nn.LayerNorm):
    """As in CLIP and Whisper: computed in fp32, with fp32 parameters."""

    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


class BertNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.dropout, self.eps = nn.Parameter(torch.ones(64)), 0.0, 1e-12

    def forward(self, x):
        return nn.functional.rms_norm(x, (64,), self.weight, self.eps)


class Fp32RMSNorm(OwnRMSNorm):
    """Its result is fp32 whatever x is, as some models want it before an fp32 head."""

    def forward(self, x):
        return super().forward(x.float()).float()


class ScaledRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return nn.functional.rms_norm(x, (64,), self.scale, 1e-6)


def test_what_a_norm_is_called_does_not_count():
    assert rms_norm_facts(Norm(eps=1e-5)) == ((64,), 1e-5, True)
    assert rms_norm_facts(DerivedRMSNorm(64, 1e-5)) == ((64,), 1e-5, True)
    assert layer_norm_facts(Clip(64, 1e-5)) == ((64,), 1e-5, True, True)
    assert rms_norm_facts(BertNorm()).eps == 1e-12 and isinstance(rms_norm_facts(Doubling(64, 1e-5)), str)


def test_norms_that_a_swap_would_change_are_named():
    model = nn.ModuleDict({"fp32": Fp32RMSNorm(), "scaled": ScaledRMSNorm(), "more": NeedsMoreRMSNorm()})
    norms, lookalikes = find_norms(dict(model.named_modules()))
    assert not norms and lookalikes == {
        "fp32": "is a Fp32RMSNorm that does not compute what nn.RMSNorm does with an attribute as eps, or "
        "changes the dtype",
        "scaled": "is a ScaledRMSNorm with the parameters scale, which nn.RMSNorm does not have",
        "more": "is a NeedsMoreRMSNorm whose forward takes more than x",
    }


@pytest.mark.parametrize("kind", [nn.RMSNorm, FusedRMSNorm])
def test_pytorchs_norm_and_the_fused_norm_keep_their_arguments(kind):
    assert rms_norm_facts(kind(64)) == ((64,), kind(64).eps, True)
    norm = kind(64, 1e-3, elementwise_affine=False)
    facts = rms_norm_facts(norm)
    assert facts == ((64,), 1e-3, False) and facts.as_rms_norm(norm).weight is None
    assert rms_norm_facts(nn.RMSNorm((2, 32))).normalized_shape == (2, 32)


@pytest.mark.parametrize(
    "module",
    [ShiftedRMSNorm(), CenteredRMSNorm(), WithoutEpsRMSNorm(), NeedsMoreRMSNorm(), GatedRMSNorm(), RMSNormWithBias(),
     CountingRMSNorm(), DroppingRMSNorm().eval(), WithoutWeightRMSNorm(), nn.LayerNorm(64),
     nn.Linear(64, 64), MXNorm(64, mode="reference")],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_modules_that_compute_something_else(module):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert isinstance(rms_norm_facts(module), str)
    assert torch.equal(torch.rand(1), expected), "the random numbers of a training are its own"


def test_the_reasons_of_norms_by_name_only():
    model = nn.ModuleDict({"plain": WithoutWeightRMSNorm(), "drops": DroppingRMSNorm(), "t5": T5LayerNorm()})
    norms, lookalikes = find_norms(dict(model.named_modules()))
    assert list(norms) == ["t5"], "called a LayerNorm, but does not subtract the mean"
    assert lookalikes == {
        "plain": "is a WithoutWeightRMSNorm without a weight to tell its row length: "
        "use nn.RMSNorm(D, elementwise_affine=False)",
        "drops": "is a DroppingRMSNorm that does not compute what nn.RMSNorm does "
        "with an attribute as eps, or changes the dtype",
    }


class OwnLayerNorm(OwnRMSNorm):
    """As in Cohere's models, and with a bias; adding the bias may cancel digits."""

    def __init__(self, dim=64, eps=1e-6, bias=False):
        super().__init__(dim, eps)
        self.bias = nn.Parameter(torch.full((dim,), 2.0)) if bias else None

    def forward(self, x):
        y = super().forward(x - x.mean(-1, keepdim=True))
        return y if self.bias is None else y + self.bias


class T5LayerNorm(OwnRMSNorm):
    pass


class UnbiasedLayerNorm(OwnRMSNorm):
    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + self.eps).sqrt()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("eps", "dim"), [(1e-6, 64), (1e-5, 65536)])
def test_a_models_own_layer_norm_is_found_with_its_eps(eps, dim, bias):
    own = OwnLayerNorm(dim, eps, bias).eval()
    facts = layer_norm_facts(own)
    assert facts == ((dim,), eps, True, bias) and (own.weight == 3).all() and isinstance(rms_norm_facts(own), str)
    norm = facts.as_layer_norm(own)
    assert type(norm) is nn.LayerNorm and norm.eps == eps and not norm.training
    assert norm.weight is own.weight and norm.bias is own.bias


def test_pytorchs_layer_norm_and_the_fused_one_keep_their_arguments():
    for kind in (nn.LayerNorm, FusedLayerNorm):
        assert layer_norm_facts(kind(64, 1e-3)) == ((64,), 1e-3, True, True)
        assert layer_norm_facts(kind(64, bias=False)) == ((64,), 1e-5, True, False)
        norm = kind(64, elementwise_affine=False)
        facts = layer_norm_facts(norm)
        assert facts == ((64,), 1e-5, False, False) and facts.as_layer_norm(norm).weight is None
    others = nn.ModuleDict({"t5": T5LayerNorm(), "unbiased": UnbiasedLayerNorm(), "rms": nn.RMSNorm(8)})
    norms, lookalikes = find_layer_norms(dict(others.named_modules()))
    assert norms == {} and list(lookalikes) == ["t5", "unbiased"]


class OtherDimensionRMSNorm(OwnRMSNorm):
    def forward(self, x):
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


class OtherDimensionLayerNorm(nn.LayerNorm):
    """As in speech models, for [B, C, T]. On a matrix [B, C], its dimension is the last one."""

    def forward(self, x):
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


class OverTokensRMSNorm(OwnRMSNorm):
    def normalize(self, x, eps):
        return x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps)


@pytest.mark.parametrize("dim", [2, 64])
def test_norms_of_another_dimension_than_the_last_are_not_recognised(dim):
    norms = {
        "rms": OwnRMSNorm(dim),
        "other": OtherDimensionRMSNorm(dim),
        "tokens": OverTokensRMSNorm(dim),
        "layer": OwnLayerNorm(dim),
        "other layer": OtherDimensionLayerNorm(dim),
    }
    assert [*find_norms(norms)[0]] == ["rms"] and [*find_layer_norms(norms)[0]] == ["layer"]


def test_equal_norms_are_compared_once(monkeypatch):
    calls = []
    monkeypatch.setattr("mxtrain.conversion.recognition.eps_of", lambda module, name: calls.append(module) or 1e-6)
    norms = [OwnRMSNorm() for _ in range(3)] + [OwnRMSNorm(32), OwnRMSNorm(eps=1e-5), Norm()]
    norms[2].forward = lambda x: x  # of its own
    listed = [OwnRMSNorm(), OwnRMSNorm()]
    for norm in listed:
        norm.history = []  # nothing that Python could compare
    assert len(find_norms({str(i): norm for i, norm in enumerate([*norms, *listed])})[0]) == len(norms) + 2
    assert calls == [norms[0], *norms[2:], *listed]


class Router(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.gate, self.other = gate, nn.Linear(4, 4)


def test_the_modules_of_a_model():
    linear = nn.Linear(8, 4)
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict(
        {
            "blocks": nn.ModuleList([nn.ModuleList([nn.Linear(8, 8)]), nn.RMSNorm(8)]),
            "router": Router(linear),
            "own": Router(DecomposeKRouter(8, 4)),
            "strange": ShiftedRMSNorm(),
            "a": nn.Sequential(shared),
            "b": nn.Linear(8, 8),
        }
    )
    model["b"].weight = shared.weight
    modules = dict(model.named_modules())
    assert find_norms(modules) == (
        {"blocks.1": ((8,), None, True)},
        {
            "strange": "is a ShiftedRMSNorm that does not compute what nn.RMSNorm does "
            "with an attribute as eps, or changes the dtype"
        },
    )
    linears = find_linears(modules)
    assert linears["router.gate"] == LinearFacts(
        8, 4, "Linear", is_plain=True, is_gate=True, shares_weight=False, is_in_gate=True
    )
    assert linears["own.gate"] == LinearFacts(
        8, 4, "DecomposeKRouter", is_plain=False, is_gate=True, shares_weight=False
    )
    assert [fqn for fqn, facts in linears.items() if facts.is_gate] == ["router.gate", "own.gate"]
    assert [fqn for fqn, facts in linears.items() if facts.shares_weight] == ["a.0", "b"]
    assert find_norms(dict(nn.RMSNorm(8).named_modules())) == ({}, {}), "nothing can replace the model itself"
    assert find_gates(model) == {"router.gate": model["router"].gate, "own.gate": model["own"].gate}
    assert not find_gates(model["blocks"]) and list(find_gates(model["router"])) == ["gate"]
