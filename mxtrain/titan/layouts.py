"""What both releases of TorchTitan do to a parallelized model, and to the stages and the loss of a pipeline.

A parallelized model learns what norms and experts send, runs FSDP2 on gloo, and draws weights that fit every layout.
"""

from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torchtitan.tools import utils

from mxtrain.checkpoints.terminal import note
from mxtrain.errors import ConfigError, one_line
from mxtrain.nn.experts import kept_buffers
from mxtrain.parallel.activation_checkpoint import multiply_one_by_one
from mxtrain.parallel.expert_dispatch import choose_exchange
from mxtrain.parallel.fsdp_gather import CodeGather
from mxtrain.parallel.initial_weights import draw_by_name, plain_name, shared_seed
from mxtrain.parallel.tensor_parallel import choose_gathers
from mxtrain.rng.rounding import set_rounding_chunk
from mxtrain.settings.mxnorm_section import FSDP_GATHER, quantizing_among

HAS_PIPELINES = hasattr(PipelineStage, "_post_metadata_inference_cleanup")
"""Whether stages may be validated, and before they train: not in PyTorch 2.11, whose buffers of a first validation take
no gradients"""


def finish_layout(
    model: nn.Module, parallel_dims, job_config, is_selective: bool, renamed: Callable[[str], str] = plain_name
) -> None:
    """Tell the swapped layers of a parallelized model its layout, and let it draw weights that fit every layout.

    Args:
        is_selective: whether activation checkpointing keeps the results of operations.
        renamed: gives the name by which a weight is drawn.
    """
    if quantizing_among(job_config.model.converters):
        if parallel_dims.tp_enabled:
            choose_gathers(model, job_config.mxnorm.gather)
        if parallel_dims.ep_enabled:
            choose_exchange(model, job_config.mxnorm.dispatch)
    if is_selective:
        multiply_one_by_one(model)
    if dist.get_backend() == "gloo":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # FSDP2 expresses TorchTitan's gradient sum, scaled by 1, as PREMUL_SUM, which gloo lacks.
                module.set_force_sum_reduction_for_comms(True)
    draw_by_name(model, shared_seed(parallel_dims, job_config.debug.seed), torch.device(utils.device_type), renamed)


def code_gather(job_config, parts: list[nn.Module], parallel_dims) -> CodeGather | None:
    """Let FSDP gather weights as codes, if a job wants it and FSDP shards anything; tell the user what FSDP gathers."""
    section, shards = job_config.mxnorm, parallel_dims.dp_shard * parallel_dims.cp
    if section.fsdp_gather != "quantized" or not quantizing_among(job_config.model.converters):
        return None
    if shards == 1:
        return note(f"{FSDP_GATHER} has no effect: FSDP does not shard")
    # TorchTitan 0.3 splits no expert.
    of_experts = shards * parallel_dims.tp // (parallel_dims.ep * getattr(parallel_dims, "etp", 1))
    found = CodeGather(parts, shards, of_experts if parallel_dims.ep_enabled else shards)
    note(str(found))
    return found


class Stage(PipelineStage):
    """A stage that draws other random bits for every chunk, and whose shape-finding passes leave no trace.

    PyTorch finds the shapes that stages exchange with real passes on arbitrary numbers: before the first step, and
    whenever training changes to validation and back. So a position that counts forwards would differ in a resumed run.
    The passes would also count tokens for the load balance of experts.
    """

    finds_shapes = False
    """Whether a stage of this process now runs a forward that finds out shapes"""

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        if self.has_backward:
            set_rounding_chunk(fwd_chunk_id, self.chunks)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def _prepare_forward_infra(self, *args, **kwargs):
        self._kept = ExitStack()
        self._kept.enter_context(kept_buffers([self.submod]))
        Stage.finds_shapes = True
        try:
            return super()._prepare_forward_infra(*args, **kwargs)
        finally:
            Stage.finds_shapes = False

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        # Only now: the backward of a pass still needs the buffers of its forward.
        self._kept.close()


def build_pipeline(build: Callable[[], tuple], parallel_dims, device: torch.device) -> tuple:
    """Return the schedule, parts and ends that TorchTitan's ``pipelining_fn`` gives, here called as ``build``.

    Its stages are ``Stage``. Every rank counts as the last one, because the schedule gives all of them its loss.
    """
    with patch("torchtitan.distributed.pipeline_parallel.PipelineStage", Stage):
        try:
            schedule, parts, has_first_stage, has_last_stage = build()
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"parallelism: {one_line(error)}") from error
    group = parallel_dims.get_mesh("pp").get_group()
    return SharedLoss(schedule, has_last_stage, group, device), parts, has_first_stage, True


class SharedLoss:
    """A pipeline schedule, PyTorch's, that reports the loss of the last stage on the ranks of all stages, ``group``."""

    def __init__(self, schedule, has_last_stage: bool, group: dist.ProcessGroup, device: torch.device):
        self._schedule, self._has_last_stage, self._group, self._device = schedule, has_last_stage, group, device

    def step(self, *args, **kwargs) -> None:
        """Run all forwards and backwards, and append the sum of the chunks' losses, fp32 [], to ``losses``."""
        self._run(self._schedule.step, args, **kwargs)

    def eval(self, *args, **kwargs) -> None:
        """Run all forwards, and append the sum of the chunks' losses, fp32 [], to ``losses``."""
        self._run(self._schedule.eval, args, **kwargs, return_outputs=False)

    def _run(self, run: Callable, args: tuple, losses: list[torch.Tensor], **kwargs) -> None:
        if not self._has_last_stage:  # "target", or "target_mbs" in 0.3
            kwargs = {name: None if name.startswith("target") else value for name, value in kwargs.items()}
        own: list[torch.Tensor] | None = [] if self._has_last_stage else None
        run(*args, losses=own, **kwargs)
        total = torch.zeros((), device=self._device)
        if own is not None:
            loss = torch.stack(own).detach().sum()
            total += (loss.full_tensor() if isinstance(loss, DTensor) else loss).to(self._device)  # with loss parallel
        dist.all_reduce(total, group=self._group)  # adds zeros, and 0 + NaN is NaN
        losses.append(total)
