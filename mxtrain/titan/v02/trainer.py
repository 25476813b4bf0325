"""mxtrain's trainer: TorchTitan's with what ``TrainingRun`` adds, and right gradients of replicas and pipelines."""

from functools import partial
from unittest.mock import patch

import torch
from torchtitan import train as titan
from torchtitan.config import JobConfig

from mxtrain.checkpoints.checkpointer import Checkpointer
from mxtrain.nn.experts import kept_buffers
from mxtrain.titan.training_run import TrainingRun
from mxtrain.titan.v02.parallelize import Layout


class Trainer(TrainingRun, titan.Trainer):
    """See ``TrainingRun``."""

    def _build(self) -> None:
        own = {"CheckpointManager": partial(Checkpointer, self), "ParallelDims": Layout}
        own["ensure_pp_loss_visible"] = lambda *args: None  # which warns that rank 0 does not know it
        with (
            patch.multiple(titan, **own),
            patch.object(type(self.job_config), "maybe_log", JobConfig.maybe_log, create=True),
        ):
            titan.Trainer.__init__(self, self.job_config)
        self.metrics_processor.log = partial(self._log_right_maximum, self.metrics_processor.log)
        if self.job_config.validation.enable:
            # Tokens of a validation would count for the next step's load balance of experts.
            self.validator.validate = kept_buffers(self.model_parts)(self.validator.validate)

    def batch_generator(self, data_iterable):
        """Yield batches, and count the tokens of this rank.

        Fault: context parallelism counts the tokens of a sequence on every rank. Mended in TorchTitan 0.3.0. All ranks
        of a context-parallel group read the same sequences, and each computes a part of every sequence. TorchTitan
        counts whole sequences on every rank where it adds up the ranks' counts, or divides a part's loss by the tokens
        of whole sequences. Texts have no tokens without a label, so all parts have the same number of tokens.
        """
        for inputs, labels in super().batch_generator(data_iterable):
            self.ntokens_seen -= labels.numel() - labels.numel() // self.parallel_dims.cp
            yield inputs, labels

    def _log_right_maximum(self, log, step, global_avg_loss, global_max_loss, *args, **kwargs) -> None:
        """Log, and take the largest loss for that of a part, divided by the tokens of whole sequences."""
        log(step, global_avg_loss, global_max_loss * self.parallel_dims.cp, *args, **kwargs)

    def _forward_and_backward(self, *, global_valid_tokens, **kwargs) -> torch.Tensor:
        if self.parallel_dims.pp_enabled:
            with self.pp_schedule.loss_fn.divided_by(global_valid_tokens):
                return super()._forward_and_backward(global_valid_tokens=1.0, **kwargs)
        return super()._forward_and_backward(global_valid_tokens=global_valid_tokens, **kwargs)
