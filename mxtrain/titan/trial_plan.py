"""A trial of a model's plan of tensor parallelism, for ``mxtrain doctor --model``: refuses what training would refuse.

Which parts a plan makes, only the plan knows: those of shared experts, of stacked experts, and of a user's own model.
So the plan splits the model, on the meta device and in a process group that sends nothing.
"""

import copy
import inspect
import math
from unittest.mock import patch

import torch
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain.conversion.layers import find_gates
from mxtrain.titan.parallelize import check_gates, plans_with_own_styles
from mxtrain.titan.repairs.replicas import Layout


def try_plan(model: torch.nn.Module, job_config) -> None:
    """Split a converted model on the meta device by the job's degree of tensor parallelism. The model is then split.

    Raises:
        ConfigError: training would refuse to split the model.
    """
    degrees = job_config.parallelism
    tensor, expert = degrees.tensor_parallel_degree, degrees.expert_parallel_degree
    expert_tensor = degrees.expert_tensor_parallel_degree
    if tensor == 1:
        return
    processes = math.lcm(tensor, expert * expert_tensor)
    parallelize = inspect.unwrap(get_train_spec(job_config.model.name).parallelize_fn)  # without checks of the machine
    # On a CPU: a mesh of GPUs may not span more or other numbers of them than this machine has.
    on_cpu = patch("torchtitan.distributed.parallel_dims.device_type", "cpu")
    torch.distributed.init_process_group("fake", rank=0, world_size=processes)
    try:
        dims = Layout(
            dp_replicate=1,
            dp_shard=processes // tensor,
            cp=1,
            tp=tensor,
            pp=1,
            ep=expert,
            etp=expert_tensor,
            world_size=processes,
        )
        gates = find_gates(model)
        with on_cpu, plans_with_own_styles() as inner:
            parallelize(model, dims, _only_splitting(job_config))
        check_gates(tensor, gates, inner)
    finally:
        torch.distributed.destroy_process_group()


def _only_splitting(job_config):
    """Return the job without what is done to a model after it is split."""
    job_config = copy.deepcopy(job_config)
    job_config.compile.enable = False
    job_config.activation_checkpoint.mode = "none"
    job_config.parallelism.enable_async_tensor_parallel = False
    return job_config
