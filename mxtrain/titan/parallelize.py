"""mxtrain's additions to TorchTitan's parallelize functions: refuse layouts with wrong gradients, run FSDP2 on gloo."""

import functools

import torch
from torch.distributed.fsdp import FSDPModule

from mxtrain.conversion.recognition import has_router
from mxtrain.errors import ConfigError
from mxtrain.titan.converters import QUANTIZING_CONVERTERS
from mxtrain.titan.metrics import describe_model
from mxtrain.titan.terminal import note_model


def checked_parallelize(parallelize_fn):
    """Wrap ``parallelize_fn``: check the layout first, show the model, and make FSDP2 work on CPU process groups."""

    @functools.wraps(parallelize_fn)
    def parallelize(model, parallel_dims, job_config):
        check_layout(parallel_dims, job_config)
        check_routers(parallel_dims, model)
        note_model(describe_model(job_config, model))  # here, while the model is whole
        model = parallelize_fn(model, parallel_dims, job_config)
        if torch.distributed.get_backend() == "gloo":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    # FSDP2 expresses TorchTitan's gradient sum, scaled by 1, as PREMUL_SUM, which gloo lacks.
                    module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize


def check_layout(parallel_dims, job_config) -> None:
    """Raise ConfigError for a layout whose gradients would differ from the gradients of one process.

    TorchTitan 0.2.2 divides the loss by the number of tokens on all ranks, so gradients must be summed. DDP averages
    them: with two replicas the gradient norm is half of the correct value.
    """
    if parallel_dims.dp_replicate_enabled and not parallel_dims.fsdp_enabled:
        raise ConfigError(
            f"parallelism.data_parallel_replicate_degree = {parallel_dims.dp_replicate} without sharding is DDP, which "
            "averages gradients, but TorchTitan 0.2.2 needs their sum; use FSDP: data_parallel_shard_degree = -1, "
            "alone or (HSDP) greater than 1 beside the replicate degree"
        )
    swapped = [name for name in job_config.model.converters if name in QUANTIZING_CONVERTERS]
    if parallel_dims.tp_enabled and swapped:
        raise ConfigError(
            f"parallelism.tensor_parallel_degree = {parallel_dims.tp} does not work with converter {swapped[0]!r}: "
            "allowed is 1"
        )


def check_routers(parallel_dims, model) -> None:
    """Raise ConfigError for a mixture of experts in a layout that gives its routers wrong gradients.

    With tensor parallelism every rank computes a part of the gradient of the gate's logits. TorchTitan 0.2.2 takes
    this part for the whole gradient: after one step gates are off by a tenth, with every converter and without.
    """
    if parallel_dims.tp_enabled and has_router(model):
        raise ConfigError(
            f"parallelism.tensor_parallel_degree = {parallel_dims.tp} gives routers of experts wrong gradients in "
            "TorchTitan 0.2.2: allowed is 1; use expert parallelism, expert_parallel_degree, or FSDP"
        )


def refuse_pipeline(model, parallel_dims, *args, **kwargs):
    """Take the place of TorchTitan's pipelining function and raise ConfigError.

    With two stages TorchTitan 0.2.2 does not divide by the number of tokens, and the gradient norm is about a
    thousand times too large.
    """
    raise ConfigError(
        f"parallelism.pipeline_parallel_degree = {parallel_dims.pp} gives wrong gradients in TorchTitan 0.2.2 "
        "(it does not divide by the number of tokens): allowed is 1"
    )
