"""Which modules are norms: by type, or by results and gradients in small, ordinary and large rows."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import mxtrain
from mxtrain import FusedLayerNorm, FusedRMSNorm, MXNorm
from mxtrain.conversion.norms import NormFacts, find_norms, norm_facts

RMS, LAYER = nn.RMSNorm, nn.LayerNorm
OTHER_RESULTS = "does not compute the results and gradients of nn.RMSNorm"


def facts(module):
    """Kind, shape, eps, gain and bias of the norm that a module is; None for another module."""
    norm = norm_facts(module)
    if not isinstance(norm, NormFacts):
        return None
    return norm.kind, norm.normalized_shape, norm.eps, norm.elementwise_affine, norm.bias


def find(**modules):
    """The norms among modules by name, and the others that are called so -> what they are."""
    norms, lookalikes = find_norms(modules)
    return {name: norm.kind for name, norm in norms.items()}, lookalikes[RMS], lookalikes[LAYER]


class OwnRMSNorm(nn.Module):
    def __init__(self, dim=64, eps=1e-6, other=0.5):
        super().__init__()
        self.weight, self.eps, self.other = nn.Parameter(torch.full((dim,), 3.0)), eps, other

    def rstd(self, x):
        return torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self.weight * (x * self.rstd(x))


class CenteredRMSNorm(OwnRMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class ShiftedRMSNorm(OwnRMSNorm):
    def forward(self, x):
        return (1 + self.weight) * (x * self.rstd(x))


class WithoutEpsRMSNorm(OwnRMSNorm):
    def rstd(self, x):
        return torch.rsqrt(x.square().mean(-1, keepdim=True))


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


class T5LayerNorm(OwnRMSNorm):
    pass


class OwnLayerNorm(OwnRMSNorm):
    """As in Cohere's models, and with a bias; adding the bias may cancel digits."""

    def __init__(self, dim=64, eps=1e-6, bias=False):
        super().__init__(dim, eps)
        self.bias = nn.Parameter(torch.full((dim,), 2.0)) if bias else None

    def forward(self, x):
        y = super().forward(x - x.mean(-1, keepdim=True))
        return y if self.bias is None else y + self.bias


class UnbiasedLayerNorm(OwnRMSNorm):
    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + self.eps).sqrt()


class OtherDimensionRMSNorm(OwnRMSNorm):
    def forward(self, x):
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


class OtherDimensionLayerNorm(nn.LayerNorm):
    """As in speech models, for [B, C, T]. On a matrix [B, C], its dimension is the last one."""

    def forward(self, x):
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


class OverTokensRMSNorm(OwnRMSNorm):
    def rstd(self, x):
        return torch.rsqrt(x.square().mean(1, keepdim=True) + self.eps)


@pytest.mark.parametrize("eps", [1e-8, 1e-6, 1e-5, 1e-3])
def test_a_models_own_rms_norm_is_found_with_its_eps(eps):
    own = OwnRMSNorm(eps=eps).eval()
    found = norm_facts(own)
    assert found == NormFacts(RMS, (64,), eps, recognised="OwnRMSNorm by results and gradients")
    norm = found.as_norm(own)
    assert type(norm) is RMS and norm.eps == eps and norm.weight is own.weight and not norm.training
    assert (own.weight == 3).all()
    with torch.device("meta"):
        assert norm_facts(OwnRMSNorm(eps=eps)) == found
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert norm_facts(own) == found
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_a_norm_is_called_does_not_count():
    assert facts(Norm(eps=1e-5)) == facts(DerivedRMSNorm(64, 1e-5)) == (RMS, (64,), 1e-5, True, False)
    assert facts(Clip(64, 1e-5)) == (LAYER, (64,), 1e-5, True, True)
    assert facts(BertNorm()) == (RMS, (64,), 1e-12, True, False) and facts(Doubling(64, 1e-5)) is None


