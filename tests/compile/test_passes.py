"""Inductor runs mxtrain's passes from ``install`` to ``remove``, together with other passes."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import async_compile, config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.post_grad import post_grad_passes

import mxtrain
from mxtrain.compile import passes
from mxtrain.errors import ConfigError

FOLDER = Path(passes.__file__).parent
FIELDS = ("joint_custom_pre_pass", "post_grad_custom_post_pass")


@pytest.fixture(autouse=True)
def no_passes():
    with config.patch(dict.fromkeys(FIELDS)):
        yield


@pytest.fixture
def seen(monkeypatch) -> list:
    """A list to which stand-ins for mxtrain's passes add the name of their field."""
    seen = []
    for field in FIELDS:
        monkeypatch.setitem(passes.PASSES, field, (lambda graph, field=field: seen.append(field),))
    return seen


def run_inductor(is_inference=False):
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    with config.patch(pattern_matcher=False):
        joint_graph_passes(module)
        post_grad_passes(module, is_inference)


def installed() -> list:
    return [getattr(config, field) for field in FIELDS]


def test_inductor_runs_the_passes_once_and_only_while_they_are_installed(seen):
    passes.install()
    passes.install()
    run_inductor()
    assert seen == [*FIELDS]
    passes.remove()
    run_inductor()
    assert len(seen) == 2 and installed() == [None, None]


@pytest.mark.parametrize("field", FIELDS)
def test_other_passes_still_run(seen, field):
    other = lambda graph: seen.append("other")  # noqa: E731
    setattr(config, field, other)
    passes.remove()
    assert getattr(config, field) is other
    passes.install()
    run_inductor()
    assert seen[seen.index(field) + 1] == "other" and len(seen) == 3
    assert getattr(config, field).uuid() is None
    passes.remove()
    assert getattr(config, field) is other


def test_other_passes_learn_whether_a_graph_is_for_inference(seen):
    """PyTorch 2.11 has no such passes."""

    class Other(passes.InferenceAware or CustomGraphPass):
        def __call__(self, graph, is_inference="unknown"):
            seen.append(is_inference)

        def uuid(self):
            return "a name"

    config.post_grad_custom_post_pass = [Other(), Other()]
    passes.install()
    run_inductor(is_inference=True)
    assert seen == [*FIELDS, *[True if passes.InferenceAware else "unknown"] * 2]
    assert config.post_grad_custom_post_pass.uuid()[1:] == ("a name", "a name")


@pytest.mark.parametrize("converter", ["mxnorm", "mx_linear"])
def test_a_conversion_installs_or_removes_the_passes(converter):
    def model():
        return torch.nn.Sequential(torch.nn.RMSNorm(32, eps=1e-5), torch.nn.Linear(32, 32))

    inputs = (torch.zeros(2, 32),)
    for graph_passes in (True, False):
        mxtrain.convert(model(), converter, example_inputs=inputs, filter_fqns=[], graph_passes=graph_passes)
        assert [each is not None for each in installed()] == [graph_passes] * 2
    mxtrain.convert(model(), "fused_norm", example_inputs=inputs)
    assert installed() == [None, None]
    with pytest.raises(ConfigError, match="graph_passes"):
        mxtrain.convert(model(), converter, graph_passes="no")


def test_compile_workers_begin_anew_once(monkeypatch):
    """Those of an earlier compilation have not read how kernels are launched."""
    monkeypatch.delenv(passes.VARIABLE, raising=False)
    ended = []
    monkeypatch.setattr(async_compile, "_pool_set", [SimpleNamespace(shutdown=lambda: ended.append(os.environ.copy()))])
    passes.install()
    passes.install()
    assert [environment[passes.VARIABLE] for environment in ended] == ["1"]


def test_workers_that_begin_early_stay(monkeypatch):
    monkeypatch.delenv(passes.VARIABLE, raising=False)
    seen = []
    monkeypatch.setattr(passes, "maybe_warm_pool", lambda: seen.append(os.environ[passes.VARIABLE]))
    monkeypatch.setattr(passes, "shutdown_compile_workers", lambda: seen.append("shut down"))
    passes.start_compile_workers()
    passes.install()
    assert seen == ["1"]


def test_caches_tell_versions_of_the_passes_apart(monkeypatch):
    """By the text of all files of the package: graphs hold kernels, too."""
    passes.install()
    uuid = config.joint_custom_pre_pass.uuid()
    assert uuid == config.joint_custom_pre_pass.uuid() and isinstance(uuid[0], bytes)
    monkeypatch.setattr(passes, "get_hash_for_files", lambda files: {Path(file) for file in files})
    assert config.joint_custom_pre_pass.uuid() == ({*FOLDER.parent.rglob("*.py")},)


def test_every_pass_is_called():
    """There is one or more in every file but those of helpers."""
    found = {one.__module__.rpartition(".")[2] for one in (*passes.JOINT, *passes.POST_GRAD)}
    helpers = ("__init__", "nodes", "passes")
    assert sorted([*found, *helpers]) == sorted(path.stem for path in FOLDER.glob("*.py"))
