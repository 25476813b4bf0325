"""The ablations of the norm's forward: which RMS they take, what they leave, and what they refuse."""

from pathlib import Path

import pytest
import torch

from mxtrain.formats.estimate import norm_constant
from mxtrain.formats.mx.ops import MXKernelOps
from mxtrain.formats.mx.reference import image
from mxtrain.formats.parse import get_recipe
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.titan.job_config import parse_job_config

EVIDENCE = Path(__file__).parents[2] / "scripts" / "evidence"
RECIPE = get_recipe("mxfp8").fprop
EPS = 1e-2
NAMES = ["damped_rms", "amplified_rms"]


@pytest.fixture(scope="module")
def rms_ablations(import_evidence):
    return import_evidence("rms_ablations")


@pytest.fixture
def ablation(rms_ablations, monkeypatch):
    """Build the converter of a name for its config and these flags. After the test, norms are MXNorm's again."""
    monkeypatch.setattr(MXKernelOps, "normalize", MXKernelOps.normalize)

    def ablation(name, *flags):
        job_config = parse_job_config(
            [f"--job.config_file={EVIDENCE / name}.toml", "--model.flavor=debugmodel", *flags]
        )
        assert job_config.model.converters == ["mxnorm", name]
        kind = name.title().replace("_", "").replace("Rms", "RMS")
        return getattr(rms_ablations, kind)(job_config, None)

    return ablation


def rows():
    """Rows whose estimate is far above the true RMS, far below it, and near it, and a row of zeros."""
    torch.manual_seed(0)
    x = torch.randn(8, 96)
    x[0], x[1], x[2] = 0, 0, x[2].sign()
    x[1, 40] = 3.0
    x[3] = x[3] ** 3
    return x


def squares(x):
    """The squares of the true RMS and of the estimate with p = 2, [T]."""
    maxima = torch.stack([block.abs().amax(-1) for block in x.double().split(32, -1)], -1)
    return x.double().square().mean(-1), maxima.square().mean(-1) / norm_constant(2, 32) ** 2


def wanted_rho(name, x):
    true, estimate = squares(x)
    larger = true.where(true > estimate, estimate)
    square = larger if name == "damped_rms" else true + estimate - larger
    return (1 / (square + EPS).sqrt()).float()


@pytest.mark.parametrize("mode", ["reference", "emulated"])
@pytest.mark.parametrize("name", NAMES)
def test_the_operand_is_the_cast_of_x_over_the_chosen_rms(ablation, name, mode, device):
    x = rows()
    true, estimate = squares(x)
    assert (estimate > 5 * true)[1] and (5 * estimate < true)[2] and true[0] == estimate[0] == 0
    ablation(name).convert(norm := MXNorm(96, EPS, mode=mode))
    result = norm(x)
    torch.testing.assert_close(result.rho, wanted_rho(name, x), rtol=1e-6, atol=0)
    want = image(x * result.rho[:, None], RECIPE.format, RECIPE.scale_rounding, 1, result.xhat.data.dtype)
    assert torch.equal(result.xhat.data, want)


@pytest.mark.parametrize(
    ("name", "factor", "estimator"),
    [("enlarged_rms", 1.45, "pre_round"), ("doubled_rms", 2, "pre_round"), ("rounded_rms", 1 / 1.45, "post_round")],
)
def test_the_rms_is_a_multiple_of_the_estimate(ablation, name, factor, estimator):
    x, norm = rows(), MXNorm(96, EPS, mode="reference", estimator=estimator)
    estimate = 1 / norm(x).rho.double() ** 2 - EPS
    ablation(name).convert(norm)
    torch.testing.assert_close(norm(x).rho, (1 / (factor**2 * estimate + EPS).sqrt()).float(), rtol=2e-6, atol=0)