@pytest.mark.parametrize("kind", [RMS, FusedRMSNorm])
def test_pytorchs_norm_and_the_fused_norm_keep_their_arguments(kind):
    assert facts(kind(64)) == (RMS, (64,), kind(64).eps, True, False)
    norm = kind(64, 1e-3, elementwise_affine=False)
    assert facts(norm) == (RMS, (64,), 1e-3, False, False) and norm_facts(norm).as_norm(norm).weight is None
    assert norm_facts(RMS((2, 32))).normalized_shape == (2, 32)


@pytest.mark.parametrize("kind", [LAYER, FusedLayerNorm])
def test_pytorchs_layer_norm_and_the_fused_one_keep_their_arguments(kind):
    assert facts(kind(64, 1e-3)) == (LAYER, (64,), 1e-3, True, True)
    assert facts(kind(64, bias=False)) == (LAYER, (64,), 1e-5, True, False)
    norm = kind(64, elementwise_affine=False)
    assert facts(norm) == (LAYER, (64,), 1e-5, False, False) and norm_facts(norm).as_norm(norm).weight is None


@pytest.mark.parametrize(
    "module",
    [ShiftedRMSNorm(), CenteredRMSNorm(), WithoutEpsRMSNorm(), NeedsMoreRMSNorm(), GatedRMSNorm(), RMSNormWithBias(),
     CountingRMSNorm(), DroppingRMSNorm().eval(), WithoutWeightRMSNorm(), nn.Linear(64, 64),
     MXNorm(64, mode="reference")],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_modules_that_compute_something_else(module):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert (facts(module) or (LAYER,))[0] is LAYER, "a centered norm is a LayerNorm"
    assert torch.equal(torch.rand(1), expected), "the random numbers of a training are its own"


def test_norms_that_stay_are_named():
    others = dict(fp32=Fp32RMSNorm(), scaled=ScaledRMSNorm(), more=NeedsMoreRMSNorm(), drops=DroppingRMSNorm())
    norms, rms, layer = find(plain=WithoutWeightRMSNorm(), t5=T5LayerNorm(), **others)
    assert norms == {"t5": RMS}, "called a LayerNorm, but does not subtract the mean"
    facts = {
        "plain": "is a WithoutWeightRMSNorm without a weight to tell its row length: ",
        "fp32": f"is a Fp32RMSNorm that {OTHER_RESULTS}",
        "scaled": "is a ScaledRMSNorm with the parameters scale, which nn.RMSNorm does not have",
        "more": "is a NeedsMoreRMSNorm whose forward takes more than x",
        "drops": f"is a DroppingRMSNorm that {OTHER_RESULTS}",
    }
    assert not layer and rms.keys() == facts.keys() and all(rms[name].startswith(facts[name]) for name in rms)
    assert find(unbiased=UnbiasedLayerNorm())[2].keys() == {"unbiased"}
    assert find(**{"": RMS(8)})[0] == {}, "nothing can replace the model itself"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("eps", "dim"), [(1e-6, 64), (1e-5, 65536)])
def test_a_models_own_layer_norm_is_found_with_its_eps(eps, dim, bias):
    own = OwnLayerNorm(dim, eps, bias).eval()
    assert facts(own) == (LAYER, (dim,), eps, True, bias) and (own.weight == 3).all()
    norm = norm_facts(own).as_norm(own)
    assert type(norm) is LAYER and norm.eps == eps and not norm.training
    assert norm.weight is own.weight and norm.bias is own.bias


@pytest.mark.parametrize("dim", [2, 64])
def test_norms_of_another_dimension_than_the_last_are_not_recognised(dim):
    others = dict(other=OtherDimensionRMSNorm(dim), tokens=OverTokensRMSNorm(dim), layers=OtherDimensionLayerNorm(dim))
    assert find(rms=OwnRMSNorm(dim), layer=OwnLayerNorm(dim), **others)[0] == {"rms": RMS, "layer": LAYER}


def test_equal_norms_are_compared_once(monkeypatch):
    """A norm differs from another with its sizes, attributes, class and own forward."""
    calls = []
    monkeypatch.setattr("mxtrain.conversion.norms.norm_facts", lambda module: calls.append(module) or {})
    norms = [OwnRMSNorm() for _ in range(3)] + [OwnRMSNorm(32), OwnRMSNorm(eps=1e-5), Norm()]
    norms[2].forward = lambda x: x
    listed = [OwnRMSNorm(), OwnRMSNorm()]
    for norm in listed:
        norm.history = []  # nothing that Python could compare
    find_norms({str(i): norm for i, norm in enumerate([*norms, *listed])})
    assert calls == [norms[0], *norms[2:], *listed]


