from contextlib import nullcontext

import pytest
import torch.nn as nn
from torchtitan.distributed import ParallelDims

from mxtrain import ConfigError
from mxtrain.titan.parallel import parallelize
from mxtrain.titan.parallel.parallelize import check_gates, check_layout, checked_parallelize, checked_pipeline
from mxtrain.titan.parallel.replicate import Layout
from mxtrain.titan.parse import parse_job_config


def dims(processes=1, kind=Layout, **degrees):
    usual = dict.fromkeys(["dp_replicate", "cp", "tp", "pp", "ep", "etp"], 1)
    return kind(**{**usual, "dp_shard": -1, **degrees, "world_size": processes})


def job(converters, **degrees):
    flags = [f"--parallelism.{name}_degree={degree}" for name, degree in degrees.items()]
    return parse_job_config([f"--model.converters={converters}", *flags])


@pytest.mark.parametrize("kind", ["data_parallel_replicate", "pipeline_parallel"])
def test_replicas_and_pipelines_need_mxtrains_trainer(kind):
    degree = {"data_parallel_replicate": "dp_replicate", "pipeline_parallel": "pp"}[kind]
    check_layout(dims(2, **{degree: 2}), job("mxnorm", **{kind: 2}))
    with pytest.raises(ConfigError, match=f"{kind}_degree = 2 .*has wrong gradients .*: train with -m mxtrain.train"):
        check_layout(dims(2, ParallelDims, **{degree: 2}), job("mxnorm", **{kind: 2}))


def test_hsdp_works_with_any_trainer():
    check_layout(dims(4, ParallelDims, dp_replicate=2), job("mxnorm", data_parallel_replicate=2))


def test_tensor_parallelism_works_with_every_converter():
    for converters in ("mxnorm", "mx_linear", "fused_rmsnorm", "fused_rmsnorm,mxnorm"):
        check_layout(dims(4), job(converters, tensor_parallel=4))


def test_gates_outside_of_a_boundary_are_refused():
    gate = nn.Linear(8, 4)
    check_gates(2, {"router.gate": gate}, {gate})
    with pytest.raises(
        ConfigError, match="tensor_parallel_degree = 2 gives router.gate wrong gradients, .*: allowed is 1$"
    ):
        check_gates(2, {"router.gate": gate}, set())


@pytest.mark.parametrize("tensor, is_refused", [(2, True), (1, False)])
def test_a_model_with_a_gate_that_no_style_reaches_is_refused_under_tensor_parallelism(monkeypatch, tensor, is_refused):
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.top_k = nn.Linear(8, 4, bias=False), 2

    monkeypatch.setattr(parallelize, "note_model", lambda *args: None)
    monkeypatch.setattr(parallelize, "describe_model", lambda *args: None)
    monkeypatch.setattr(parallelize.torch.distributed, "get_backend", lambda: "fake")
    monkeypatch.setattr(parallelize, "choose_gathers", lambda *args: None)
    monkeypatch.setattr(parallelize, "draw_by_name", lambda *args: None)
    wrapped = checked_parallelize(lambda model, dims, job: model)
    model = nn.ModuleDict({"router": Router()})
    with pytest.raises(ConfigError, match="router.gate wrong gradients") if is_refused else nullcontext():
        wrapped(model, dims(2, tp=tensor), job("mxnorm", tensor_parallel=tensor))


def test_fsdp_and_one_process_are_fine():
    check_layout(dims(), job("mxnorm"))
    check_layout(dims(8), job("mxnorm"))


@pytest.mark.parametrize(
    "wrap, degree, name",
    [(checked_parallelize, "data_parallel_replicate", "dp_replicate"), (checked_pipeline, "pipeline_parallel", "pp")],
)
def test_the_layout_is_checked_before_the_model_is_touched(wrap, degree, name):
    touched = []
    wrapped = wrap(lambda model, dims, job: touched.append(model))
    with pytest.raises(ConfigError, match=f"{degree}_degree = 2"):
        wrapped("model", dims(2, ParallelDims, **{name: 2}), job("mxnorm", **{degree: 2}))
    assert not touched
