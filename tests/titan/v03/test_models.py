"""Models under TorchTitan 0.3 are those of 0.2.2."""

import pytest
import torch

from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.v03.models import FLAVORS, model_spec
from mxtrain.titan.v03.parallelize import name_in_022

# Counted in the models of TorchTitan 0.2.2.
PARAMETERS = {
    "llama3 debugmodel": 6_163_712,
    "llama3 125M": 135_285_504,
    "llama3 1B": 1_498_482_688,
    "llama3 3.2-1B": 1_235_814_400,
    "llama3 3.2-3B": 3_212_749_824,
    "llama3 8B": 8_030_261_248,
    "llama3 70B": 70_553_706_496,
    "qwen3 debugmodel": 31_987_968,
    "qwen3 debugmodel_moe": 315_758_848,
    "qwen3 debugmodel_moe_16": 15_223_552,
    "qwen3 0.6B": 596_049_920,
    "qwen3 1.7B": 1_720_574_976,
    "qwen3 4B": 4_022_468_096,
    "qwen3 8B": 8_190_735_360,
    "qwen3 14B": 14_768_307_200,
    "qwen3 32B": 32_762_123_264,
    "qwen3 30B-A3B": 30_532_122_624,
}


def model_of(name: str, flavor: str, *flags: str) -> torch.nn.Module:
    job = parse_job_config([f"--model.name={name}", f"--model.flavor={flavor}", "--model.converters=", *flags])
    with torch.device("meta"):
        return model_spec(job).model.build()


@pytest.mark.parametrize("flavor", PARAMETERS)
def test_flavors_have_as_many_parameters(flavor):
    model = model_of(*flavor.split())
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[flavor]


def test_every_flavor_is_built():
    for name in FLAVORS:
        for flavor in FLAVORS[name]:
            assert len(model_of(name, flavor, "--model_args.n_layers=3").layers) == 3


def test_sizes_are_those_of_the_settings():
    flags = ("--model_args.n_layers=3", "--model_args.hidden_dim=512", "--data.vocab_size=320", "--training.seq_len=64")
    model = model_of("llama3", "debugmodel", *flags)
    assert len(model.layers) == 3 and model.lm_head.weight.shape == (320, 256)
    assert model.layers["0"].feed_forward.w2.in_features == 512 and len(model.layers["0"].attention.rope.cache) >= 64
    mixture = model_of("deepseek_v3", "debugmodel", "--model_args.num_experts=4", "--model_args.top_k=2")
    moe = mixture.layers["1"].moe
    assert moe.router.top_k == 2 and len(moe.routed_experts.inner_experts.w1_EFD) == 4
    assert mixture.layers["0"].feed_forward is not None


def test_parameters_have_the_names_of_022():
    names = {name_in_022(name) for name, _ in model_of("deepseek_v3", "debugmodel").named_parameters()}
    assert {"output.weight", "layers.1.moe.experts.w2", "layers.1.moe.router.gate.weight"} <= names
    assert {"layers.1.moe.shared_experts.w1.weight", "layers.0.attention.wkv_a.weight"} <= names
    names = {name_in_022(name) for name, _ in model_of("qwen3", "debugmodel").named_parameters()}
    assert {"layers.0.attention.wq.weight", "layers.0.attention.q_norm.weight"} <= names
    assert not any(word in name for name in names for word in ("qkv", "_E", "lm_head"))
