"""What mxtrain adds to TorchTitan's parallelize functions: layouts whose gradients would be wrong are refused, and
FSDP2 is made to work over gloo."""

import functools

import torch
from torch.distributed.fsdp import FSDPModule

from mxtrain.conversion.recognition import has_router
from mxtrain.errors import ConfigError
from mxtrain.titan.converters import QUANTIZING_CONVERTERS


def checked_parallelize(parallelize_fn):
    """``parallelize_fn``, after a check of the layout, and ready for process groups on CPU."""

    @functools.wraps(parallelize_fn)
    def parallelize(model, parallel_dims, job_config):
        check_layout(parallel_dims, job_config)
        check_routers(parallel_dims, model)
        model = parallelize_fn(model, parallel_dims, job_config)
        if torch.distributed.get_backend() == "gloo":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    # TorchTitan asks for a sum scaled by 1, which FSDP2 expresses as PREMUL_SUM, and gloo lacks that.
                    module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize


def check_layout(parallel_dims, job_config) -> None:
    """Raise ConfigError for a layout in which gradients would differ from those of one process.

    TorchTitan 0.2.2 divides the loss by the number of tokens in all ranks, and so needs gradients summed. DDP averages
    them: with two replicas the gradient norm is half of what it should be.
    """
    if parallel_dims.dp_replicate_enabled and not parallel_dims.fsdp_enabled:
        raise ConfigError(
            f"parallelism.data_parallel_replicate_degree = {parallel_dims.dp_replicate} without sharding is DDP, which "
            "averages gradients that TorchTitan 0.2.2 needs summed; use FSDP: data_parallel_shard_degree = -1, alone "
            "or (HSDP) greater than 1 beside the replicate degree"
        )
    swapped = [name for name in job_config.model.converters if name in QUANTIZING_CONVERTERS]
    if parallel_dims.tp_enabled and swapped:
        raise ConfigError(
            f"parallelism.tensor_parallel_degree = {parallel_dims.tp} does not work with converter {swapped[0]!r}: "
            "allowed is 1"
        )


def check_routers(parallel_dims, model) -> None:
    """Raise ConfigError for a mixture of experts in a layout in which its routers would get wrong gradients.

    With tensor parallelism every rank finds its part of the gradient of a gate's logits, and TorchTitan 0.2.2 takes it
    for the whole: after one step gates are off by a tenth, whatever the converter.
    """
    if parallel_dims.tp_enabled and has_router(model):
        raise ConfigError(
            f"parallelism.tensor_parallel_degree = {parallel_dims.tp} gives routers of experts wrong gradients in "
            "TorchTitan 0.2.2: allowed is 1; use expert parallelism, expert_parallel_degree, or FSDP"
        )


def refuse_pipeline(model, parallel_dims, *args, **kwargs):
    """Stands for TorchTitan's pipelining function. Always raises ConfigError.

    With two stages TorchTitan 0.2.2 misses the division by the number of tokens, and the gradient norm comes out
    about a thousand times too large.
    """
    raise ConfigError(
        f"parallelism.pipeline_parallel_degree = {parallel_dims.pp} gives wrong gradients in TorchTitan 0.2.2 "
        "(the division by the number of tokens is missed): allowed is 1"
    )
