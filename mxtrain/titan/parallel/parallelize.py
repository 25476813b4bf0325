"""mxtrain's additions to TorchTitan's parallelize functions.

They refuse layouts with wrong gradients, split swapped modules in tensor parallelism, let selective activation
checkpointing know mxtrain's operations, run FSDP2 on gloo, and draw initial weights that fit every layout.
"""

import functools
from contextlib import nullcontext

import torch
from torch.distributed.fsdp import FSDPModule

from mxtrain.conversion.recognition import find_gates
from mxtrain.errors import ConfigError
from mxtrain.settings.machine import Machine, check_machine
from mxtrain.settings.mxnorm_section import quantizing_among
from mxtrain.titan.parallel.activation_checkpoint import knows_own_operations, multiply_one_by_one
from mxtrain.titan.parallel.check_layout import check_model_layout
from mxtrain.titan.parallel.context import prepare_context_parallelism
from mxtrain.titan.parallel.initial_weights import draw_by_name
from mxtrain.titan.parallel.plans import plans_with_own_styles
from mxtrain.titan.parallel.replicate import Layout
from mxtrain.titan.parallel.tensor_parallel import DEGREE, choose_gathers
from mxtrain.titan.parallel.tied_weights import shared_group
from mxtrain.titan.parse import settings_of
from mxtrain.titan.reports.facts import describe_model
from mxtrain.titan.reports.terminal import note_model


def checked_parallelize(parallelize_fn):
    """Wrap ``parallelize_fn``: check the layout first, and show the model.

    The model that it returns works on CPU process groups, and draws initial weights that no layout changes.
    """

    @functools.wraps(parallelize_fn)
    def parallelize(model, parallel_dims, job_config):
        check_layout(parallel_dims, job_config)
        prepare_context_parallelism(parallel_dims, job_config)
        if not parallel_dims.pp_enabled:
            note_model(describe_model(job_config, model))  # here, while the model is whole
        gates = find_gates(model) if parallel_dims.tp_enabled else {}
        plans = plans_with_own_styles() if parallel_dims.tp_enabled else nullcontext(set())
        with shared_group(model), plans as inner, knows_own_operations():
            model = parallelize_fn(model, parallel_dims, job_config)
        check_gates(parallel_dims.tp, gates, inner)
        if parallel_dims.tp_enabled and quantizing_among(job_config.model.converters):
            choose_gathers(model, job_config.mxnorm.gather)
        checkpointing = job_config.activation_checkpoint
        if checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op":
            multiply_one_by_one(model)
        if torch.distributed.get_backend() == "gloo":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    # FSDP2 expresses TorchTitan's gradient sum, scaled by 1, as PREMUL_SUM, which gloo lacks.
                    module.set_force_sum_reduction_for_comms(True)
        draw_by_name(model, parallel_dims, job_config.debug.seed)
        return model

    return parallelize


def check_gates(processes: int, gates: dict[str, torch.nn.Module], inner: set[torch.nn.Module]) -> None:
    """Raise ConfigError for a gate that is not one of the ``inner`` modules, those within mixtures of experts.

    Each of the ``processes`` of tensor parallelism would take its part of the gradient of such a gate for the whole.
    """
    for fqn, gate in gates.items():
        if gate not in inner:
            raise ConfigError(
                f"{DEGREE} = {processes} gives {fqn} wrong gradients, because no module around it has the style "
                "PrepareModuleInputOutput with output_layouts = Partial(): allowed is 1"
            )


def checked_pipeline(pipelining_fn):
    """Wrap ``pipelining_fn``: check the layout first, and show the model."""

    @functools.wraps(pipelining_fn)
    def pipeline(model, parallel_dims, job_config, *args, **kwargs):
        check_layout(parallel_dims, job_config)
        note_model(describe_model(job_config, model))  # here, while the model is not yet split into stages
        return pipelining_fn(model, parallel_dims, job_config, *args, **kwargs)

    return pipeline


def check_layout(parallel_dims, job_config) -> None:
    """Raise ConfigError for a layout that does not fit the processes or the model, or that gives wrong gradients."""
    settings = settings_of(job_config)
    machine = Machine(parallel_dims.world_size, torch.cuda.is_available())
    check_machine(settings, machine)
    check_model_layout(settings, machine.has_gpus)
    if not isinstance(parallel_dims, Layout):
        check_torchtitans_own(parallel_dims)


def check_torchtitans_own(parallel_dims) -> None:
    """Raise ConfigError for a layout that has wrong gradients with ``-m torchtitan.train``.

    Nobody divides a pipeline's loss by the number of tokens there, and replicas average their gradients
    (``mxtrain.titan.parallel.replicate``).
    """
    if parallel_dims.pp_enabled:
        setting = f"pipeline_parallel_degree = {parallel_dims.pp}"
    elif parallel_dims.dp_replicate_enabled and not parallel_dims.fsdp_enabled:
        setting = f"data_parallel_replicate_degree = {parallel_dims.dp_replicate} without sharding"
    else:
        return
    raise ConfigError(f"parallelism.{setting} has wrong gradients in TorchTitan 0.2.2: train with -m mxtrain.train")
