"""The state of a run with ``optimizer.early_step_in_backward``, which has one optimizer per parameter.

TorchTitan 0.2.2 takes one optimizer per part of the model, so its checkpoints hold the state of the first parameter
only, and all others would resume without moments.
"""

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.optimizer import OptimizersInBackwardContainer

_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class EarlySteps(Stateful):
    """Saves and loads all optimizers of TorchTitan's container."""

    def __init__(self, optimizers: OptimizersInBackwardContainer):
        (self._model,) = optimizers.model_parts  # a pipeline is refused with this setting
        self._optimizers = optimizers.optimizers

    def state_dict(self) -> dict:
        return get_optimizer_state_dict(self._model, self._optimizers, options=_BY_NAME)

    def load_state_dict(self, state_dict: dict) -> None:
        set_optimizer_state_dict(self._model, self._optimizers, optim_state_dict=state_dict, options=_BY_NAME)
