from types import SimpleNamespace

import pytest
import torch.nn as nn

from mxtrain import ConfigError
from mxtrain.titan.parallel.parallelize import check_layout, check_routers, checked_parallelize, checked_pipeline
from mxtrain.titan.parse import parse_job_config


def dims(processes=1, tp=1):
    return SimpleNamespace(world_size=processes, tp=tp, tp_enabled=tp > 1)


def job(converters, **degrees):
    flags = [f"--parallelism.{name}_degree={degree}" for name, degree in degrees.items()]
    return parse_job_config([f"--model.converters={converters}", *flags])


def test_ddp_is_refused_and_hsdp_is_not():
    with pytest.raises(ConfigError, match="data_parallel_replicate_degree = 2 without sharding is DDP"):
        check_layout(dims(2), job("", data_parallel_replicate=2))
    check_layout(dims(4), job("mxnorm", data_parallel_replicate=2))


def test_tensor_parallelism_works_with_every_converter():
    for converters in ("mxnorm", "mx_linear", "fused_rmsnorm", "fused_rmsnorm,mxnorm"):
        check_layout(dims(4), job(converters, tensor_parallel=4))


class TokenRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)


def test_tensor_parallelism_is_refused_for_mixtures_of_experts():
    experts, dense = nn.Sequential(TokenRouter()), nn.Sequential(nn.Linear(8, 4))
    with pytest.raises(ConfigError, match="tensor_parallel_degree = 2 gives routers of experts wrong gradients"):
        check_routers(dims(tp=2), experts)
    check_routers(dims(tp=2), dense)
    check_routers(dims(2), experts)


def test_fsdp_and_one_process_are_fine():
    check_layout(dims(), job("mxnorm"))
    check_layout(dims(8), job("mxnorm"))


@pytest.mark.parametrize(
    "wrap, degree", [(checked_parallelize, "data_parallel_replicate"), (checked_pipeline, "pipeline_parallel")]
)
def test_the_layout_is_checked_before_the_model_is_touched(wrap, degree):
    touched = []
    wrapped = wrap(lambda model, dims, job: touched.append(model))
    with pytest.raises(ConfigError, match=f"{degree}_degree = 2"):
        wrapped("model", dims(2), job("mxnorm", **{degree: 2}))
    assert not touched
