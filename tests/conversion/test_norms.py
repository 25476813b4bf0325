import pytest
import torch
import torch.nn as nn

from mxtrain import FusedRMSNorm, MXNorm
from mxtrain.conversion.norms import as_rms_norm


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


class RMSNormWithBias(OwnRMSNorm):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))


@pytest.mark.parametrize("eps", [1e-8, 1e-6, 1e-5, 1e-3])
def test_weight_is_shared_and_eps_is_found(eps):
    own = OwnRMSNorm(eps=eps).eval()
    norm = as_rms_norm(own)
    assert type(norm) is nn.RMSNorm and norm.eps == eps and norm.weight is own.weight and not norm.training
    assert (own.weight == 3).all()


@pytest.mark.parametrize("norm", [nn.RMSNorm(64), FusedRMSNorm(64), FusedRMSNorm(64, None), nn.RMSNorm((2, 32))])
def test_pytorchs_own_and_ours_are_themselves(norm):
    assert as_rms_norm(norm) is norm


def test_on_the_meta_device():
    with torch.device("meta"):
        own = OwnRMSNorm()
    assert as_rms_norm(own).weight.is_meta


@pytest.mark.parametrize(
    "module",
    [ShiftedRMSNorm(), CenteredRMSNorm(), WithoutEpsRMSNorm(), NeedsMoreRMSNorm(), RMSNormWithBias(), nn.LayerNorm(64),
     nn.Linear(64, 64), MXNorm(64, mode="reference")],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_what_computes_something_else_is_none(module):
    assert as_rms_norm(module) is None
