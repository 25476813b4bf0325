import math

import pytest
import torch

from mxtrain.recipes.parse import get_recipe
from mxtrain.recipes.recipe import RMSEstimate
from mxtrain.reference.mxnorm import inverse_rms, norm_backward, scale_rows

MXFP8 = get_recipe("mxfp8")


def estimate(p=2, estimator="pre_round", eps=0.0):
    return RMSEstimate.for_recipe(MXFP8, p, estimator, eps)


def rows(kind: str, count: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(kind) * 1000 + width)
    x = torch.randn(count, width, generator=generator, dtype=torch.float64)
    if kind == "laplace":
        u = torch.rand(count, width, generator=generator, dtype=torch.float64) - 0.5
        x = -u.sign() * torch.log1p(-2 * u.abs())
    if kind == "outliers":
        # A feature or two, the same in every row, are 100 times as large: what transformer activations look like.
        x[:, torch.randperm(width, generator=generator)[: max(1, width // 2048)]] *= 100
    return x.float()


def test_against_the_formula_written_out():
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    for p in (1, 2):
        for t in range(3):
            maxima = [max(abs(v) for v in x[t, 32 * k : 32 * k + 32].tolist()) for k in range(3)]
            mean = (sum(m**p for m in maxima) / 3) ** (1 / p)
            r = mean / {1: 2.34708, 2: 2.38946}[p]
            rho = 1 / math.sqrt(r * r + 1e-5)
            assert inverse_rms(x, estimate(p, eps=1e-5), MXFP8)[t].item() == pytest.approx(rho, rel=5e-6)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize(("width", "spread"), [(256, 0.07), (1024, 0.035), (4096, 0.018)])
def test_gaussian_rows_are_estimated_within_the_known_spread(p, width, spread):
    """Relative spread 6 % at D = 256, falling as 1 / sqrt(D); no bias beyond it."""
    x = rows("gaussian", 2000, width)
    ratio = inverse_rms(x, estimate(p), MXFP8) * x.square().mean(-1).sqrt()
    assert ratio.std().item() < spread
    assert ratio.mean().item() == pytest.approx(1, abs=0.15 * spread + 0.002)
    # The estimate reads B times less data than the RMS; if it had no spread it would not be an estimate.
    assert ratio.std().item() > spread / 3


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("kind", ["gaussian", "laplace", "outliers"])
def test_output_bound(p, kind):
    """|x rho| <= c K^(1/p): sqrt(K) for p = 2, K for p = 1."""
    for width in (32, 256, 4096):
        x = rows(kind, 50, width)
        x[0] = 0
        x[0, 5] = 7.0  # one element alone in its row reaches the bound
        bound = estimate(p).constant * (width / 32) ** (1 / p)
        xhat = scale_rows(x, inverse_rms(x, estimate(p), MXFP8)).abs()
        assert xhat.max().item() <= bound * (1 + 1e-6)
        assert xhat[0, 5].item() == pytest.approx(bound, rel=1e-5)


def test_exact_is_the_rms():
    x = rows("outliers", 64, 512)
    expected = (x.double().square().mean(-1) + 1e-3).rsqrt()
    torch.testing.assert_close(inverse_rms(x, estimate(2, "exact", 1e-3), MXFP8).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("p", [1, 2])
def test_post_round_reads_the_rounded_scales(p):
    """A maximum that moves within its binade changes the pre-round estimate, not the post-round estimate."""
    x = torch.full((1, 64), 0.1)
    x[0, 0], x[0, 32] = 1.3, 1.0
    y = x.clone()
    y[0, 0] = 1.7  # 448 * 2^-8 = 1.75 is the next scale
    assert torch.equal(
        inverse_rms(x, estimate(p, "post_round"), MXFP8), inverse_rms(y, estimate(p, "post_round"), MXFP8)
    )
    assert not torch.equal(inverse_rms(x, estimate(p), MXFP8), inverse_rms(y, estimate(p), MXFP8))
    # Both maxima stand for 1.75 now.
    expected = estimate(p).constant / 1.75
    assert inverse_rms(x, estimate(p, "post_round"), MXFP8).item() == pytest.approx(expected, rel=1e-6)


def test_ugly_rows():
    x = torch.ones(5, 64)
    x[0], x[1, 3], x[2, 40] = 0, float("nan"), float("inf")
    x[3] *= 1e-30
    rho = inverse_rms(x, estimate(eps=1e-5), MXFP8)
    assert rho[0].item() == pytest.approx(1e-5**-0.5, rel=1e-6)
    assert rho[1].isnan()
    assert rho[2] == 0
    assert rho[3].item() == pytest.approx(1e-5**-0.5, rel=1e-6)
    xhat = scale_rows(x, rho)
    assert (xhat[0] == 0).all() and xhat[1].isnan().all() and xhat[2, 40].isnan() and (xhat[2, :32] == 0).all()
    assert xhat[4].isfinite().all()


def test_backward_is_rmsnorms_gradient_for_the_true_inverse_rms():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(7, 96, generator=generator, dtype=torch.float64, requires_grad=True)
    g = torch.randn(7, 96, generator=generator, dtype=torch.float64)
    (expected,) = torch.autograd.grad(torch.nn.functional.rms_norm(x, (96,), eps=0.0), x, g)
    rho = x.detach().square().mean(-1).rsqrt()
    torch.testing.assert_close(norm_backward(g, x.detach(), rho), expected, rtol=1e-12, atol=1e-14)
