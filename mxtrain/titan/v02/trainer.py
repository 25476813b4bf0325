"""mxtrain's trainer: TorchTitan's with what ``TrainingRun`` adds, and right gradients of replicas and pipelines."""

from functools import partial
from unittest.mock import patch

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan import train as titan

from mxtrain.checkpoints.checkpointer import Checkpointer
from mxtrain.nn.buffers import kept_buffers
from mxtrain.titan.pipeline_stage import Stage
from mxtrain.titan.training_run import TrainingRun
from mxtrain.titan.v02.repairs.context_parallel import correct_max_loss, tokens_of_other_ranks
from mxtrain.titan.v02.repairs.pipeline import share_loss
from mxtrain.titan.v02.repairs.replicas import Layout

_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class Trainer(TrainingRun, titan.Trainer):
    """See ``TrainingRun``."""

    def _build(self) -> None:
        job_config = self.job_config
        own = {"CheckpointManager": partial(Checkpointer, self), "ParallelDims": Layout}
        own["ensure_pp_loss_visible"] = lambda *args: None  # which warns that rank 0 does not know it
        with (
            patch.multiple(titan, **own),
            patch("torchtitan.distributed.pipeline_parallel.PipelineStage", Stage),
        ):
            titan.Trainer.__init__(self, job_config)
        correct_max_loss(self.metrics_processor, self.parallel_dims.cp)
        if job_config.optimizer.early_step_in_backward:
            self.checkpointer.states["optimizer"] = EarlySteps(self.optimizers)
        if self.parallel_dims.pp_enabled:
            self._loss = share_loss(self)
        if job_config.validation.enable:
            # Tokens of a validation would count for the next step's load balance of experts.
            self.validator.validate = kept_buffers(self.model_parts)(self.validator.validate)

    def batch_generator(self, data_iterable):
        for inputs, labels in super().batch_generator(data_iterable):
            self.ntokens_seen -= tokens_of_other_ranks(labels, self.parallel_dims.cp)
            yield inputs, labels

    def _forward_and_backward(self, *, global_valid_tokens, **kwargs) -> torch.Tensor:
        if self.parallel_dims.pp_enabled:
            with self._loss.divided_by(global_valid_tokens):
                return super()._forward_and_backward(global_valid_tokens=1.0, **kwargs)
        return super()._forward_and_backward(global_valid_tokens=global_valid_tokens, **kwargs)


class EarlySteps(Stateful):
    """Saves and loads all optimizers of a run with ``optimizer.early_step_in_backward``: one per parameter.

    TorchTitan 0.2.2 takes one optimizer per part of the model, so its checkpoints hold the state of the first parameter
    only, and all others would resume without moments.

    Args:
        optimizers: TorchTitan's ``OptimizersInBackwardContainer``.
    """

    def __init__(self, optimizers):
        (self._model,) = optimizers.model_parts  # a pipeline is refused with this setting
        self._optimizers = optimizers.optimizers

    def state_dict(self) -> dict:
        return get_optimizer_state_dict(self._model, self._optimizers, options=_BY_NAME)

    def load_state_dict(self, state_dict: dict) -> None:
        set_optimizer_state_dict(self._model, self._optimizers, optim_state_dict=state_dict, options=_BY_NAME)
