"""Fault: a pipeline's loss is not divided by the tokens before its backward. Mended in TorchTitan 0.3.0.

PyTorch's schedules split a batch into chunks, and run the backward of the loss of each chunk. In TorchTitan 0.2.2 that
loss is not divided by the number of tokens, and only the last stage knows it. This file corrects both.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mxtrain.titan.pipeline_stage import loss_of_last_stage


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
