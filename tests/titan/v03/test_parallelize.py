"""Conversion of TorchTitan 0.3's models."""

import pytest
import torch
import torch.nn as nn
from torchtitan.protocols.module import Module

from mxtrain import MXNorm, MXNormLinear
from mxtrain.nn.experts import QuantizedExperts
from mxtrain.titan.converters import convert_on_meta
from mxtrain.titan.engine import engine
from mxtrain.titan.job_config import parse_job_config


def converted(*flags: str) -> tuple[nn.Module, dict]:
    job = parse_job_config([*flags])
    model = engine().build_on_meta(job)
    return model, convert_on_meta(job, model)


# As under 0.2.2.
HEADLINES = {
    "llama3 debugmodel": "12 norms and 42 linears swapped, 2 kept; 90.7 %",
    "qwen3 debugmodel": "16 norms and 56 linears swapped, 18 kept; 98.4 %",
    "qwen3 debugmodel_moe_16": "8 norms, 16 linears, 4 stacks of experts and 4 gates swapped, 10 kept; 89.7 %",
    "deepseek_v3 debugmodel": "18 norms, 42 linears, 5 stacks of experts and 5 gates swapped, 2 kept; 98.1 %",
}


@pytest.mark.parametrize("flavor", HEADLINES)
def test_what_is_swapped(flavor):
    name, flavor_name = flavor.split()
    model, plans = converted(f"--model.name={name}", f"--model.flavor={flavor_name}", "--model.converters=mxnorm")
    assert plans["mxnorm"].headline.startswith(HEADLINES[flavor])
    model.verify_module_protocol()


def test_swapped_modules_keep_what_torchtitan_has_set_on_them():
    model, _ = converted("--model.flavor=debugmodel", "--model.converters=mxnorm,fused_norm")
    layer = model.layers["0"]
    norm, linear = layer.attention_norm, layer.attention.qkv_linear.wq
    assert isinstance(norm, MXNorm) and isinstance(linear, MXNormLinear)
    assert isinstance(norm, Module) and linear._param_init["weight"] is not None
    assert type(layer.attention_norm) is type(model.layers["1"].ffn_norm), "one class for torch.compile"
    assert norm.fqn == "layers.0.attention_norm"


def test_experts_have_the_seeds_of_022():
    model, _ = converted("--model.name=qwen3", "--model.flavor=debugmodel_moe_16", "--model.converters=mxnorm")
    experts = model.layers["0"].moe.routed_experts.inner_experts
    assert isinstance(experts, QuantizedExperts) and experts.fed_by == (model.layers["0"].ffn_norm,)
    assert [w.shape for w in experts.weights] == [torch.Size(s) for s in ((16, 256, 256),) * 3]
