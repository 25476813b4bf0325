"""The optimizer of a resumed run: all its states, and the settings of the job where a checkpoint has those of its run.

A checkpoint holds the optimizer's learning rate, betas and so on in its parameter groups, and the base learning rate
in its scheduler. TorchTitan 0.2.2 restores them, so that a changed setting has no effect. The schedule itself (warmup,
decay, number of steps) is a function that the job config makes anew; only the number of steps done is restored.
"""

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful

_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


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


def apply_settings(optimizers, lr_schedulers) -> tuple[float, float]:
    """Set what the job config decides in every parameter group. Call after a checkpoint was loaded.

    Values that are the same as in the checkpoint stay the same to the last bit.

    Args:
        optimizers: TorchTitan's ``OptimizersContainer``.
        lr_schedulers: TorchTitan's ``LRSchedulersContainer``, with one ``LambdaLR`` per optimizer.

    Returns:
        The learning rate of the next step as the checkpoint has it, and as the settings have it.
    """
    first = optimizers.optimizers[0].param_groups[0]
    kept = float(first["lr"])
    for optimizer, scheduler in zip(optimizers.optimizers, lr_schedulers.schedulers, strict=True):
        _apply(optimizer, scheduler)
    return kept, float(first["lr"])


def _apply(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR) -> None:
    base = optimizer.defaults["lr"]
    for group, schedule in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        # ``defaults`` are the arguments of this process's optimizer. Loading a checkpoint leaves them alone.
        group.update({name: value for name, value in optimizer.defaults.items() if name != "lr"})
        group["initial_lr"] = base
        group["lr"] = base * schedule(scheduler.last_epoch)  # as LambdaLR computes it
        if group["fused"]:  # the step counts must be where the parameters are; others keep them on the CPU
            for parameter in group["params"]:
                if "step" in (state := optimizer.state.get(parameter, {})):
                    state["step"] = state["step"].to(parameter.device)
    rates = [group["lr"] for group in optimizer.param_groups]
    # "_last_lr" is what TorchTitan logs.
    scheduler.load_state_dict(scheduler.state_dict() | {"base_lrs": [base] * len(rates), "_last_lr": rates})
