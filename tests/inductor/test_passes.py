"""Inductor runs mxtrain's passes, after ``install`` and until ``remove``, beside those of others."""

import pytest
import torch
from torch._inductor import config
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

import mxtrain
from mxtrain.errors import ConfigError
from mxtrain.inductor import passes


@pytest.fixture(autouse=True)
def no_passes():
    with config.patch(joint_custom_pre_pass=None):
        yield


def seen_by(monkeypatch) -> list:
    seen = []
    monkeypatch.setattr(passes, "JOINT", (lambda graph: seen.append("ours"),))
    return seen


def run_inductors_passes():
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    with config.patch(pattern_matcher=False):
        joint_graph_passes(torch.fx.GraphModule(torch.nn.Module(), graph))


def test_inductor_runs_the_passes_once_and_only_while_they_are_installed(monkeypatch):
    seen = seen_by(monkeypatch)
    run_inductors_passes()
    assert seen == []
    passes.install()
    passes.install()
    run_inductors_passes()
    assert seen == ["ours"]
    passes.remove()
    run_inductors_passes()
    assert seen == ["ours"] and config.joint_custom_pre_pass is None


def test_passes_of_others_still_run(monkeypatch):
    seen = seen_by(monkeypatch)
    other = lambda graph: seen.append("other")  # noqa: E731
    config.joint_custom_pre_pass = other
    passes.install()
    run_inductors_passes()
    assert seen == ["ours", "other"]
    assert config.joint_custom_pre_pass.uuid() is None
    passes.remove()
    assert config.joint_custom_pre_pass is other


@pytest.mark.parametrize("converter", ["mxnorm", "mx_linear"])
def test_a_conversion_installs_or_removes_the_passes(converter):
    def model():
        return torch.nn.Sequential(torch.nn.RMSNorm(32, eps=1e-5), torch.nn.Linear(32, 32))

    inputs = (torch.zeros(2, 32),)
    for graph_passes in (True, False):
        mxtrain.convert(model(), converter, example_inputs=inputs, filter_fqns=[], graph_passes=graph_passes)
        assert (config.joint_custom_pre_pass is not None) == graph_passes
    mxtrain.convert(model(), "fused_rmsnorm", example_inputs=inputs)
    assert config.joint_custom_pre_pass is None
    with pytest.raises(ConfigError, match="graph_passes"):
        mxtrain.convert(model(), converter, graph_passes="no")


def test_caches_tell_versions_of_the_passes_apart():
    passes.install()
    uuid = config.joint_custom_pre_pass.uuid()
    assert uuid == config.joint_custom_pre_pass.uuid() and isinstance(uuid[0], bytes)
