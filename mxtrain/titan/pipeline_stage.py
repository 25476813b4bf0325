"""Stages of pipelines in which passes that find out shapes do not count as training."""

from contextlib import ExitStack

from torch.distributed.pipelining import PipelineStage

from mxtrain.nn.buffers import kept_buffers
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
