"""Gives the optimizer of a resumed run the settings of the job config, where a checkpoint has put those of its run.

A checkpoint holds the optimizer's learning rate, betas and so on in its parameter groups, and the base learning rate
in its scheduler. TorchTitan 0.2.2 restores them, so that a changed setting has no effect. The schedule itself (warmup,
decay, number of steps) is a function that the job config makes anew; only the number of steps done is restored.
"""

from typing import NamedTuple

import torch


class LearningRates(NamedTuple):
    """Of the next step."""

    kept: float
    """As the checkpoint has it"""
    present: float
    """As the settings have it"""


def apply_settings(optimizers, lr_schedulers) -> LearningRates:
    """Set what the job config decides in every parameter group. Call after a checkpoint was loaded.

    Values that are the same as in the checkpoint stay the same to the last bit.

    Args:
        optimizers: TorchTitan's ``OptimizersContainer``.
        lr_schedulers: TorchTitan's ``LRSchedulersContainer``, with one ``LambdaLR`` per optimizer.
    """
    kept = optimizers.optimizers[0].param_groups[0]["lr"]
    for optimizer, scheduler in zip(optimizers.optimizers, lr_schedulers.schedulers, strict=True):
        _apply(optimizer, scheduler)
    return LearningRates(float(kept), float(optimizers.optimizers[0].param_groups[0]["lr"]))


def _apply(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR) -> None:
    base = optimizer.defaults["lr"]
    for group, schedule in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        # ``defaults`` are the arguments of this process's optimizer. Loading a checkpoint leaves them alone.
        group.update({name: value for name, value in optimizer.defaults.items() if name != "lr"})
        group["initial_lr"] = base
        group["lr"] = base * schedule(scheduler.last_epoch)  # as LambdaLR computes it
        if group["fused"]:
            _move_steps(optimizer, group["params"])
    scheduler.base_lrs = [base] * len(optimizer.param_groups)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]  # what TorchTitan logs


def _move_steps(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> None:
    """Put the step counts where a fused optimizer needs them: others keep them on the CPU."""
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        if "step" in state:
            state["step"] = state["step"].to(parameter.device)
