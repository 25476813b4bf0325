from types import SimpleNamespace

import pytest
import torch.nn as nn

from mxtrain import ConfigError
from mxtrain.titan.parallelize import check_layout, check_routers, checked_parallelize


def dims(replicate=1, fsdp=False, tp=1):
    return SimpleNamespace(
        dp_replicate=replicate,
        dp_replicate_enabled=replicate > 1,
        fsdp_enabled=fsdp,
        tp=tp,
        tp_enabled=tp > 1,
    )


def job(*converters):
    return SimpleNamespace(model=SimpleNamespace(converters=list(converters)))


def test_ddp_is_refused_and_hsdp_is_not():
    with pytest.raises(ConfigError, match="data_parallel_replicate_degree = 2 without sharding is DDP"):
        check_layout(dims(replicate=2), job())
    check_layout(dims(replicate=2, fsdp=True), job("mxnorm"))


def test_tensor_parallelism_is_refused_for_swapped_modules_only():
    for converter in ("mxnorm", "mx_linear"):
        with pytest.raises(ConfigError, match=f"tensor_parallel_degree = 4 does not work with converter '{converter}'"):
            check_layout(dims(tp=4), job("quantize.linear.float8", converter))
        with pytest.raises(ConfigError, match=f"does not work with converter '{converter}'"):
            check_layout(dims(tp=4), job("fused_rmsnorm", converter))
    check_layout(dims(tp=4), job("quantize.linear.float8"))
    check_layout(dims(tp=4), job("fused_rmsnorm"))


class TokenRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)


def test_tensor_parallelism_is_refused_for_mixtures_of_experts():
    experts, dense = nn.Sequential(TokenRouter()), nn.Sequential(nn.Linear(8, 4))
    with pytest.raises(ConfigError, match="tensor_parallel_degree = 2 gives routers of experts wrong gradients"):
        check_routers(dims(tp=2), experts)
    check_routers(dims(tp=2), dense)
    check_routers(dims(fsdp=True), experts)


def test_fsdp_and_one_process_are_fine():
    check_layout(dims(), job("mxnorm"))
    check_layout(dims(fsdp=True), job("mxnorm"))


def test_the_layout_is_checked_before_the_model_is_touched():
    touched = []
    parallelize = checked_parallelize(lambda model, dims, job: touched.append(model))
    with pytest.raises(ConfigError, match="tensor_parallel_degree = 2"):
        parallelize("model", dims(tp=2), job("mxnorm"))
    assert not touched
