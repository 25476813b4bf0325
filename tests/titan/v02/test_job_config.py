"""Degrees of parallelism against the sizes of a model."""

import pytest

from mxtrain import ConfigError
from mxtrain.settings.read import read_settings
from mxtrain.titan.job_config import check_model_layout


def check(flags: str) -> None:
    check_model_layout(read_settings(["--model.converters=mxnorm", *flags.split()]))


CP, TP, PP, EP = (f"--parallelism.{kind}_parallel_degree" for kind in ("context", "tensor", "pipeline", "expert"))
LLAMA3_8B, QWEN3_8B = "--model.name=llama3 --model.flavor=8B", "--model.name=qwen3 --model.flavor=8B"
EXPERTS = "--model.name=deepseek_v3 --model.flavor=16B"
ETP = "--parallelism.expert_tensor_parallel_degree"
PTRR = "--parallelism.context_parallel_load_balancer=ptrr"


@pytest.mark.parametrize(
    "flags",
    [
        f"{LLAMA3_8B} {TP}=8 {PP}=4 {CP}=2",
        f"{QWEN3_8B} {TP}=4 {PP}=2",
        f"--model.name=qwen3 --model.flavor=30B-A3B {TP}=4 {EP}=8 {PP}=2",
        f"{EXPERTS} {EP}=8",
    ],
)
def test_layouts_that_fit_the_model(flags):
    check(flags)


@pytest.mark.parametrize(
    "flags, message",
    [
        (f"{LLAMA3_8B} {TP}=64", "tensor_parallel_degree = 64 does not divide the 32 heads of llama3 8B"),
        (f"{LLAMA3_8B} {TP}=16", "tensor_parallel_degree = 16 does not divide the 8 key-value heads of llama3 8B"),
        (
            f"--model.name=qwen3 --model.flavor=0.6B {PP}=2",
            "pipeline_parallel_degree = 2 separates the embedding of qwen3 0.6B from the head, .*: allowed is 1",
        ),
        (f"{LLAMA3_8B} {EP}=2", "expert_parallel_degree = 2 needs experts, which llama3 8B does not have"),
        (f"{EXPERTS} {EP}=3", "expert_parallel_degree = 3 does not divide the 64 experts of deepseek_v3 16B"),
        (
            f"--model.name=llama3 --model.flavor=debugmodel_varlen_attn {CP}=2",
            "context_parallel_degree = 2 works with attention 'sdpa', and llama3 debugmodel_varlen_attn has 'varlen'",
        ),
        (
            f"{LLAMA3_8B} {CP}=2 {PTRR}",
            "context_parallel_load_balancer = 'ptrr' is not supported: allowed is 'headtail'",
        ),
        (f"{EXPERTS} {TP}=2 {EP}=2 {ETP}=2", "expert_tensor_parallel_degree = 2 is not supported: .* allowed is 1"),
        (
            f"--model.name=qwen3 --model.flavor=0.6B {TP}=8",
            "tensor_parallel_degree = 8 makes two weights of the one that .* qwen3 0.6B share .*: allowed is 1, or",
        ),
    ],
)
def test_one_line_says_what_does_not_fit(flags, message):
    with pytest.raises(ConfigError, match=message) as raised:
        check(flags)
    assert "\n" not in str(raised.value) and str(raised.value).startswith("parallelism.")


def test_shards_of_any_width_without_quantization():
    check(f"--model.name=llama3 --model.flavor=debugmodel --model.converters=fused_norm {TP}=16")


def test_llama3s_flavors_have_whole_blocks_on_a_node():
    for flavor in ("1B", "8B", "70B", "405B"):
        check(f"--model.name=llama3 --model.flavor={flavor} {TP}=8")
    check(f"--model.name=llama3 --model.flavor=125M {TP}=4")
