"""The shards that ``mxtrain doctor --model`` counts are those of training."""

import pytest
import torch
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain.cli import doctor_model
from mxtrain.titan.converters import convert_on_meta
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.v02.engine import build_on_meta
from mxtrain.titan.v02.parallelize import Layout
from tests.support.forked import forking_context


def shards_of_titan(results):
    """Shard the debug model for 7 processes that do not exist; put the bytes of this one's weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.models.llama3.infra.parallelize import apply_fsdp

    torch.distributed.init_process_group("fake", rank=0, world_size=7)
    model = build_on_meta(parse_job_config(["--model.flavor=debugmodel"]))
    expected = doctor_model.shard_bytes(model, 7, torch.float32)
    mesh = init_device_mesh("cpu", (7,), mesh_dim_names=("fsdp",))
    apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    results.put((expected, sum(p.to_local().numel() * 4 for p in model.parameters())))


def shards_of_70b(results):
    """Split two layers of the 70B model for its 64 processes, as training does; put the bytes of this one's weights."""
    torch.distributed.init_process_group("fake", rank=0, world_size=64)
    job_config = parse_job_config(
        ["--job.config_file=train_configs/llama3_70b.toml", "--model_args.n_layers=2", "--compile.no-enable"]
    )
    model = build_on_meta(job_config)
    convert_on_meta(job_config, model)
    expected = doctor_model.shard_bytes(model, 4, torch.float32, tensor=8)
    layout = Layout(dp_replicate=1, dp_shard=4, cp=1, tp=8, pp=2, ep=1, etp=1, world_size=64)
    get_train_spec("llama3").parallelize_fn(model, layout, job_config)
    results.put((expected, sum(p.to_local().numel() * 4 for p in model.parameters())))


@pytest.mark.parametrize("shards", [shards_of_titan, shards_of_70b])
def test_shards_are_those_of_training(shards):
    context = forking_context()
    results = context.Queue()
    process = context.Process(target=shards, args=(results,))
    process.start()
    expected, found = results.get(timeout=120)
    process.join()
    assert expected == found
