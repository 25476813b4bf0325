"""The ablation of the initial gain: which gains it sets, and what it refuses."""

from pathlib import Path

import pytest
import torch
import torch.nn as nn
from torchtitan.protocols.model_converter import build_model_converters

from mxtrain import ConfigError
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.v02.engine import build_on_meta

CONFIG = Path(__file__).parents[2] / "scripts" / "evidence" / "small_gain.toml"


@pytest.fixture
def initial_gain(import_evidence, monkeypatch):
    """The ablation's module. After the test, gains of MXNorms start at 1 again."""
    monkeypatch.setattr(MXNorm, "reset_parameters", MXNorm.reset_parameters)
    return import_evidence("initial_gain")


def test_the_config_starts_the_gains_of_mxnorms_at_069_and_leaves_others(initial_gain):
    job_config = parse_job_config([f"--job.config_file={CONFIG}", "--model.flavor=debugmodel"])
    assert (job_config.model.converters, job_config.mxnorm.estimator) == (["mxnorm", "small_gain"], "exact")
    model = build_on_meta(job_config)
    build_model_converters(job_config, None).convert(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    gains = {name: module.weight for name, module in model.named_modules() if isinstance(module, nn.RMSNorm)}
    assert len(gains) == 2 * len(model.layers) + 1
    plain = gains.pop("norm")
    assert torch.equal(plain, torch.ones_like(plain))
    assert all(torch.equal(gain, torch.full_like(gain, 0.69)) for gain in gains.values())


def test_a_norm_without_a_gain_is_left_alone(initial_gain):
    norm = MXNorm(64, elementwise_affine=False)
    initial_gain.SmallGain(None, None).convert(norm)
    norm.reset_parameters()
    assert norm.weight is None


def test_a_model_without_mxnorms_is_refused(initial_gain):
    with pytest.raises(ConfigError, match="'small_gain' comes after 'mxnorm'"):
        initial_gain.SmallGain(None, None).convert(nn.RMSNorm(64))
