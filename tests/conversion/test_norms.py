"""Which modules are norms: by type, or by results and gradients in small, ordinary and large rows."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import mxtrain
from mxtrain import ConfigError, FusedLayerNorm, FusedRMSNorm, MXNorm
from mxtrain.conversion.layers import NormFacts, find_norms, norm_facts
from mxtrain.conversion.schedule import attach_schedule, set_step
from mxtrain.formats.estimate import norm_constant
from mxtrain.formats.schedule import parse_entries

RMS, LAYER = nn.RMSNorm, nn.LayerNorm
OTHER_RESULTS = "does not compute the results and gradients of nn.RMSNorm"


def facts(module):
    """Kind, shape, eps, gain and bias of the norm that a module is; None for another module."""
    norm = norm_facts(module)
    if norm is None:
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


class OffsetRMSNorm(OwnRMSNorm):
    """As Gemma's and Qwen3-Next's."""

    def forward(self, x):
        wide = x.float()
        return ((1 + self.weight.float()) * (wide * self.rstd(wide))).to(x.dtype)


class RoundedOffsetRMSNorm(OwnRMSNorm):
    """As a norm of Muse Spark."""

    def forward(self, x):
        wide = x.float()
        return ((1 + self.weight).float() * (wide * self.rstd(wide))).to(x.dtype)


class InputScaledRMSNorm(OwnRMSNorm):
    """As another norm of Muse Spark."""

    def forward(self, x):
        wide = x.float() * (1 + self.weight.float())
        return (wide * self.rstd(wide)).to(x.dtype)


class WeightFirstRMSNorm(OwnRMSNorm):
    def forward(self, x):
        x = x * self.weight
        return x * self.rstd(x)


class ConstantOffsetRMSNorm(OwnRMSNorm):
    def forward(self, x):
        return (1 + self.weight.detach()) * (x * self.rstd(x))


class NeedsMoreRMSNorm(OwnRMSNorm):
    def forward(self, x, y):
        return super().forward(x) + y


class GatedRMSNorm(OwnRMSNorm):
    """As in Mamba 2 and Bamba: a fused norm would take the gate for a residual."""

    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * gate)


class SiluGatedRMSNorm(OwnRMSNorm):
    """As in Nemotron-H: gate, then norm, in groups of features."""

    def __init__(self, group_size=32, dim=64):
        super().__init__(dim)
        self.group_size = group_size

    def forward(self, x, gate=None):
        wide = (x.float() * F.silu(gate.float())).unflatten(-1, (-1, self.group_size))
        return self.weight * (wide * self.rstd(wide)).flatten(-2).to(x.dtype)


class NormThenGateRMSNorm(OwnRMSNorm):
    """As in Qwen3-Next."""

    def forward(self, x, gate):
        return super().forward(x) * F.silu(gate)


class WithoutWeightRMSNorm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class RMSNormWithBias(OwnRMSNorm):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))


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


def test_a_models_own_rms_norm_is_found_with_its_eps():
    for eps in (1e-8, 1e-6, 1e-5, 1e-3):
        own = OwnRMSNorm(eps=eps).eval()
        found = norm_facts(own)
        assert found == NormFacts(RMS, (64,), eps)
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


def test_a_models_own_layer_norm_is_found_with_its_eps():
    for eps, dim, bias in [(1e-6, 64, False), (1e-5, 65536, True)]:
        own = OwnLayerNorm(dim, eps, bias).eval()
        assert facts(own) == (LAYER, (dim,), eps, True, bias) and (own.weight == 3).all()
        norm = norm_facts(own).as_norm(own)
        assert type(norm) is LAYER and norm.eps == eps and not norm.training
        assert norm.weight is own.weight and norm.bias is own.bias


def test_what_a_norm_is_called_does_not_count():
    assert facts(Norm(eps=1e-5)) == facts(DerivedRMSNorm(64, 1e-5)) == (RMS, (64,), 1e-5, True, False)
    assert facts(Clip(64, 1e-5)) == (LAYER, (64,), 1e-5, True, True) and facts(Doubling(64, 1e-5)) is None


def test_gains_of_one_plus_weight_are_found_and_kept():
    own = OffsetRMSNorm(eps=1e-3).eval()
    found = norm_facts(own)
    assert found == NormFacts(RMS, (64,), 1e-3, True, False, True)
    assert found.why_it_stays is None and not norm_facts(OwnRMSNorm()).add_unit_offset
    norm = found.as_norm(own)
    assert norm.add_unit_offset and norm.weight is own.weight and not norm.training
    fused = FusedRMSNorm.from_rms_norm(norm)
    assert norm_facts(fused).add_unit_offset and MXNorm.from_rms_norm(fused).add_unit_offset
    assert norm_facts(ConstantOffsetRMSNorm()) is None


def test_norms_whose_gain_is_no_factor_of_the_next_weight_stay_with_the_reason():
    reasons = {
        RoundedOffsetRMSNorm: "rounds 1 + weight to the dtype of its weight",
        InputScaledRMSNorm: "multiplies by its weight before it normalizes",
        WeightFirstRMSNorm: "multiplies by its weight before it normalizes",
    }
    for converter in ("mxnorm", "fused_norm"):
        model = nn.Sequential(*(Block(kind()) for kind in (OffsetRMSNorm, *reasons)))
        plan = mxtrain.convert(model, converter, example_inputs=(torch.zeros(4, 64),), filter_fqns=[])
        assert model[0].norm.add_unit_offset
        norms = {fqn: reason for fqn, reason in plan.skipped.items() if fqn.endswith("norm")}
        assert norms == {f"{i}.norm": reason for i, reason in enumerate(reasons.values(), 1)}


def test_gated_norms_are_found_with_the_size_of_their_groups():
    for size in (64, 16):
        found = norm_facts(SiluGatedRMSNorm(size))
        assert (found.kind, found.eps, found.group_size, found.why_it_stays) == (RMS, 1e-6, size, None)
    assert norm_facts(NormThenGateRMSNorm()).why_it_stays == "multiplies by a gate after it normalizes"
    assert norm_facts(GatedRMSNorm()) is None and norm_facts(NeedsMoreRMSNorm()) is None


class GatedBlock(nn.Module):
    def __init__(self, norm, dtype=None):
        super().__init__()
        self.norm, self.linear, self.dtype = norm, nn.Linear(64, 64), dtype

    def forward(self, x):
        return x + self.linear(self.norm(x, x.sin()).to(self.dtype or x.dtype))


def test_gated_norms_convert_where_groups_are_whole_blocks_and_the_plan_names_the_others():
    norms = [SiluGatedRMSNorm(), SiluGatedRMSNorm(64), SiluGatedRMSNorm(16), NormThenGateRMSNorm()]
    model = nn.Sequential(*map(GatedBlock, norms), GatedBlock(SiluGatedRMSNorm(), torch.float64).requires_grad_(False))
    model[4].linear.double()
    inputs = (torch.zeros(4, 64),)
    plan = mxtrain.convert(model, example_inputs=inputs, filter_fqns=[], p=1)
    assert [type(block.norm).__name__ for block in model[:2]] == ["GatedMXNorm"] * 2
    assert [block.norm.groups for block in model[:2]] == [2, 1] and model[0].norm.estimate.estimator == "exact"
    assert {fqn: reason for fqn, reason in plan.skipped.items() if fqn.endswith("norm")} == {
        "2.norm": "normalizes groups of 16 features, which are not whole blocks of 32",
        "3.norm": "multiplies by a gate after it normalizes",
        "4.norm": "feeds something other than a linear: to in GatedBlock",
    }
    model[:4](torch.randn(4, 64)).sum().backward()
    assert all(block.norm.weight.grad is not None for block in model[:4])
    mixed = nn.Sequential(nn.RMSNorm(64), GatedBlock(SiluGatedRMSNorm()))
    assert mxtrain.convert(mixed, "fused_norm").skipped == {"1.norm": "takes a gate"}


def test_a_measured_ratio_is_that_of_gated_norms_alone_at_every_step():
    model = nn.Sequential(GatedBlock(SiluGatedRMSNorm()), Block(nn.RMSNorm(64)))
    settings = dict(example_inputs=(torch.zeros(4, 64),), filter_fqns=[])
    for ratio in (0.0, float("nan"), True, "1.5"):
        with pytest.raises(ConfigError, match=f"gated_estimate_ratio = {ratio!r} is not a finite number above 0$"):
            mxtrain.convert(model, gated_estimate_ratio=ratio, **settings)
    with pytest.raises(ConfigError, match="gated_estimate_ratio = 1.66 needs estimator = 'pre_round' or 'post_round'$"):
        mxtrain.convert(model, gated_estimate_ratio=1.66, estimator="exact", **settings)
    with pytest.raises(ConfigError, match="gated_estimate_ratio = 1.66 needs a gated norm to swap$"):
        mxtrain.convert(model[1], gated_estimate_ratio=1.66, **settings)
    plan = mxtrain.convert(model, gated_estimate_ratio=1.66, **settings)
    attach_schedule(model, plan.feeds, parse_entries([{"from_step": 2, "recipe": "nvfp4"}], 3, {}, "schedule"))
    for step, block_size in ((1, 32), (2, 16)):
        set_step(model, step)
        estimates = [block.norm.estimate for block in model]
        assert [(e.estimator, e.ratio) for e in estimates] == [("pre_round", 1.66), ("pre_round", 1.0)]
        assert all(e.constant == e.ratio * norm_constant(2, block_size) for e in estimates)


def test_norms_of_pytorch_and_fused_norms_keep_their_arguments():
    for kind in (RMS, FusedRMSNorm):
        norm = kind(64, 1e-3, elementwise_affine=False)
        assert facts(kind(64)) == (RMS, (64,), kind(64).eps, True, False)
        assert facts(norm) == (RMS, (64,), 1e-3, False, False) and norm_facts(norm).as_norm(norm).weight is None
    for kind in (LAYER, FusedLayerNorm):
        norm = kind(64, elementwise_affine=False)
        assert facts(kind(64, 1e-3)) == (LAYER, (64,), 1e-3, True, True)
        assert facts(kind(64, bias=False)) == (LAYER, (64,), 1e-5, True, False)
        assert facts(norm) == (LAYER, (64,), 1e-5, False, False) and norm_facts(norm).as_norm(norm).weight is None
    assert norm_facts(RMS((2, 32))).normalized_shape == (2, 32)


def test_modules_that_compute_something_else():
    for module in (
        *(NeedsMoreRMSNorm(), GatedRMSNorm(), RMSNormWithBias()),
        *(WithoutWeightRMSNorm(), nn.Linear(64, 64), MXNorm(64, mode="reference")),
        *(OtherDimensionRMSNorm(), OverTokensRMSNorm(), OtherDimensionLayerNorm(64)),
    ):
        assert facts(module) is None, module
    assert facts(CenteredRMSNorm())[0] is LAYER


def test_norms_that_stay_are_named():
    others = dict(fp32=Fp32RMSNorm(), scaled=ScaledRMSNorm(), more=NeedsMoreRMSNorm())
    norms, rms, layer = find(plain=WithoutWeightRMSNorm(), t5=T5LayerNorm(), **others)
    assert norms == {"t5": RMS}, "called a LayerNorm, but does not subtract the mean"
    facts = {
        "plain": f"is a WithoutWeightRMSNorm that {OTHER_RESULTS}",
        "fp32": f"is a Fp32RMSNorm that {OTHER_RESULTS}",
        "scaled": f"is a ScaledRMSNorm that {OTHER_RESULTS}",
        "more": f"is a NeedsMoreRMSNorm that {OTHER_RESULTS}",
    }
    assert not layer and rms.keys() == facts.keys() and all(rms[name].startswith(facts[name]) for name in rms)
    assert find(unbiased=UnbiasedLayerNorm())[2].keys() == {"unbiased"}
    assert find(**{"": RMS(8)})[0] == {}, "nothing can replace the model itself"


class DetachedRMSNorm(OwnRMSNorm):
    def rstd(self, x):
        return super().rstd(x).detach()


class ConstantGainNorm(OwnRMSNorm):
    def forward(self, x):
        return self.weight.detach() * (x * self.rstd(x))


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


def test_results_are_not_enough():
    with torch.no_grad():  # whatever the mode of gradients is
        for other in (DetachedRMSNorm(), NoGradientNorm(), ConstantGainNorm(), DetachedMean(), ConstantBias(64)):
            assert norm_facts(other) is None
        assert norm_facts(OwnRMSNorm(eps=1e-12)).eps == 1e-12


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(64, 64)

    def forward(self, x):
        return x + self.linear(self.norm(x))


def test_norms_with_another_gradient_stay_and_the_plan_says_why():
    for converter, becomes in [("mxnorm", MXNorm), ("fused_norm", FusedRMSNorm)]:
        frozen = OwnRMSNorm()
        frozen.weight.requires_grad_(False)
        model = nn.Sequential(*map(Block, [OwnRMSNorm(), DetachedRMSNorm(), frozen, nn.RMSNorm(64)]))
        plan = mxtrain.convert(model, converter, example_inputs=(torch.zeros(4, 64),), filter_fqns=[])
        assert [type(block.norm) for block in model] == [becomes, DetachedRMSNorm, becomes, becomes]
        assert plan.skipped["1.norm"].startswith(f"is a DetachedRMSNorm that {OTHER_RESULTS}")
        model(torch.ones(4, 64)).sum().backward()
        assert [block.norm.weight.grad is None for block in model] == [False, False, True, False]
