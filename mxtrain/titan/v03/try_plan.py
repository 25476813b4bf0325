"""Tensor parallelism of a model without data, before a run."""

import torch
from torch.distributed.device_mesh import init_device_mesh

from mxtrain.titan.converters import convert_on_meta
from mxtrain.titan.v03.config import trainer_config
from mxtrain.titan.v03.models import model_spec
from mxtrain.titan.v03.parallelize import TP, split_layers


def try_plan(job_config) -> None:
    """Split a job's converted model on the meta device by its degree of tensor parallelism, without other processes.

    Raises:
        ConfigError: training would refuse to split the model.
    """
    degrees = job_config.parallelism
    if (processes := degrees.tensor_parallel_degree) == 1:
        return
    spec = model_spec(job_config)
    parts = dict.fromkeys(("metrics", "tokenizer", "dataloader", "checkpoint", "validator"))
    spec.model.update_from_config(config=trainer_config(job_config, spec, parts))
    with torch.device("meta"):
        model = spec.model.build()
    convert_on_meta(job_config, model)
    torch.distributed.init_process_group("fake", rank=0, world_size=processes)
    try:
        mesh = init_device_mesh("cpu", (processes,), mesh_dim_names=(TP.value,))
        split_layers(model, mesh, degrees.expert_parallel_degree > 1)
    finally:
        torch.distributed.destroy_process_group()
