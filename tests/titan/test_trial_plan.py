"""Plans of tensor parallelism, tried on the meta device without the processes."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel
from torchtitan.models.llama3.infra import parallelize as plans
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain import ConfigError
from mxtrain.titan import trial_plan
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.models.describe import build_on_meta, convert_on_meta
from mxtrain.titan.trial_plan import try_plan

LLAMA3 = "--model.name=llama3 --model.flavor=debugmodel --model.converters=mxnorm"
EXPERTS = "--model.name=deepseek_v3 --model.flavor=debugmodel --model.converters=mx_linear"
HIGH_ATTENTION = f"{EXPERTS} --mxnorm.filter_fqns=attention,output"
TP, EP, ETP = (f"--parallelism.{kind}_parallel_degree" for kind in ("tensor", "expert", "expert_tensor"))


def converted(flags: str):
    job = parse_job_config(flags.split())
    model = build_on_meta(job)
    convert_on_meta(job, model)
    return model, job


@pytest.mark.parametrize(
    "flags, message",
    [
        (f"{LLAMA3} {TP}=16", "degree = 16 splits out_features = 256 of attention.wq into parts that are not whole bl"),
        (
            f"{EXPERTS} {TP}=2",
            "degree = 2 splits attention.wkv_a by NoParallel, .* it is an MXLinear: allowed is 1, or",
        ),
        (
            f"{HIGH_ATTENTION} {TP}=4 --model_args.moe_inter_dim=96",
            "= 4 splits out_features = 192 of moe.shared_experts.w1 into parts that are not whole blocks of 32",
        ),
        (
            f"{HIGH_ATTENTION},shared_experts {TP}=4 {EP}=4 {ETP}=4 --model_args.moe_inter_dim=40",
            "= 4 splits the 40 hidden features of every expert into parts that are not multiples of 8",
        ),
    ],
)
def test_a_plan_that_training_refuses_is_refused(flags, message):
    model, job = converted(flags)
    with pytest.raises(ConfigError, match=message) as raised:
        try_plan(model, job)
    assert "\n" not in str(raised.value) and not torch.distributed.is_initialized()


@pytest.mark.parametrize("degrees", [f"{TP}=4", f"{TP}=4 {EP}=8", f"{TP}=2 {EP}=4 {ETP}=2", f"{TP}=2 {EP}=2"])
def test_a_plan_that_fits_splits_the_model(degrees):
    model, job = converted(f"{HIGH_ATTENTION} {degrees}")
    try_plan(model, job)
    weight = model.layers["0"].feed_forward.w1.weight
    assert weight.is_meta and weight.to_local().shape[0] < weight.shape[0]
    assert not torch.distributed.is_initialized()


def test_the_plan_of_a_users_own_model_is_followed(monkeypatch):
    """Whatever the names of its linears."""
    model, job = converted(f"{LLAMA3} {TP}=16")
    split = []

    def parallelize(model, parallel_dims, job_config):
        plan = {"0.feed_forward.w2": ColwiseParallel()}
        split.append(plans.parallelize_module(model.layers, parallel_dims.get_mesh("tp"), plan))

    spec = replace(get_train_spec("llama3"), parallelize_fn=parallelize)
    monkeypatch.setattr(trial_plan, "get_train_spec", lambda name: spec)
    with pytest.raises(ConfigError, match="= 16 splits out_features = 256 of 0.feed_forward.w2 into parts"):
        try_plan(model, job)
    assert not split
