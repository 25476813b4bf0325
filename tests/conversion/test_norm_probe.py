"""A norm is recognised by its results and gradients, in small, ordinary and large rows."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import mxtrain
from mxtrain import FusedRMSNorm, MXNorm
from mxtrain.conversion.norm_probe import eps_of


class OwnRMSNorm(nn.Module):
    def __init__(self, dim=64, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def rstd(self, x):
        return torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self.weight * (x * self.rstd(x))


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


OTHER_ROWS = "does not compute what nn.RMSNorm does with an attribute as eps in rows of about "
OTHERS = {
    DetachedRMSNorm: "has the results of nn.RMSNorm and another gradient of x",
    DetachedInEvaluation: "has the results of nn.RMSNorm and another gradient of x",
    ClippedGradient: "has the results of nn.RMSNorm and another gradient of x",
    NoGradientNorm: "has the results of nn.RMSNorm and no gradient of x",
    ConstantGainNorm: "has the results of nn.RMSNorm and no gradient of its weight",
    DoubledGainGradient: "has the results of nn.RMSNorm and another gradient of its weight",
    ClampedInput: f"{OTHER_ROWS}100",
    ClampedInputToFp16: f"{OTHER_ROWS}100000",
    ClampedRMS: f"{OTHER_ROWS}1e-06",
    ClampedResult: f"{OTHER_ROWS}1 with a weight of about 10000",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_the_results_of_an_rms_norm_are_not_enough(kind):
    assert eps_of(kind(64, 1e-12), "RMSNorm") == OTHERS[kind]
    assert isinstance(eps_of(kind(2, 1e-12), "RMSNorm"), str)
    assert eps_of(OwnRMSNorm(2, 1e-12), "RMSNorm") == eps_of(OwnRMSNorm(64, 1e-12), "RMSNorm") == 1e-12


@pytest.mark.parametrize("dim", [2, 64])
def test_the_results_of_a_layer_norm_are_not_enough(dim):
    assert eps_of(DetachedMean(dim), "LayerNorm") == "has the results of nn.LayerNorm and another gradient of x"
    assert eps_of(ConstantBias(dim), "LayerNorm") == "has the results of nn.LayerNorm and no gradient of its bias"
    assert eps_of(nn.LayerNorm(dim), "LayerNorm") == 1e-5


def test_a_norm_is_recognised_whatever_the_mode_of_gradients():
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert eps_of(OwnRMSNorm(), "RMSNorm") == 1e-6
            assert eps_of(DetachedRMSNorm(), "RMSNorm") == OTHERS[DetachedRMSNorm]


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
    assert plan.skipped["1.norm"] == f"is a DetachedRMSNorm that {OTHERS[DetachedRMSNorm]}"
    assert plan.skipped["2.norm"] == f"is a ConstantGainNorm that {OTHERS[ConstantGainNorm]}"
    assert "  norms recognised: 2 OwnRMSNorm by results and gradients, 1 RMSNorm by type\n" in str(plan)
    model(torch.ones(4, 64)).sum().backward()
    assert [block.norm.weight.grad is None for block in model] == [False, False, True, True, False]
