"""mxtrain's trainer: TorchTitan's with what ``TrainingRun`` adds, and right gradients of replicas and pipelines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan import train as titan
from torchtitan.config import JobConfig

from mxtrain.checkpoints.checkpointer import Checkpointer
from mxtrain.nn.experts import kept_buffers
from mxtrain.titan.pipeline_stage import Stage, loss_of_last_stage
from mxtrain.titan.training_run import TrainingRun
from mxtrain.titan.v02.context_parallel import correct_max_loss, tokens_of_other_ranks
from mxtrain.titan.v02.parallelize import Layout

_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class Trainer(TrainingRun, titan.Trainer):
    """See ``TrainingRun``."""

    def _build(self) -> None:
        job_config = self.job_config
        own = {"CheckpointManager": partial(Checkpointer, self), "ParallelDims": Layout}
        own["ensure_pp_loss_visible"] = lambda *args: None  # which warns that rank 0 does not know it
        with (
            patch.multiple(titan, **own),
            patch.object(type(job_config), "maybe_log", JobConfig.maybe_log, create=True),
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


# Fault: a pipeline's loss is not divided by the tokens before its backward. Mended in TorchTitan 0.3.0. PyTorch's
# schedules split a batch into chunks, and run the backward of the loss of each chunk. In TorchTitan 0.2.2 that loss is
# not divided by the number of tokens, and only the last stage knows it. The two classes correct both.


class LossPerToken:
    """A loss function whose result can be divided by a number of tokens before the backward.

    Args:
        loss_fn: (prediction, labels) -> sum of the losses of all tokens, fp32 [].
    """

    def __init__(self, loss_fn: Callable[..., torch.Tensor]):
        self.loss_fn = loss_fn
        self._tokens: float | torch.Tensor = 1.0

    def __call__(self, prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss_fn(prediction, labels) / self._tokens

    @contextmanager
    def divided_by(self, tokens: float | torch.Tensor) -> Iterator[None]:
        """Divide by ``tokens``, the tokens of the whole global batch, inside of the context."""
        self._tokens = tokens
        try:
            yield
        finally:
            self._tokens = 1.0


class SharedLoss:
    """A pipeline schedule that reports the loss of the last stage on the ranks of all stages.

    Args:
        schedule: PyTorch's schedule.
        has_last_stage: whether the last stage is on this rank.
        group: the ranks of one pipeline.
        device: where the loss is.
        parts: number of parts of every sequence in context parallelism. The validator counts the tokens of one part.
    """

    def __init__(self, schedule, has_last_stage: bool, group: dist.ProcessGroup, device: torch.device, parts: int):
        self._schedule, self._has_last_stage, self._group = schedule, has_last_stage, group
        self._device, self._parts = device, parts

    def step(self, *args, target: torch.Tensor, losses: list[torch.Tensor], **kwargs) -> None:
        """Run all forwards and backwards, and append the sum of the chunks' losses, fp32 [], to ``losses``."""
        self._run(self._schedule.step, args, target, losses, kwargs)

    def eval(self, *args, target: torch.Tensor, losses: list[torch.Tensor], **kwargs) -> None:
        """Run all forwards, and append the sum of the chunks' losses over ``parts``, fp32 [], to ``losses``."""
        self._run(self._schedule.eval, args, target, losses, {**kwargs, "return_outputs": False})
        losses[-1] = losses[-1] / self._parts

    def _run(self, run: Callable, args: tuple, target: torch.Tensor, losses: list[torch.Tensor], kwargs: dict) -> None:
        own: list[torch.Tensor] | None = [] if self._has_last_stage else None
        run(*args, target=target if self._has_last_stage else None, losses=own, **kwargs)
        losses.append(loss_of_last_stage(own, self._group, self._device))


def share_loss(trainer) -> LossPerToken:
    """Give the trainer and its validator a schedule that shares its loss. Return the loss function, to be divided."""
    dims, loss = trainer.parallel_dims, LossPerToken(trainer.loss_fn)
    trainer.pp_schedule._loss_fn = loss
    group = dims.get_mesh("pp").get_group()
    schedule = SharedLoss(trainer.pp_schedule, trainer.pp_has_last_stage, group, trainer.device, dims.cp)
    for user in (trainer, trainer.validator) if trainer.job_config.validation.enable else (trainer,):
        user.pp_schedule, user.pp_has_last_stage = schedule, True
    return loss
