"""Stages of pipelines in which passes that find out shapes do not count as training, and the loss of the last stage."""

from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from mxtrain.nn.experts import kept_buffers
from mxtrain.rng.rounding import set_rounding_chunk

FINDS_SHAPES_AGAIN = hasattr(PipelineStage, "_post_metadata_inference_cleanup")
"""
Whether stages may exchange other shapes in validation than in training, and be validated before they train: not in
PyTorch 2.11, whose buffers of a first validation take no gradients
"""


class Stage(PipelineStage):
    """A stage that draws other random bits for every chunk, and whose shape-finding passes leave no trace.

    PyTorch finds the shapes that stages exchange with real passes on arbitrary numbers: before the first step, and from
    2.13 on whenever training changes to validation and back. So a position that counts forwards would differ in a
    resumed run. The passes would also count tokens for the load balance of experts.
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
            result = super()._prepare_forward_infra(*args, **kwargs)
        finally:
            Stage.finds_shapes = False
        if not FINDS_SHAPES_AGAIN:  # the pass was a forward only
            self._kept.close()
        return result

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        # Only now: the backward of a pass still needs the buffers of its forward.
        self._kept.close()


def loss_of_last_stage(
    losses: list[torch.Tensor] | None, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    """The sum of the losses of all chunks, fp32 [], on all ranks of a pipeline, ``group``.

    Args:
        losses: of this rank's last stage; None on ranks of other stages.
    """
    total = torch.zeros((), device=device)
    if losses is not None:
        own = torch.stack(losses).detach().sum()
        total += (own.full_tensor() if isinstance(own, DTensor) else own).to(device)  # with loss parallel a DTensor
    dist.all_reduce(total, group=group)  # adds zeros, and 0 + NaN is NaN
    return total