class DetachedRMSNorm(OwnRMSNorm):
    def rstd(self, x):
        return super().rstd(x).detach()


class DetachedInEvaluation(OwnRMSNorm):
    def rstd(self, x):
        return super().rstd(x) if self.training else super().rstd(x).detach()


class ConstantGainNorm(OwnRMSNorm):
    def forward(self, x):
        return self.weight.detach() * (x * self.rstd(x))


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class DoubledGainGradient(OwnRMSNorm):
    def forward(self, x):
        return _Double.apply(self.weight) * (x * self.rstd(x))


class ClippedGradient(OwnRMSNorm):
    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda dy: dy.clamp(-50, 50))
        return y


class ClampedInput(OwnRMSNorm):
    limit = 50

    def forward(self, x):
        return super().forward(x.clamp(-self.limit, self.limit))


class ClampedInputToFp16(ClampedInput):
    limit = 65504


class ClampedResult(OwnRMSNorm):
    def forward(self, x):
        return super().forward(x).clamp(-50, 50)


class ClampedRMS(OwnRMSNorm):
    """Called with rows of RMS 1e-5 or less, the eps of 1e-12 would count."""

    def rstd(self, x):
        return super().rstd(x).clamp(max=1e5)


class NoGradientNorm(OwnRMSNorm):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class DetachedMean(OwnRMSNorm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True).detach())


class ConstantBias(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias.detach(), self.eps)


OTHERS = [
    DetachedRMSNorm,
    DetachedInEvaluation,
    ClippedGradient,
    NoGradientNorm,
    ConstantGainNorm,
    DoubledGainGradient,
    ClampedInput,
    ClampedInputToFp16,
    ClampedRMS,
    ClampedResult,
]


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("dim", [2, 64])
def test_the_results_of_an_rms_norm_are_not_enough(kind, dim):
    assert OTHER_RESULTS in norm_facts(kind(dim, 1e-12))[RMS]
    assert norm_facts(OwnRMSNorm(dim, 1e-12)).eps == 1e-12


@pytest.mark.parametrize("kind", [DetachedMean, ConstantBias])
@pytest.mark.parametrize("dim", [2, 64])
def test_the_results_of_a_layer_norm_are_not_enough(kind, dim):
    assert "does not compute the results and gradients of nn.LayerNorm" in norm_facts(kind(dim))[LAYER]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_norm_is_recognised_whatever_the_mode_of_gradients(context):
    with context():
        assert norm_facts(OwnRMSNorm()).eps == 1e-6
        assert OTHER_RESULTS in norm_facts(DetachedRMSNorm())[RMS]


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(64, 64)

    def forward(self, x):
        return x + self.linear(self.norm(x))


@pytest.mark.parametrize(("converter", "becomes"), [("mxnorm", MXNorm), ("fused_norm", FusedRMSNorm)])
def test_norms_with_another_gradient_stay_and_the_plan_says_why(converter, becomes):
    frozen = OwnRMSNorm()
    frozen.weight.requires_grad_(False)
    kinds = [OwnRMSNorm(), DetachedRMSNorm(), ConstantGainNorm(), frozen, nn.RMSNorm(64)]
    model = nn.Sequential(*map(Block, kinds))
    plan = mxtrain.convert(model, converter, example_inputs=(torch.zeros(4, 64),), filter_fqns=[])
    assert [type(block.norm) for block in model] == [becomes, DetachedRMSNorm, ConstantGainNorm, becomes, becomes]
    assert plan.skipped["1.norm"].startswith(f"is a DetachedRMSNorm that {OTHER_RESULTS}")
    assert "  norms recognised: 2 OwnRMSNorm by results and gradients, 1 RMSNorm by type\n" in str(plan)
    model(torch.ones(4, 64)).sum().backward()
    assert [block.norm.weight.grad is None for block in model] == [False, False, True, True, False]
